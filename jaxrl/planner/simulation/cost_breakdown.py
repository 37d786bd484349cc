"""The breakdown of a predicted cost: seconds by cause, resident bytes, transient bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

_NOTHING: Mapping[str, float] = {}


class SlotUse(NamedTuple):
    """Use of the slots of all replicas, from a replay of the engine's scheduler.

    Attributes:
      busy: mean number of slots with a sample, over all decoding steps.
      slots: number of slots.
      dispatches: number of dispatches of a step of training.
      preempted: number of times that a sample lost its pages and was prefilled again.
    """

    busy: float
    slots: int
    dispatches: float
    preempted: float

    @property
    def text(self) -> str:
        """One line of all figures."""
        return (
            f"{self.busy:,.0f} of {self.slots:,} slots busy on average ({self.busy / self.slots:.0%}), "
            f"{self.dispatches:,.0f} dispatches, {self.preempted:,.0f} preemptions"
        )


@dataclasses.dataclass(frozen=True)
class CostBreakdown:
    """Predicted cost of one role's task on each of its devices; nothing of it was measured.

    Attributes:
      seconds: seconds of a step by cause. A negative entry is time hidden behind other causes.
      resident: bytes that stay from step to step.
      transient: additional bytes while the task runs.
      idle_s: seconds, contained in `seconds`, that generation would save if no slot were ever idle and all
        replicas had the same load.
      slot_use: use of the slots; None if nothing is sampled or the scheduler was not replayed.
    """

    seconds: Mapping[str, float]
    resident: Mapping[str, float] = dataclasses.field(default_factory=lambda: _NOTHING)
    transient: Mapping[str, float] = dataclasses.field(default_factory=lambda: _NOTHING)
    idle_s: float = 0.0
    slot_use: SlotUse | None = None

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def resident_bytes(self) -> float:
        """Resident bytes per device."""
        return sum(self.resident.values())

    @property
    def transient_bytes(self) -> float:
        """Additional bytes per device while the task runs."""
        return sum(self.transient.values())

    def times(self, factor: float) -> CostBreakdown:
        """The cost of `factor` repetitions: seconds are multiplied, bytes are not."""
        seconds = {cause: factor * s for cause, s in self.seconds.items()}
        use = self.slot_use
        if use is not None:
            use = use._replace(dispatches=factor * use.dispatches, preempted=factor * use.preempted)
        return dataclasses.replace(self, seconds=seconds, idle_s=factor * self.idle_s, slot_use=use)

    def lines(self) -> list[str]:
        """One line per cause, and the sums."""
        seconds = [f"{s:10.2f} s   {name}" for name, s in self.seconds.items() if s]
        if self.idle_s:
            seconds.append(f"{self.idle_s:10.2f} s   of these for idle slots and unequal replicas")
        kept = [f"{b / 1e9:10.2f} GB  {name}, stays" for name, b in self.resident.items() if b]
        brief = [f"{b / 1e9:10.2f} GB  {name}" for name, b in self.transient.items() if b]
        return [*seconds, f"{self.total_s:10.2f} s   predicted in all", *kept, *brief]
