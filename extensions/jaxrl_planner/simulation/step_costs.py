"""The predicted costs of a step: seconds by cause and bytes, of each role in each of HybridFlow's stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class SlotUse:
    """Predicted use of the slots of all replicas.

    Attributes:
      busy: mean number of slots with a sample, over all decoding steps.
      slots: number of slots.
      dispatches: number of dispatches of a step of training.
    """

    busy: float
    slots: int
    dispatches: float

    @property
    def text(self) -> str:
        return (
            f"{self.busy:,.0f} of {self.slots:,} slots busy on average ({self.busy / self.slots:.0%}), "
            f"{self.dispatches:,.0f} dispatches"
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
      slot_use: use of the slots; None if nothing is sampled.
    """

    seconds: Mapping[str, float]
    resident: Mapping[str, float] = dataclasses.field(default_factory=dict)
    transient: Mapping[str, float] = dataclasses.field(default_factory=dict)
    idle_s: float = 0.0
    slot_use: SlotUse | None = None

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def resident_bytes(self) -> float:
        return sum(self.resident.values())

    @property
    def transient_bytes(self) -> float:
        return sum(self.transient.values())


@dataclasses.dataclass(frozen=True)
class TaskCosts:
    """The costs of a role in a stage.

    Attributes:
      stage, role: names of both.
      pool: index of its pool.
      costs: expected seconds and bytes.
      at_least_s: lower bound of the seconds; 0 in a search, which has no programs.
      bound: what the slowest program of the task is bound by; "" without programs.
    """

    stage: str
    role: str
    pool: int
    costs: CostBreakdown
    at_least_s: float = 0.0
    bound: str = ""


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of a step: its stages run one after the other, and the pools of a stage at the same time."""

    tasks: tuple[TaskCosts, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.stage for task in self.tasks))

    def of_stage(self, stage: str) -> tuple[TaskCosts, ...]:
        return tuple(task for task in self.tasks if task.stage == stage)

    def stage_s(self, stage: str, *, at_least: bool = False) -> float:
        """Expected seconds of the slowest pool of a stage, or their lower bound: its tasks take turns."""
        # Roles of a pool take turns; the pools work side by side.
        pools: dict[int, float] = {}
        for task in self.of_stage(stage):
            seconds = task.at_least_s if at_least else task.costs.total_s
            pools[task.pool] = pools.get(task.pool, 0.0) + seconds
        return max(pools.values(), default=0.0)
