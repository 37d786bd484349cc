"""Serves requests that arrive at any time, each with its own settings; streams text after each dispatch.

    submit --> waiting --> [decode loop: queue --> slot] --> Delta, Delta, ... --> listener
                cancel                   cancel

One thread feeds the decode loop (`rollout.decode_loop`) and calls the listeners. Any thread may submit and
cancel. A sampling key depends only on the request's seed and the sample's index, so an answer does not depend
on other requests. If a dispatch fails, the requests in the loop fail; waiting ones are still served.

W tokens of a dispatch   R tokens of a delta
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from jaxrl.data.tokenizer import TextStream
from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_loop import Decoded, DecodeLoop, End
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.rollout.stop_strings import StopSearch

STOP, LENGTH = "stop", "length"
_FINISH = {None: "", End.STOP_ID: STOP, End.STOP_STRING: STOP, End.FULL: LENGTH}

_LOG = logging.getLogger(__name__)


class ServingError(RuntimeError):
    """The request was not answered. Errors that are the sender's fault are `UserError`s."""


class Overloaded(ServingError):
    """Too many samples are waiting; the sender may try again later."""


class Stopped(ServingError):
    """The driver no longer answers requests."""


class NotFinite(ServingError):
    """The model's log-probabilities are not finite: its weights are broken, or overflow on this prompt."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and the samples to draw for it, all with the same options.

    Attributes:
      prompt: int32 [T].
      max_tokens: maximum number of tokens per sample, end-of-sequence included.
      seed: seed of the sampling keys, 0 to 2**31 - 1. It takes the place of the prompt's id in them, so that
        requests that differ only in their seeds have equal options and are inserted in one call.
      options: how tokens are drawn. Stop strings are not shown.
    """

    prompt: np.ndarray
    max_tokens: int
    seed: int
    options: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)


@dataclasses.dataclass(frozen=True)
class Delta:
    """Tokens and text that a dispatch has added to a sample.

    Example, with the stop string "\\n": tokens "9", "\\n", text "9", finish "stop".

    Attributes:
      index: index of the sample in its request.
      tokens: int32 [R], including the token that ended the sample.
      logprob: float32 [R], log-probability of each token under the tempered distribution before truncation.
      pieces: text of each of the R tokens; "" for an incomplete character and for special tokens.
      text: text to show now; it lags behind the pieces while a stop string may have begun.
      finish: "stop" or "length" if the sample has ended, else "".
    """

    index: int
    tokens: np.ndarray
    logprob: np.ndarray
    pieces: tuple[str, ...]
    text: str
    finish: str


# Called on the driver's thread, with the deltas of each sample in order, or with one error as the last event.
# It must return at once and must not raise.
Listener: TypeAlias = Callable[[Delta | ServingError], None]


class _Answer(NamedTuple):
    """The request of a sample, and the sample's text."""

    ticket: int
    text: TextStream


@dataclasses.dataclass
class _OpenRequest:
    """A request with a listener, and the number of its samples that have not ended."""

    listener: Listener
    unfinished: int


