"""The online driver: requests come at any time, each with its own settings; text streams back per dispatch.

    submit --> waiting --> [scheduler: queued --> slot] --> Delta, Delta, ... --> listener
               cancel                 cancel

One thread dispatches and owns everything below `waiting`; any thread may submit and cancel. A sample's key is
made of its request's seed and its index, so an answer does not depend on what else is being answered. If a
dispatch fails, the requests in its slots fail with it and those that wait are served.

n slots   W tokens of a dispatch   R tokens of a delta
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import Prefix
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.request_checks import check_request
from jaxrl.rollout.request_errors import NotFinite, Overloaded, ServingError, Stopped
from jaxrl.rollout.sampling import Truncation, untruncated
from jaxrl.rollout.scheduler import Admission, SampleRequest, Scheduler
from jaxrl.rollout.slots import DecodedTokens, SlotAssignment, Slots
from jaxrl.rollout.text_stream import TextStream

STOP, LENGTH = "stop", "length"

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """Samples that continue one prompt, all with the same settings.

    Attributes:
      prompt: int32 [T].
      num_samples: how many.
      max_tokens: of each, end-of-sequence included.
      seed: with a sample's index it determines the sample; 0 to 2**31 - 1.
      temperature: 0 is greedy.
      truncation: which tokens may be drawn, as scalars.
      stop: texts that end a sample and are not part of its text.
    """

    prompt: np.ndarray
    num_samples: int
    max_tokens: int
    seed: int
    temperature: float = 1.0
    truncation: Truncation = dataclasses.field(default_factory=untruncated)
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """Tokens and text that a dispatch has added to a sample.

    Example, with the stop string "\\n": tokens "9", "\\n", text "9", finish "stop".

    Attributes:
      index: which sample of the request.
      tokens: int32 [R], the token that ended the sample included.
      logprob: float32 [R], log-probability of each under the sampler's distribution, temperature applied,
        before truncation.
      pieces: R texts, what each token spells; "" for a part of a character and for special tokens.
      text: what can be shown now; it lags behind the pieces while a stop string may have begun.
      finish: "stop" or "length" if this is the sample's end, else "".
    """

    index: int
    tokens: np.ndarray
    logprob: np.ndarray
    pieces: tuple[str, ...]
    text: str
    finish: str


# Called in the dispatching thread: deltas of all samples, in order for each, or one error and then nothing.
# It must return at once and not raise.
Listener: TypeAlias = Callable[[Delta | ServingError], None]


class _Sample:
    """A sample that has not ended."""

    def __init__(self, ticket: int, request: Request, index: int, text: TextStream):
        self.ticket = ticket
        self.request = request
        self.index = index
        self.text = text
        self.length = len(request.prompt)


@dataclasses.dataclass
class _OpenRequest:
    """A request that somebody listens to, and how many of its samples have not ended."""

    listener: Listener
    unfinished: int


_Owner: TypeAlias = tuple[int, int]  # ticket, index


class _Queue(Scheduler):
    """A scheduler whose requests come later."""

    def __init__(self, engine: Engine):
        super().__init__(
            (),
            slot_sizes=engine.slot_sizes,
            prefill_batch=engine.batch_sizes[-1],
            shards=engine.shards,
        )

    def add(self, owner: _Owner) -> None:
        """Queues a sample; those of one ticket share a prefill."""
        self._queue.append(SampleRequest(owner, owner[0]))


class OnlineDriver:
    """Serves requests from a thread of its own until it is closed."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        decode_text: Callable[[np.ndarray], str],
        *,
        max_waiting: int = 10_000,
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """Starts the thread.

        Args:
          engine, params: of the model, the weights in the generation layout.
          decode_text: token ids to text.
          max_waiting: samples that may wait for a slot; more are refused.
          lock: held while something is dispatched; for another driver of the same devices.
        """
        self._engine = engine
        self._slots = Slots(engine, params, lock)
        self._decode_text = decode_text
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        # Shared with other threads, under the condition.
        self._changed = threading.Condition()
        self._waiting: dict[_Owner, _Sample] = {}
        self._open: dict[int, _OpenRequest] = {}
        self._cancelled: list[int] = []
        self._closing = False
        self._stopping = False
        # The thread's own.
        self._scheduler = _Queue(engine)
        self._scheduled: dict[Hashable, _Sample] = {}
        self._prefix: Prefix | None = None
        self._thread = threading.Thread(target=self._serve, name="online-driver", daemon=True)
        self._thread.start()

    def __enter__(self) -> OnlineDriver:
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def alive(self) -> bool:
        """Requests are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def load(self) -> tuple[int, int]:
        """Samples that wait, and samples that are in slots or about to be."""
        return len(self._waiting), len(self._scheduled)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that can never be served."""
        limits = jax.tree.leaves(request.truncation)
        assert all(isinstance(x, np.generic) for x in limits), "a truncation is of host scalars"
        check_request(self._engine, request.prompt, request.max_tokens)
        if not 0 < request.num_samples <= self._max_waiting:
            raise UserError(
                f"{request.num_samples} samples of a prompt: this server gives 1 to {self._max_waiting}; ask "
                "for as many"
            )
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise UserError(f"temperature {request.temperature} is not 0, which is greedy, or more")
        if not 0 <= request.seed < 2**31:
            raise UserError(f"seed {request.seed} is not a number from 0 to {2**31 - 1}")
        if "" in request.stop:
            raise UserError("a stop string is empty, which would end every answer before it begins")

    def submit(self, request: Request, listener: Listener) -> int:
        """Queues a request.

        Args:
          request: what is wanted.
          listener: gets the answer, piece by piece.

        Returns:
          A ticket, for `cancel`.

        Raises:
          UserError: it can never be served.
          Overloaded: it cannot be served now.
          Stopped: the driver is closed, or has broken down.
        """
        return self.submit_all([(request, listener)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Listener]]) -> list[int]:
        """`submit` of several requests, of all or of none."""
        for request, _ in requests:
            self.check(request)
        wanted = sum(request.num_samples for request, _ in requests)
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
                self._open[ticket] = _OpenRequest(listener, request.num_samples)
                for index in range(request.num_samples):
                    text = TextStream(self._decode_text, request.stop)
                    self._waiting[ticket, index] = _Sample(ticket, request, index, text)
                tickets.append(ticket)
            self._changed.notify_all()
        return tickets

    def cancel(self, ticket: int) -> None:
        """Ends a request; its slots are free with the next dispatch. One that has ended is left alone."""
        with self._changed:
            if self._open.pop(ticket, None) is not None:
                self._cancelled.append(ticket)
                self._changed.notify_all()

    def close(self, grace_s: float = 0.0) -> None:
        """Takes no requests any more. What is not answered within `grace_s` gets `Stopped`."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._open, grace_s)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    # The thread

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._take_in()
                    self._dispatch()
                # What the device reports, such as that its memory does not suffice. The state may be lost.
                except jax.errors.JaxRuntimeError as error:
                    failure = ServingError(f"the engine has failed: {_first_line(error)}")
                    _LOG.error("%s", failure)
                    self._fail_scheduled(failure)
        finally:
            # Whatever the reason, nobody is left waiting.
            self._end()

    def _wait_for_work(self) -> bool:
        """Returns when there is some; False when it is time to stop."""
        with self._changed:
            while not (self._stopping or self._waiting or self._cancelled or self._scheduled):
                self._changed.wait()
            return not self._stopping

    def _take_in(self) -> None:
        """Drops what was cancelled, and brings what waits to the scheduler."""
        with self._changed:
            cancelled, self._cancelled = set(self._cancelled), []
            if cancelled:
                self._forget_waiting(cancelled)
            # Few are queued ahead of their slots, since cancelling one of those means to search for it.
            room = 2 * self._engine.max_concurrent_decodes - len(self._scheduled)
            for owner in list(itertools.islice(self._waiting, max(0, room))):
                self._scheduled[owner] = self._waiting.pop(owner)
                self._scheduler.add(owner)
        dropped = [owner for owner, s in self._scheduled.items() if s.ticket in cancelled]
        slots = [self._scheduler.cancel(owner) for owner in dropped]
        for owner in dropped:
            del self._scheduled[owner]
        if running := [slot for slot in slots if slot is not None]:
            self._slots.release(running)

    def _forget_waiting(self, tickets: Collection[int]) -> None:
        for owner in [owner for owner in self._waiting if owner[0] in tickets]:
            del self._waiting[owner]

    def _dispatch(self) -> None:
        """Starts what can start, decodes up to W tokens in every slot, and passes it on to the listeners."""
        scheduler = self._scheduler
        if not scheduler.unfinished:
            return
        moves = scheduler.resize()
        admissions = []
        while (admission := scheduler.admit()) is not None:
            admissions.append(admission)
        running = scheduler.running
        longest = max(self._scheduled[owner].length for owner in running.values())
        self._slots.make_room(scheduler.num_slots, moves, longest)
        for admission in admissions:
            self._admit(admission)
        self._collect(running, self._slots.generate(scheduler.enough_active))

    def _admit(self, admission: Admission) -> None:
        """Prefills the admitted batch, unless it is the one before, and inserts its samples."""
        if admission.fresh:
            prompts: dict[Hashable, np.ndarray] = {
                sample.ticket: sample.request.prompt for sample in self._scheduled.values()
            }
            self._prefix = self._slots.prefill([prompts[ticket] for ticket in admission.sources])
        assert self._prefix is not None, "the first batch is fresh"
        assignments = collections.defaultdict(list)
        for slot, place, owner in admission.slots:
            sample = self._scheduled[owner]
            request = sample.request
            # The seed stands where training has a prompt's id, so that requests which differ in their
            # seeds alone are inserted together.
            assignment = SlotAssignment(slot, place, request.seed, sample.index, request.max_tokens)
            assignments[request.temperature, request.truncation].append(assignment)
        for (temperature, truncation), alike in assignments.items():
            self._slots.insert(self._prefix, alike, temperature=temperature, truncation=truncation)

    def _collect(self, running: Mapping[int, Hashable], decoded: DecodedTokens) -> None:
        ended, still_active = [], []
        broken: dict[int, _Sample] = {}
        for slot, owner in running.items():
            sample = self._scheduled[owner]
            tokens, logprob, _ = decoded.of_slot(slot)
            if not np.isfinite(logprob).all():
                broken[sample.ticket] = sample
                continue
            delta = self._delta_of(sample, tokens, logprob, going_on=bool(decoded.active[slot]))
            if delta.finish:
                ended.append(slot)
                if decoded.active[slot]:
                    still_active.append(slot)
                del self._scheduled[owner]
            self._notify(sample.ticket, delta)
        self._scheduler.finish(ended)
        if still_active:
            self._slots.release(still_active)
        for sample in broken.values():
            self._refuse_broken(sample)

    def _refuse_broken(self, sample: _Sample) -> None:
        """Ends a request whose samples are drawn from no distribution."""
        error = NotFinite(
            f"the model's log-probabilities are not finite after a sequence of {sample.length} tokens, so "
            "there is nothing to sample from; look for NaN or infinity in its weights, or try dtype float32"
        )
        _LOG.error("request %d: %s", sample.ticket, error)
        self._notify(sample.ticket, error)
        # Frees the slots of all its samples before the next dispatch.
        with self._changed:
            self._cancelled.append(sample.ticket)

    def _delta_of(
        self, sample: _Sample, tokens: np.ndarray, logprob: np.ndarray, *, going_on: bool
    ) -> Delta:
        pieces, shown = [], []
        for token in tokens:
            piece, text = sample.text.add(int(token))
            pieces.append(piece)
            shown.append(text)
            if sample.text.stopped:
                break
        finish = ""
        if sample.text.stopped:
            finish = STOP
        elif not going_on:
            finish = STOP if int(tokens[-1]) in self._engine.config.stop_ids else LENGTH
            shown.append(sample.text.flush())
        size = len(pieces)
        sample.length += size
        return Delta(
            sample.index,
            tokens[:size].copy(),
            logprob[:size].copy(),
            tuple(pieces),
            "".join(shown),
            finish,
        )

    def _notify(self, ticket: int, event: Delta | ServingError) -> None:
        """Passes on what happened; after the last of a request its listener is forgotten."""
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

    def _fail_scheduled(self, error: ServingError) -> None:
        """Fails the requests that are in slots or about to be, and starts afresh with those that wait."""
        tickets = dict.fromkeys(sample.ticket for sample in self._scheduled.values())
        self._scheduled.clear()
        self._scheduler = _Queue(self._engine)
        self._prefix = None
        self._slots.clear()
        with self._changed:
            # A request fails as a whole.
            self._forget_waiting(tickets)
        for ticket in tickets:
            self._notify(ticket, error)

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._waiting.clear()
            left, self._open = self._open, {}
            self._changed.notify_all()
        self._scheduled.clear()
        self._slots.clear()
        for opened in left.values():
            opened.listener(Stopped("the server has stopped before the answer was complete"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
