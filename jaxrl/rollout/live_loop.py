"""Decodes requests that arrive at any time, each with its own settings.

    submit_all --> waiting --> [decode loop: queue --> slot] --> Decoded, Decoded, ... --> listener
                   cancel                    cancel

A live loop has no thread. It is turned by one thread of every process:

    turn     takes what has arrived, decodes up to W tokens in every slot, calls the listeners
    renew    between two turns: decodes on with other weights

Requests may name frozen weights, which share the programs and have slots of their own.

Requests come in at the first process, from any of its threads, and their listeners are there. In every turn
the first process sends new requests and cancellations to all others. So all processes dispatch the same
programs.

A sampling key depends only on the request's options and seed and the sample's index. So an answer does not
depend on other requests.

W tokens of a dispatch   T tokens of a prompt
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_loop import Decoded, DecodeLoop, End
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.sampling import SamplingOptions, truncation_of
from jaxrl.rollout.stop_strings import StopSearch

_LOG = logging.getLogger(__name__)

# The version of frozen weights: their tokens are never the oldest.
_AGELESS = int(np.iinfo(np.int32).max)


class LiveError(RuntimeError):
    """The request was not answered. Errors that are the sender's fault are `UserError`s."""


class Overloaded(LiveError):
    """Too many samples are waiting; the sender may try again later."""


class Stopped(LiveError):
    """Requests are no longer answered."""


class NotFinite(LiveError):
    """The model's log-probabilities are not finite: its weights are broken, or overflow on this prompt."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and the samples to draw for it, all with the same options.

    Attributes:
      prompt: int32 [T].
      max_tokens: maximum number of tokens per sample, end-of-sequence included.
      seed: seed of the sampling keys, 0 to 2**31 - 1. It takes the place of the prompt's id in them.
      options: how tokens are drawn.
      adapter: number of the adapter, see `samples.Start`.
      weights: name of the frozen weights that answer; "" for those that `renew` changes.
    """

    prompt: np.ndarray
    max_tokens: int
    seed: int
    options: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    adapter: int = 0
    weights: str = ""


@dataclasses.dataclass(frozen=True)
class LiveCounts:
    """What a loop has to do, and has done since it was made.

    Attributes:
      waiting: samples that wait.
      running: samples in the decode loop.
      sampled: tokens that were sampled.
      prompt: tokens of prompts, each counted once for the samples of a request.
      known: those of `prompt` that earlier requests had in the cache.
      stopped, full: samples that have ended with a stop, and at their limit.
    """

    waiting: int
    running: int
    sampled: int
    prompt: int
    known: int
    stopped: int
    full: int


# Called by the thread that turns the loop, with the tokens of each sample in order, or with one error as the
# last event. It must return at once and must not raise.
Listener: TypeAlias = Callable[[Decoded | LiveError], None]


@dataclasses.dataclass
class _OpenRequest:
    """A request with a listener, and the number of its samples that have not ended."""

    listener: Listener
    unfinished: int


class Order(Protocol):
    """Decides which waiting requests start in a dispatch; `dataflows.schedule.RequestOrder` is one."""

    def starting(self, waiting: Sequence[int]) -> Sequence[int] | None:
        """Seeds of those of them that start, by their seeds; None to wait for others first."""
        ...

    def note(self, seeds: Sequence[int]) -> None:
        """Notes a dispatch, in which the requests of these seeds start."""
        ...


