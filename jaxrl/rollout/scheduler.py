"""Which sample goes into which slot, and when. Plain Python: no device, no clock, no chance.

Sample requests are served in the order in which they are given. Those that start from the same sequence
share its prefill, and sequences are prefilled in full batches, each once, ahead of the slots that will take
them; the order depends on nothing but the requests and the lengths they turn out to have.

Slots are shared out over shards in equal runs. A sample keeps its shard: `resize` moves it within.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl.rollout.buckets import next_below, round_up


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One sample that is wanted.

    Attributes:
      owner: who wants it, hashable and unlike all others.
      source: names the sequence it starts from, hashable.
    """

    owner: Any
    source: Any


@dataclasses.dataclass(frozen=True)
class Admission:
    """Samples that start now, all from one prefill batch.

    Attributes:
      sources: the batch.
      fresh: it is to be prefilled; otherwise it is the one before.
      slots: for each started sample (slot, place in `sources`, owner).
    """

    sources: tuple[Any, ...]
    fresh: bool
    slots: tuple[tuple[int, int, Any], ...]


class Scheduler:
    """A queue of sample requests, and slots in which they run."""

    def __init__(
        self,
        requests: Iterable[SampleRequest],
        *,
        slot_sizes: Sequence[int],
        prefill_batch: int,
        shards: int = 1,
    ):
        """Nothing runs and there are no slots before `resize`.

        Args:
          requests: in order of service.
          slot_sizes: numbers of slots there may be, growing, all multiples of `shards`.
          prefill_batch: sources of one prefill at most.
          shards: over which slots are shared out.
        """
        self._queue = collections.deque(requests)
        self._slot_sizes = tuple(slot_sizes)
        self._prefill_batch = prefill_batch
        self._shards: list[list[Any | None]] = [[] for _ in range(shards)]
        self._batch: dict[Any, int] = {}

    @property
    def unfinished(self) -> bool:
        """Something is queued or running."""
        return bool(self._queue or self.running)

    @property
    def num_slots(self) -> int:
        """Slots there are."""
        return len(self._shards) * len(self._shards[0])

    @property
    def running(self) -> dict[int, Any]:
        """Slot -> owner."""
        owners = (owner for shard in self._shards for owner in shard)
        return {slot: owner for slot, owner in enumerate(owners) if owner is not None}

    @property
    def enough_active(self) -> int:
        """Active slots down to which a dispatch should go on before the host can do something of use.

        While requests wait, an eighth of the slots may fall idle; after that, as many as a smaller number
        of slots would do without. Always less than what runs, so that a dispatch does something.
        """
        if self._queue:
            least = self.num_slots - max(1, self.num_slots // 8)
        else:
            least = next_below(self._slot_sizes, self.num_slots)
        return least if len(self.running) > least else 0

    def resize(self) -> list[int] | None:
        """Makes as many slots as there is work for.

        Returns:
          For each new slot the old one that it takes over, counted within its shard, or -1; None if nothing
          changes.
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
        """Starts queued requests in free slots, as many as one prefill batch serves; None when none can."""
        free = self._free_slots()
        if not self._queue or not free:
            return None
        fresh = self._queue[0].source not in self._batch
        if fresh:
            self._batch = self._next_batch()
        started = []
        while self._queue and free and self._queue[0].source in self._batch:
            request, slot = self._queue.popleft(), free.popleft()
            shard, place = divmod(slot, len(self._shards[0]))
            self._shards[shard][place] = request.owner
            started.append((slot, self._batch[request.source], request.owner))
        return Admission(tuple(self._batch), fresh, tuple(started))

    def _free_slots(self) -> collections.deque[int]:
        """Free slots, those of the emptiest shards first and turn by turn."""
        size = len(self._shards[0])
        each = [[i for i, owner in enumerate(shard) if owner is None] for shard in self._shards]
        ranked = sorted(
            (-(len(free) - turn), s, i)
            for s, free in enumerate(each)
            for turn, i in enumerate(free)
        )
        return collections.deque(s * size + i for _, s, i in ranked)

    def _next_batch(self) -> dict[Any, int]:
        batch: dict[Any, int] = {}
        for request in self._queue:
            if request.source not in batch:
                if len(batch) == self._prefill_batch:
                    break
                batch[request.source] = len(batch)
        return batch

    def finish(self, slots: Iterable[int]) -> list[Any]:
        """Frees `slots`; returns who ran in each."""
        owners = []
        for slot in slots:
            shard, place = divmod(slot, len(self._shards[0]))
            owners.append(self._shards[shard][place])
            self._shards[shard][place] = None
        return owners

    def cancel(self, owner: Any) -> int | None:
        """Forgets a request; returns the slot it ran in, which is free now, or None if it was queued.

        Raises:
          KeyError: it is neither queued nor running.
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
