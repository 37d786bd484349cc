"""Decides which sample runs in which slot, and when. Plain Python: deterministic, without device or clock.

Sample requests are served in the order in which they are added. Requests that start from the same sequence
share its prefill. Sequences are prefilled once each, in full batches, before slots are free for them. The
order depends only on the requests and on the lengths of their samples.

Each shard owns an equal, contiguous range of slots. A sample stays on its shard; `resize` moves it within.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxrl.rollout.buckets import next_below, round_up


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One sample that waits for a slot.

    Attributes:
      owner: identifier of the sample; hashable and unique.
      source: identifier of the sequence that it starts from; hashable.
    """

    owner: Any
    source: Any


@dataclasses.dataclass(frozen=True)
class Admission:
    """Samples that start now, all from one prefill batch.

    Attributes:
      sources: sequences of the batch.
      needs_prefill: True for a new batch; False if it is the batch of the previous admission.
      slots: (slot, batch index in `sources`, owner) of each started sample.
    """

    sources: tuple[Any, ...]
    needs_prefill: bool
    slots: tuple[tuple[int, int, Any], ...]


class Scheduler:
    """A queue of sample requests, and the slots in which they run."""

    def __init__(
        self,
        requests: Iterable[SampleRequest],
        *,
        slot_sizes: Sequence[int],
        prefill_batch: int,
        shards: int = 1,
        may_start: Callable[[int, Any], bool] = lambda slot, owner: True,
    ):
        """Starts with no slots; `resize` creates the first.

        Args:
          requests: initial queue, in order of service.
          slot_sizes: allowed numbers of slots, ascending, all multiples of `shards`.
          prefill_batch: maximum number of sources per prefill.
          shards: number of shards of the slots.
          may_start: function (slot, owner) that takes memory for a sample on the shard of a free slot. If it
            returns False, the shard has too little, and the sample and all behind it wait.
        """
        self._may_start = may_start
        self._queue = collections.deque(requests)
        self._slot_sizes = tuple(slot_sizes)
        self._prefill_batch = prefill_batch
        self._shards: list[list[Any | None]] = [[] for _ in range(shards)]
        self._batch: dict[Any, int] = {}

    def add(self, request: SampleRequest) -> None:
        """Appends a request to the queue."""
        self._queue.append(request)

    def add_first(self, request: SampleRequest) -> None:
        """Puts a request at the front of the queue."""
        self._queue.appendleft(request)

    @property
    def unfinished(self) -> bool:
        """Whether anything is queued or running."""
        return bool(self._queue or self.running)

    @property
    def num_slots(self) -> int:
        """The number of slots, idle ones included."""
        return len(self._shards) * len(self._shards[0])

    @property
    def running(self) -> dict[int, Any]:
        """The owner of each slot in use."""
        owners = (owner for shard in self._shards for owner in shard)
        return {slot: owner for slot, owner in enumerate(owners) if owner is not None}

    @property
    def enough_active(self) -> int:
        """The number of active slots at which a dispatch should end early.

        While requests wait, up to an eighth of the slots may become idle before the host refills them. Once
        the queue is empty, a dispatch ends when the next smaller number of slots suffices. The result is
        below the number of running samples, so that a dispatch decodes at least one token.
        """
        if self._queue:
            # Without memory for more samples some slots are idle from the beginning.
            least = len(self.running) - max(1, self.num_slots // 8)
        else:
            least = next_below(self._slot_sizes, self.num_slots)
        return least if len(self.running) > least > 0 else 0

    def resize(self) -> list[int] | None:
        """Chooses the number of slots for the current samples and requests.

        Returns:
          For each new slot the old slot whose sample moves there, counted within its shard, or -1 for an idle
          slot; None if nothing changes.
        """
        busiest = max(sum(owner is not None for owner in shard) for shard in self._shards)
        wanted = min(len(self.running) + len(self._queue), self._slot_sizes[-1])
        size = round_up(self._slot_sizes, max(1, wanted, busiest * len(self._shards)))
        if size == self.num_slots:
            return None
        moves: list[int] = []
        for s, shard in enumerate(self._shards):
            kept = [slot for slot, owner in enumerate(shard) if owner is not None]
            idle = size // len(self._shards) - len(kept)
            self._shards[s] = [shard[slot] for slot in kept] + [None] * idle
            moves += kept + [-1] * idle
        return moves

    def admit(self) -> Admission | None:
        """Starts queued requests of one prefill batch in free slots; None if nothing can start."""
        free = self._free_slots()
        slot = self._take_slot(free)
        if slot is None:
            return None
        needs_prefill = self._queue[0].source not in self._batch
        if needs_prefill:
            self._batch = self._next_batch()
        started = []
        while slot is not None:
            request = self._queue.popleft()
            shard, index = divmod(slot, len(self._shards[0]))
            self._shards[shard][index] = request.owner
            started.append((slot, self._batch[request.source], request.owner))
            shares = self._queue and self._queue[0].source in self._batch
            slot = self._take_slot(free) if shares else None
        return Admission(tuple(self._batch), needs_prefill, tuple(started))

    def _take_slot(self, free: collections.deque[int]) -> int | None:
        """Takes the first free slot whose shard has memory for the next request; None if none has."""
        refused: set[int] = set()
        for slot in free if self._queue else ():
            shard = slot // len(self._shards[0])
            if shard in refused:
                continue
            if self._may_start(slot, self._queue[0].owner):
                free.remove(slot)
                return slot
            refused.add(shard)
        return None

    def _free_slots(self) -> collections.deque[int]:
        """The free slots, alternating between shards, the emptiest shard first."""
        size = len(self._shards[0])
        each = [[i for i, owner in enumerate(shard) if owner is None] for shard in self._shards]
        ranked = sorted(
            (-(len(free) - turn), s, i)
            for s, free in enumerate(each)
            for turn, i in enumerate(free)
        )
        return collections.deque(s * size + i for _, s, i in ranked)

    def _next_batch(self) -> dict[Any, int]:
        """The next sources of the queue and their batch indices."""
        batch: dict[Any, int] = {}
        for request in self._queue:
            if request.source not in batch:
                if len(batch) == self._prefill_batch:
                    break
                batch[request.source] = len(batch)
        return batch

    def finish(self, slots: Iterable[int]) -> list[Any]:
        """Frees `slots`; returns the owner of each."""
        owners = []
        for slot in slots:
            shard, index = divmod(slot, len(self._shards[0]))
            owners.append(self._shards[shard][index])
            self._shards[shard][index] = None
        return owners

    def cancel(self, owner: Any) -> int | None:
        """Drops a request; returns the slot that it frees, or None if it was still queued.

        Raises:
          KeyError: the request is neither queued nor running.
        """
        for slot, running in self.running.items():
            if running == owner:
                self.finish([slot])
                return slot
        for request in self._queue:
            if request.owner == owner:
                self._queue.remove(request)
                return None
        raise KeyError(owner)