class LiveLoop:
    """A decode loop for requests that arrive while it runs.

    Methods marked *collective* are called by one thread of every process, in the same order. The others may
    be called by any thread of the first process.

    Attributes:
      order: which requests start in a dispatch, on the first process; None for all that have arrived.
    """

    order: Order | None = None

    def __init__(
        self,
        engine: Engine,
        params: Params,
        stops: StopSearch,
        *,
        version: int = 0,
        max_waiting: int = 10_000,
        frozen: Mapping[str, Params] = MappingProxyType({}),
    ):
        """Makes an empty loop. Device memory is first taken by `turn`.

        Args:
          engine, params, stops, version: those of the decode loop.
          max_waiting: maximum number of samples that wait for a slot; more are refused.
          frozen: weights that never change, by name, in the generation layout.
        """
        self._engine = engine
        self.max_waiting = max_waiting
        self._numbers = itertools.count()
        # Shared between threads of the first process; guarded by the condition.
        self._changed = threading.Condition()
        self._waiting: dict[int, Request] = {}
        self._num_waiting = 0
        self._open: dict[int, _OpenRequest] = {}
        self._cancelled: list[int] = []
        self._accepting = True
        # The same on every process, by the name of the weights. The owner of a sample is the ticket of its
        # request.
        self._weights = {"": params, **frozen}
        self._loops = {
            name: DecodeLoop(
                engine,
                weights,
                stops,
                version=_AGELESS if name else version,
                streams=True,
                # Reuse rounds differently, and what is known depends on earlier requests.
                reuse_prefixes=not engine.config.deterministic,
            )
            for name, weights in self._weights.items()
        }
        self._in_loop: dict[Sample, DecodeLoop] = {}
        self._sampled = 0
        self._ended: collections.Counter[End] = collections.Counter()

    @property
    def accepting(self) -> bool:
        return self._accepting

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of waiting samples and of samples in the decode loop."""
        return self._num_waiting, len(self._in_loop)

    @property
    def counts(self) -> LiveCounts:
        """The load, and the numbers of tokens so far."""
        loops, ended = self._loops.values(), self._ended
        prompt = sum(loop.prompt_tokens for loop in loops)
        tokens = (self._sampled, prompt, sum(loop.known_tokens for loop in loops))
        full = ended[End.FULL]
        return LiveCounts(*self.load, *tokens, ended.total() - full, full)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that is too long or too large.

        Seed, temperature and stop strings are checked where requests come in (`openai.protocol`).
        """
        options = request.options
        limits = jax.tree.leaves(options.truncation)
        assert all(isinstance(x, np.generic) for x in limits), "a truncation is of host scalars"
        config, model = self._engine.config, self._engine.model
        prompt, max_tokens = request.prompt, request.max_tokens
        longest, most = config.max_prompt_tokens, config.max_response_tokens
        vocabulary = model.num_tokens or model.vocab_size
        if not 0 < len(prompt) <= longest:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; this server takes 1 to {longest}: "
                f"{'shorten it' if len(prompt) else 'write one'}"
            )
        # After the length: an empty prompt has no minimum.
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise UserError(
                f"the prompt has token ids from {prompt.min()} to {prompt.max()}; this model's go from 0 to "
                f"{vocabulary - 1}: use its own tokenizer"
            )
        if not 0 < max_tokens <= most:
            raise UserError(
                f"max_tokens {max_tokens}: this server gives 1 to {most}; ask for as many"
            )
        if len(prompt) + max_tokens > config.max_context_tokens:
            raise UserError(
                f"{len(prompt)} tokens of the prompt and max_tokens {max_tokens}: this server has room for "
                f"{config.max_context_tokens} together; shorten one of them"
            )
        if options.edits is not None:
            assert hosts.num_processes() == 1, "other processes are not sent grammars"
            unknown = [i for i in options.edits.bias if not 0 <= i < vocabulary]
            if unknown:
                raise UserError(
                    f"logit_bias has token id {unknown[0]}; this model's go from 0 to {vocabulary - 1}: use "
                    "its own tokenizer"
                )
        if options.num_samples < 1:
            raise UserError(f"{options.num_samples} samples of a prompt; ask for 1 or more")

    def submit(self, request: Request, listener: Listener) -> int:
        """Queues a request.

        Args:
          request: the request.
          listener: function called with the answer, turn by turn.

        Returns:
          A ticket, for `cancel`.

        Raises:
          UserError: the request can never be served.
          Overloaded: too many samples are waiting.
          Stopped: requests are no longer accepted.
        """
        return self.submit_all([(request, listener)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Listener]]) -> list[int]:
        """Queues either all of the requests or none of them; see `submit`."""
        assert hosts.is_first(), "requests come in at the first process"
        # All before any is queued, and without the lock: a refused call leaves nothing.
        for request, _ in requests:
            self.check(request)
        wanted = sum(request.options.num_samples for request, _ in requests)
        if wanted > self.max_waiting:
            raise UserError(
                f"{wanted} samples at once, and no more than {self.max_waiting} may wait; ask for fewer"
            )
        with self._changed:
            if not self._accepting:
                raise Stopped("the server is stopping and takes no requests")
            if self._num_waiting + wanted > self.max_waiting:
                raise Overloaded(
                    f"{self._num_waiting} samples wait already and {wanted} would come on top, but no more "
                    f"than {self.max_waiting} may; come again later"
                )
            tickets = []
            for request, listener in requests:
                ticket = next(self._numbers)
                self._open[ticket] = _OpenRequest(listener, request.options.num_samples)
                self._waiting[ticket] = request
                tickets.append(ticket)
            self._num_waiting += wanted
            self._changed.notify_all()
        return tickets

    def cancel(self, ticket: int) -> None:
        """Ends a request and frees its slots with the next turn. Ignores a request that has ended."""
        with self._changed:
            # Results that come later find no listener.
            if self._open.pop(ticket, None) is None:
                return
            if ticket in self._waiting:
                self._num_waiting -= self._waiting.pop(ticket).options.num_samples
            else:
                self._cancelled.append(ticket)
            self._changed.notify_all()

    def refuse(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, and waits up to `grace_s` seconds until open ones have ended."""
        with self._changed:
            self._accepting = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open, grace_s)

    # Collective

    def turn(self, *, wait_s: float = 0.0) -> bool:
        """Starts new requests, decodes up to W tokens in every slot, and calls the listeners. Collective.

        Args:
          wait_s: seconds to wait for a request if there is nothing to do.

        Returns:
          Whether any slot has decoded, the same on every process.

        Raises:
          jax.errors.JaxRuntimeError: a device has failed, which may have destroyed the slots; call `clear`.
        """

        def taken():
            cancelled, found = self._take(wait_s)
            plain = [(ticket, _to_plain(request)) for ticket, request in found or ()]
            return cancelled, None if found is None else plain

        # Not as JSON: grammars (`SamplingOptions.edits`) cannot be sent, and one process needs no copy.
        if hosts.num_processes() == 1:
            cancelled, arrived = self._take(wait_s)
        else:
            cancelled, sent = hosts.on_first(taken)
            found = [(ticket, _from_plain(plain)) for ticket, plain in sent or ()]
            arrived = None if sent is None else found
        if arrived is None:
            self._drop(cancelled)
            return False
        new: dict[Sample, DecodeLoop] = {}
        # Equal prompts that arrive together share a prefill.
        starts: dict[tuple[str, int, bool, bytes], Start] = {}
        for ticket, request in arrived:
            scored = request.options.scores_prompt
            key = (request.weights, request.adapter, scored, request.prompt.tobytes())
            scores = [] if scored else None
            start = starts.setdefault(key, Start(request.prompt, request.adapter, scores))
            new |= dict.fromkeys(_samples_of(ticket, request, start), self._loops[request.weights])
        # First, so that `clear` finds them if a device fails.
        self._in_loop |= new
        self._drop(cancelled)
        for sample, loop in new.items():
            loop.add([sample])
        if not self._in_loop:
            return False
        if self.order is not None:
            self.order.note([request.seed for _, request in arrived])
        # The devices work for all of them before the host waits for the first.
        for loop in self._loops.values():
            loop.begin()
        for loop in self._loops.values():
            results = loop.finish()
            loop.give_ended()
            self._pass_on(results)
        return True

    def renew(self, params: Params, version: int) -> None:
        """Decodes on with other weights. Collective, between two turns.

        Samples that have started keep their slots and caches. All others start with the new weights alone:
        nothing is reused that older weights have cached. Frozen weights stay, and reuse nothing either, since
        after a restart they could not.
        """
        self._weights[""] = params
        for name, loop in self._loops.items():
            loop.renew(self._weights[name], _AGELESS if name else version)

    def load_adapters(self, adapters: Params) -> None:
        """Gives requests that start from now on a stack of adapters with theirs. Collective.

        Samples at work go on with what is at their places now.
        """
        self._loops[""].load_adapters(adapters)

    def pause(self) -> None:
        """Frees the memory of the slots. The next turn prefills unfinished samples again. Collective."""
        for loop in self._loops.values():
            # Before `clear`, which drops the tokens that only the loop has.
            loop.give_tokens()
            loop.clear()
        for sample, loop in self._in_loop.items():
            # Others keep their `Start`, so that samples of one prompt still share a prefill.
            if len(sample):
                sample.start = Start(sample.sequence, sample.start.adapter)
            loop.add([sample])

    def release_weights(self) -> None:
        """Forgets the weights, so that their memory can be freed before `renew`. Collective.

        Of frozen ones it drops the copies for decoding alone.
        """
        self._weights[""] = None
        for loop in self._loops.values():
            loop.release_weights()

    def clear(self, error: LiveError) -> None:
        """Fails all requests with samples in the decode loop, and frees its slots. Collective.

        Waiting requests go on waiting.
        """
        # A dict, not a set: listeners are called in the order of the samples.
        tickets = dict.fromkeys(sample.owner for sample in self._in_loop)
        self._forget_samples()
        for ticket in tickets:
            self._notify(ticket, error)

    def close(self) -> None:
        """Refuses new requests, ends those that are open with `Stopped`, and frees the slots. Collective."""
        with self._changed:
            self._accepting = False
            self._waiting.clear()
            self._num_waiting = 0
            left, self._open = self._open, {}
            self._changed.notify_all()
        self._forget_samples()
        # Without the lock, which listeners must not hold up.
        for opened in left.values():
            opened.listener(Stopped("the server has stopped before the answer was complete"))

    def _forget_samples(self) -> None:
        self._in_loop.clear()
        for loop in self._loops.values():
            loop.clear()

    def _take(self, wait_s: float) -> tuple[list[int], list[tuple[int, Request]] | None]:
        """Waits for something to do. Returns cancelled tickets, and tickets and requests that start now.

        None in place of the latter if requests have to come first that are not there yet.
        """
        with self._changed:
            if not self._in_loop:
                self._changed.wait_for(
                    lambda: self._waiting or self._cancelled or not self._accepting, wait_s
                )
            cancelled, self._cancelled = self._cancelled, []
            tickets = self._startable()
            if tickets is None:
                self._changed.wait(wait_s)
                return cancelled, None
            # Only few samples are queued inside the decode loop, because dropping one searches the queue.
            going_on = sum(sample.owner not in cancelled for sample in self._in_loop)
            room = (1 + len(self._loops)) * self._engine.config.slots - going_on
            taken = []
            for ticket in tickets:
                if room <= 0:
                    break
                request = self._waiting.pop(ticket)
                room -= request.options.num_samples
                self._num_waiting -= request.options.num_samples
                taken.append((ticket, request))
        return cancelled, taken

    def _startable(self) -> list[int] | None:
        """Tickets of the waiting requests that may start, in order; None while others have to come first."""
        if self.order is None:
            return list(self._waiting)
        seeds = self.order.starting([request.seed for request in self._waiting.values()])
        by_seed: dict[int, list[int]] = collections.defaultdict(list)
        for ticket, request in self._waiting.items():
            by_seed[request.seed].append(ticket)
        # By seed, since a request may have been made twice.
        return (
            None if seeds is None else [n for seed in dict.fromkeys(seeds) for n in by_seed[seed]]
        )

    def _drop(self, tickets: Collection[int]) -> None:
        """Frees the slots of requests, and forgets their samples."""
        dropped = [sample for sample in self._in_loop if sample.owner in tickets]
        for loop in self._loops.values():
            loop.drop([sample for sample in dropped if self._in_loop[sample] is loop])
        for sample in dropped:
            del self._in_loop[sample]

    def _pass_on(self, results: Sequence[Decoded]) -> None:
        """Sends the results of a dispatch to the listeners."""
        broken: dict[int, LiveError] = {}
        for result in results:
            sample, end = result.sample, result.end
            self._sampled += len(result.tokens)
            if end is not None:
                del self._in_loop[sample]
            if not np.isfinite(result.logprob).all():
                broken[sample.owner] = NotFinite(
                    f"the model's log-probabilities are not finite after a sequence of {result.num_before} "
                    "tokens, so there is nothing to sample from; look for NaN or infinity in its weights, or "
                    "try dtype float32"
                )
                continue
            if sample.edits is not None and sample.edits.error:
                broken[sample.owner] = LiveError(sample.edits.error)
                continue
            if end is not None:
                self._ended[end] += 1
            self._notify(sample.owner, result)
        for ticket, error in broken.items():
            _LOG.error("request %d: %s", ticket, error)
            self._notify(ticket, error)
        self._drop(broken)

    def _notify(self, ticket: int, event: Decoded | LiveError) -> None:
        """Calls the listener of a request; forgets the request after its last event."""
        with self._changed:
            opened = self._open.get(ticket)
        # It was cancelled, or this is not the first process, where the listeners are.
        if opened is None:
            return
        # Without the lock, so that other threads can submit while it runs.
        opened.listener(event)
        if isinstance(event, LiveError):
            opened.unfinished = 0
        elif event.end is not None:
            opened.unfinished -= 1
        if not opened.unfinished:
            with self._changed:
                # It may have been cancelled while the listener ran.
                self._open.pop(ticket, None)
                self._changed.notify_all()


def _samples_of(ticket: int, request: Request, start: Start) -> list[Sample]:
    """The samples of a request; they share a prefill."""
    # Samples with equal options are inserted in one call. So the number of samples is not part of them, and
    # the seed takes the place of the prompt's id.
    options = request.options.replace(num_samples=1)
    return [
        Sample(0, index, options.step).request(
            start, request.seed, options, request.max_tokens, ticket
        )
        for index in range(request.options.num_samples)
    ]


def _to_plain(request: Request) -> dict[str, Any]:
    """A request in types of JSON, with which it can be sent to other processes."""
    options = vars(request.options)
    truncation = {name: limit.item() for name, limit in vars(options["truncation"]).items()}
    return {
        **vars(request),
        "prompt": request.prompt.tolist(),
        "options": {**options, "truncation": truncation},
    }


def _from_plain(plain: dict[str, Any]) -> Request:
    """The request that `_to_plain` was given."""
    options = {
        **plain["options"],
        "truncation": truncation_of(**plain["options"]["truncation"]),
        **{name: tuple(plain["options"][name]) for name in ("stop_strings", "stop_ids")},
    }
    prompt = np.array(plain["prompt"], np.int32)
    return Request(**{**plain, "prompt": prompt, "options": SamplingOptions(**options)})
