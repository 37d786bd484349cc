"""Which request goes into which slot, and when. Plain Python: no device, no clock, no chance.

Requests are served in order. The samples of one prompt start together when enough slots are free, so that
they share a prefill; the order depends on nothing but the requests and the lengths they turn out to have.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Admission:
    """Samples that start now.

    Attributes:
      prompts: indices of the prompts to prefill.
      slots: for each started sample (slot, position in `prompts`, prompt index, sample index).
    """

    prompts: tuple[int, ...]
    slots: tuple[tuple[int, int, int, int], ...]


class Scheduler:
    """Fills free slots from a queue of (prompt, sample) pairs and remembers who sits where."""

    def __init__(self, num_prompts: int, num_samples: int, *, slots: int, prefill_prompts: int):
        self._queue = collections.deque(
            (prompt, sample) for prompt in range(num_prompts) for sample in range(num_samples)
        )
        self._free = list(range(slots))
        self._running: dict[int, tuple[int, int]] = {}
        self._prefill_prompts = prefill_prompts

    @property
    def unfinished(self) -> bool:
        """Something is queued or running."""
        return bool(self._queue or self._running)

    @property
    def running(self) -> dict[int, tuple[int, int]]:
        """Slot -> (prompt, sample)."""
        return dict(self._running)

    def admit(self) -> Admission | None:
        """Starts as many queued samples as slots and one prefill allow; None when nothing can start."""
        prompts: list[int] = []
        started: list[tuple[int, int, int, int]] = []
        while self._queue and self._free:
            prompt, sample = self._queue[0]
            if prompt not in prompts:
                if len(prompts) == self._prefill_prompts:
                    break
                prompts.append(prompt)
            self._queue.popleft()
            slot = self._free.pop(0)
            self._running[slot] = (prompt, sample)
            started.append((slot, prompts.index(prompt), prompt, sample))
        return Admission(tuple(prompts), tuple(started)) if started else None

    def finish(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Frees `slots`; returns the (prompt, sample) that ran in each."""
        finished = [self._running.pop(slot) for slot in slots]
        self._free = sorted([*self._free, *slots])
        return finished