class OnlineDriver:
    """Serves requests from its own thread until it is closed."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        decode_text: Callable[[np.ndarray], str],
        *,
        max_waiting: int = 10_000,
    ):
        """Starts the thread.

        Args:
          engine, params: engine of the model, and its weights in the generation layout.
          decode_text: function that turns token ids into text.
          max_waiting: maximum number of samples that wait for a slot; more are refused.
        """
        self._engine = engine
        self._decode_text = decode_text
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        # Shared between threads; guarded by the condition.
        self._changed = threading.Condition()
        self._waiting: dict[Sample, None] = {}
        self._open: dict[int, _OpenRequest] = {}
        self._cancelled: list[int] = []
        self._closing = False
        self._stopping = False
        # Used only by the driver's thread.
        self._loop = DecodeLoop(
            engine,
            params,
            StopSearch(decode_text),
            streams=True,
            # Reuse rounds differently, and what is known depends on earlier requests.
            reuse_prefixes=not engine.config.deterministic,
        )
        self._in_loop: dict[Sample, None] = {}
        self._thread = threading.Thread(target=self._serve, name="online-driver", daemon=True)
        self._thread.start()

    def __enter__(self) -> OnlineDriver:
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._closing

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of waiting samples and of samples in the decode loop."""
        return len(self._waiting), len(self._in_loop)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that is too long or too large for this server.

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
        if not 0 < options.num_samples <= self._max_waiting:
            raise UserError(
                f"{options.num_samples} samples of a prompt: this server gives 1 to {self._max_waiting}; ask "
                "for as many"
            )

    def submit(self, request: Request, listener: Listener) -> int:
        """Queues a request.

        Args:
          request: the request.
          listener: function called with the answer, dispatch by dispatch.

        Returns:
          A ticket, for `cancel`.

        Raises:
          UserError: the request can never be served.
          Overloaded: too many samples are waiting.
          Stopped: the driver is closed or has failed.
        """
        return self.submit_all([(request, listener)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Listener]]) -> list[int]:
        """Queues either all of the requests or none of them; see `submit`."""
        for request, _ in requests:
            self.check(request)
        wanted = sum(request.options.num_samples for request, _ in requests)
        with self._changed:
            if not self.alive:
                raise Stopped("the server is stopping and takes no requests")
            if len(self._waiting) + wanted > self._max_waiting:
                raise Overloaded(
                    f"{len(self._waiting)} samples wait already and {wanted} would come on top, but no more "
                    f"than {self._max_waiting} may; come again later"
                )
            tickets = []
            for request, listener in requests:
                ticket = next(self._numbers)
                num_samples, start = request.options.num_samples, Start(request.prompt)
                # Samples of requests that differ in their number alone are inserted in one call, too.
                options = request.options.replace(num_samples=1)
                self._open[ticket] = _OpenRequest(listener, num_samples)
                for index in range(num_samples):
                    answer = _Answer(ticket, TextStream(self._decode_text, options.stop_strings))
                    sample = Sample(0, index, options.step)
                    sample.request(start, request.seed, options, request.max_tokens, answer)
                    self._waiting[sample] = None
                tickets.append(ticket)
            self._changed.notify_all()
        return tickets

    def cancel(self, ticket: int) -> None:
        """Ends a request and frees its slots with the next dispatch. Ignores a request that has ended."""
        with self._changed:
            if self._open.pop(ticket, None) is not None:
                self._cancelled.append(ticket)
                self._changed.notify_all()

    def close(self, grace_s: float = 0.0) -> None:
        """Refuses new requests. Requests not answered within `grace_s` seconds get `Stopped`."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._open, grace_s)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    # The thread

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._stopping or self._waiting or self._cancelled or self._in_loop):
                        self._changed.wait()
                    if self._stopping:
                        return
                try:
                    self._feed()
                    self._pass_on(self._loop.dispatch())
                # Device errors, such as out of memory. They may have destroyed the slots.
                except jax.errors.JaxRuntimeError as error:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    failure = ServingError(f"the engine has failed: {reason}")
                    _LOG.error("%s", failure)
                    self._fail_loop(failure)
        finally:
            # Whatever ended the thread, every open request gets an error.
            with self._changed:
                self._closing = True
                self._waiting.clear()
                left, self._open = self._open, {}
                self._changed.notify_all()
            self._in_loop.clear()
            self._loop.clear()
            for opened in left.values():
                opened.listener(Stopped("the server has stopped before the answer was complete"))

    def _feed(self) -> None:
        """Drops cancelled samples from the loop and adds waiting ones."""
        with self._changed:
            cancelled, self._cancelled = set(self._cancelled), []
            self._forget_waiting(cancelled)
            dropped = [sample for sample in self._in_loop if sample.owner.ticket in cancelled]
            for sample in dropped:
                del self._in_loop[sample]
            # Only few samples are queued inside the loop, because dropping one searches the queue.
            room = 2 * self._engine.config.slots - len(self._in_loop)
            added = list(itertools.islice(self._waiting, max(0, room)))
            for sample in added:
                self._in_loop[sample] = self._waiting.pop(sample)
        self._loop.drop(dropped)
        self._loop.add(added)

    def _forget_waiting(self, tickets: Collection[int]) -> None:
        if tickets:
            for sample in [s for s in self._waiting if s.owner.ticket in tickets]:
                del self._waiting[sample]

    def _pass_on(self, results: Sequence[Decoded]) -> None:
        """Sends the results of a dispatch to the listeners."""
        broken: dict[int, Decoded] = {}
        for result in results:
            sample, end = result.sample, result.end
            if end is not None:
                del self._in_loop[sample]
            if not np.isfinite(result.logprob).all():
                broken[sample.owner.ticket] = result
                continue
            stream = sample.owner.text
            pieces, text = stream.add(result.tokens.tolist())
            if end is not None:
                text += stream.end(at_stop_string=end is End.STOP_STRING)
            tokens, logprob = result.tokens.copy(), result.logprob.copy()
            delta = Delta(sample.index, tokens, logprob, pieces, text, _FINISH[end])
            self._notify(sample.owner.ticket, delta)
        for ticket, result in broken.items():
            error = NotFinite(
                f"the model's log-probabilities are not finite after a sequence of {result.num_before} "
                "tokens, so there is nothing to sample from; look for NaN or infinity in its weights, or try "
                "dtype float32"
            )
            _LOG.error("request %d: %s", ticket, error)
            self._notify(ticket, error)
            # Frees the slots of all its samples before the next dispatch.
            with self._changed:
                self._cancelled.append(ticket)

    def _notify(self, ticket: int, event: Delta | ServingError) -> None:
        """Calls the listener of a request; forgets the request after its last event."""
        with self._changed:
            opened = self._open.get(ticket)
            if opened is None:  # cancelled
                return
            if isinstance(event, ServingError):
                opened.unfinished = 0
            elif event.finish:
                opened.unfinished -= 1
            if not opened.unfinished:
                del self._open[ticket]
                self._changed.notify_all()
        opened.listener(event)

    def _fail_loop(self, error: ServingError) -> None:
        """Fails all requests with samples in the loop, and restarts with the waiting ones."""
        tickets = dict.fromkeys(sample.owner.ticket for sample in self._in_loop)
        self._in_loop.clear()
        self._loop.clear()
        with self._changed:
            # One failed sample fails its whole request.
            self._forget_waiting(tickets)
        for ticket in tickets:
            self._notify(ticket, error)
