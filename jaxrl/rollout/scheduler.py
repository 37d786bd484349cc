"""Decides which sample runs in which slot, and when. Deterministic, without device or clock.

Sample requests are served in the order in which they are added. Requests that start from the same sequence
share its prefill. Sequences are prefilled once each, in full batches, before slots are free for them. The
order depends only on the requests and on the lengths of their samples. A dispatch costs some array operations
over the slots, and Python only for samples that start or end.

Each shard owns an equal, contiguous range of slots. A sample stays on its shard; `resize` moves it within.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.engine_sizes import next_below, round_up

# Preferred shards may have this part of their slots more in use than others: a quarter.
_UNEVEN = 4


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
    """A queue of sample requests, and the slots in which they run.

    A request is the owner of a sample and the sequence that it starts from, its source. Both are hashable;
    owners are unique.

    Attributes:
      owners: owner of each slot; None for an idle one.
      slot_of: slot of each owner that runs.
    """

    def __init__(
        self,
        requests: Iterable[tuple[Any, Any]],
        *,
        slot_sizes: Sequence[int],
        prefill_batch: int,
        shards: int = 1,
        may_start: Callable[[int, Any], bool] = lambda slot, owner: True,
        preferred: Callable[[Any], Collection[int]] = lambda owner: (),
    ):
        """Starts with no slots; `resize` creates the first.

        Args:
          requests: owners and sources of the initial queue, in order of service.
          slot_sizes: allowed numbers of slots, ascending, all multiples of `shards`.
          prefill_batch: maximum number of sources per prefill.
          shards: number of shards of the slots.
          may_start: function (slot, owner) that takes memory for a sample on the shard of a free slot. If it
            returns False, the shard has too little, and the sample and all behind it wait.
          preferred: function from an owner to the shards on which it should start if a slot is free there.
        """
        self._may_start, self._preferred = may_start, preferred
        self._queue = collections.deque(requests)
        self._slot_sizes = tuple(slot_sizes)
        self._prefill_batch = prefill_batch
        self._num_shards = shards
        self.owners: list[Any] = []
        self._busy_n = np.zeros(0, bool)
        self.slot_of: dict[Any, int] = {}
        self._batch: dict[Any, int] = {}

    def add(self, owner: Any, source: Any) -> None:
        self._queue.append((owner, source))

    def add_first(self, owner: Any, source: Any) -> None:
        self._queue.appendleft((owner, source))

    @property
    def num_unfinished(self) -> int:
        """The number of requests that are queued or running."""
        return len(self._queue) + len(self.slot_of)

    @property
    def places(self) -> int:
        """The number of requests to add so that all slots are in use and more wait; 0 if enough do."""
        most = self._slot_sizes[-1]
        # After an admission nothing waits while a slot is free, unless its shard has no memory.
        no_memory = self.slot_of and self._queue
        idle = 0 if no_memory else most - len(self.slot_of)
        # A quarter of the slots should wait. An eighth may become idle before a dispatch ends. When these are
        # filled others must still wait, or the next dispatch would not end early (`enough_active`).
        return max(0, idle + max(2, most // 4) - len(self._queue))

    @property
    def busy_slots(self) -> np.ndarray:
        """The slots in use, int [running], ascending."""
        return np.flatnonzero(self._busy_n)

    @property
    def enough_active(self) -> int:
        """The number of active slots at which a dispatch should end early."""
        running, num_slots = len(self.slot_of), len(self.owners)
        # Once the queue is empty, a dispatch ends when the next smaller number of slots suffices.
        least = next_below(self._slot_sizes, num_slots)
        if self._queue:
            # Up to an eighth of the slots may become idle before the host refills them. Without memory for
            # more samples some slots are idle from the beginning.
            least = running - max(1, num_slots // 8)
        # Below the number of running samples, so that a dispatch decodes at least one token.
        return least if running > least > 0 else 0

    def resize(self) -> list[int] | None:
        """Chooses the number of slots for the current samples and requests.

        Returns:
          For each new slot the old slot whose sample moves there, counted within its shard, or -1 for an idle
          slot; None if nothing changes.
        """
        S, num_slots = self._num_shards, len(self.owners)
        busy_SI = self._busy_n.reshape(S, -1)
        busiest = int(busy_SI.sum(axis=1).max()) if busy_SI.size else 0
        wanted = min(self.num_unfinished, self._slot_sizes[-1])
        # Shards have equally many slots, and samples stay on theirs: the busiest shard decides.
        size = round_up(self._slot_sizes, max(1, wanted, busiest * S))
        if size == num_slots:
            return None
        moves = np.full((S, size // S), -1)
        for s in range(S):
            kept = np.flatnonzero(busy_SI[s])
            moves[s, : len(kept)] = kept
        # The same counted over all shards.
        old_n = (np.arange(S)[:, None] * (num_slots // S) + moves).reshape(-1)
        self._busy_n = moves.reshape(-1) >= 0
        self.owners = [
            self.owners[old] if busy else None
            for old, busy in zip(old_n.tolist(), self._busy_n.tolist(), strict=True)
        ]
        self.slot_of = {self.owners[slot]: slot for slot in self.busy_slots.tolist()}
        return moves.reshape(-1).tolist()

    def admit(self) -> Admission | None:
        """Starts queued requests of one prefill batch in free slots; None if nothing can start."""
        if not self._queue or len(self.slot_of) == len(self.owners):
            return None
        # The free slots, alternating between shards, the emptiest shard first.
        free = np.flatnonzero(~self._busy_n)
        shard = free // (len(self.owners) // self._num_shards)
        count_S = np.bincount(shard, minlength=self._num_shards)
        turn = np.arange(len(free)) - (np.cumsum(count_S) - count_S)[shard]
        ranked = np.lexsort((free, shard, turn - count_S[shard]))
        slots = collections.deque(free[ranked].tolist())
        slot = self._take_slot(slots)
        if slot is None:
            return None
        needs_prefill = self._queue[0][1] not in self._batch
        if needs_prefill:
            # The next sources of the queue, each once.
            self._batch = {}
            for _, source in self._queue:
                if source not in self._batch:
                    if len(self._batch) == self._prefill_batch:
                        break
                    self._batch[source] = len(self._batch)
        started = []
        while slot is not None:
            owner, source = self._queue.popleft()
            self.owners[slot], self._busy_n[slot] = owner, True
            self.slot_of[owner] = slot
            started.append((slot, self._batch[source], owner))
            shares = self._queue and self._queue[0][1] in self._batch
            slot = self._take_slot(slots) if shares else None
        return Admission(tuple(self._batch), needs_prefill, tuple(started))

    def forget_batch(self) -> None:
        """Lets the next admission have a prefill of its own."""
        self._batch = {}

    def _take_slot(self, free: collections.deque[int]) -> int | None:
        """Takes the first free slot whose shard has memory for the next request; None if none has.

        Slots of the request's preferred shards come first.
        """
        if not (free and self._queue):
            return None
        owner, each = self._queue[0][0], len(self.owners) // self._num_shards
        preferred = self._preferred(owner)
        if preferred:
            # All shards decode at the pace of the one with the most to read. So no shard gets more samples
            # than the one with the fewest, plus a quarter of its slots.
            busy_S = self._busy_n.reshape(self._num_shards, -1).sum(axis=1)
            most = busy_S.min() + max(1, each // _UNEVEN)
            preferred = {shard for shard in preferred if busy_S[shard] < most}
        first = (i for i, slot in enumerate(free) if slot // each in preferred)
        refused: set[int] = set()
        for i in itertools.chain(first if preferred else (), range(len(free))):
            slot = free[i]
            if slot // each in refused:
                continue
            if self._may_start(slot, owner):
                del free[i]
                return slot
            # Memory is that of a shard: its other slots would be refused, too.
            refused.add(slot // each)
        return None

    def finish(self, slots: Iterable[int]) -> list[Any]:
        """Frees `slots`; returns the owner of each."""
        owners = []
        for slot in slots:
            owners.append(self.owners[slot])
            self.owners[slot], self._busy_n[slot] = None, False
            del self.slot_of[owners[-1]]
        return owners

    def cancel(self, owner: Any) -> int | None:
        """Drops a request; returns the slot that it frees, or None if it was still queued.

        Raises:
          KeyError: the request is neither queued nor running.
        """
        slot = self.slot_of.get(owner)
        if slot is not None:
            self.finish([slot])
            return slot
        # One by one: cancelled requests are few, and the queue is short (`live_loop`).
        for request in self._queue:
            if request[0] == owner:
                self._queue.remove(request)
                return None
        raise KeyError(owner)
