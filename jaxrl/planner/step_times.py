"""Predicted seconds of a step by phase: the expectation, and a lower bound of it.

expectation   the step simulated with the engine's scheduler and published efficiencies (expected_step.py)
at least      the roofline of every program of the phase, at the vendors' rates (compiled/roofline.py)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl.planner.compiled.roofline import Seconds
from jaxrl.planner.expected_step import expected_step, step_seconds
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.planned_roles import PlannedRoles
from jaxrl.planner.simulation.cost_breakdown import CostBreakdown
from jaxrl.planner.simulation.step_simulator import StageBreakdown
from jaxrl.planner.step_load import StepLoad
from jaxrl.trainer.algorithm import runs_free

# A program's role, name, phase ("sampling" or "learning") and roofline.
ProgramSeconds = tuple[str, str, str, Seconds]

_PREPARATION = ("logprobs", "values", "scores")


@dataclasses.dataclass(frozen=True)
class TaskTime:
    """Seconds of a role in a stage.

    Attributes:
      stage, role: names of both.
      pool: index of its pool.
      expected: expected seconds, by cause.
      at_least_s: lower bound of the seconds.
      bound: what the slowest program of the task is bound by; "" without programs.
    """

    stage: str
    role: str
    pool: int
    expected: CostBreakdown
    at_least_s: float
    bound: str


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Predicted seconds of a step. Nothing of it was measured.

    Attributes:
      cluster: devices.
      load: assumed work of a step.
      num_steps: number of steps of the run.
      tasks: tasks of all stages, in order.
      overlaps: whether sampling overlaps with the rest of the step (free running).
    """

    cluster: Cluster
    load: StepLoad
    num_steps: int
    tasks: tuple[TaskTime, ...]
    overlaps: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in order."""
        return tuple(dict.fromkeys(task.stage for task in self.tasks))

    def of_stage(self, stage: str) -> tuple[TaskTime, ...]:
        """The tasks of a stage."""
        return tuple(task for task in self.tasks if task.stage == stage)

    def stage_s(self, stage: str, *, at_least: bool = False) -> float:
        """Expected seconds of a stage, or their lower bound: tasks of a pool take turns."""
        pools: dict[int, float] = {}
        for task in self.of_stage(stage):
            seconds = task.at_least_s if at_least else task.expected.total_s
            pools[task.pool] = pools.get(task.pool, 0.0) + seconds
        return max(pools.values(), default=0.0)

    @property
    def step_s(self) -> float:
        """Expected seconds of a step."""
        return step_seconds(map(self.stage_s, self.stages), overlaps=self.overlaps)

    @property
    def at_least_s(self) -> float:
        """Lower bound of the seconds of a step."""
        stages = (self.stage_s(stage, at_least=True) for stage in self.stages)
        return step_seconds(stages, overlaps=self.overlaps)

    def chip_hours(self, step_s: float) -> float:
        """Number of devices times hours of the run, if a step takes `step_s` seconds."""
        return step_s * self.num_steps * self.cluster.num_devices / 3600

    def as_json(self) -> dict[str, Any]:
        """All figures, in seconds."""
        return {
            "step_s": self.step_s,
            "at_least_s": self.at_least_s,
            "steps": self.num_steps,
            "chip_hours": self.chip_hours(self.step_s),
            "at_least_chip_hours": self.chip_hours(self.at_least_s),
            "system": self.load.system.name,
            "lengths": self.load.lengths.text,
            "response_tokens": self.load.response_tokens,
            "cut_off": self.load.lengths.responses.cut_off,
            "sampled": self.load.prompts * self.load.samples * self.load.lengths.batches,
            "kept": self.load.kept,
            "topology": self.cluster.name,
            "devices": self.cluster.num_devices,
            "phases": [self._task_json(task) for task in self.tasks],
        }

    def _task_json(self, task: TaskTime) -> dict[str, Any]:
        use = task.expected.slot_use
        return {
            "stage": task.stage,
            "role": task.role,
            "expected_s": task.expected.total_s,
            "at_least_s": task.at_least_s,
            "bound_by": task.bound,
            "seconds": dict(task.expected.seconds),
            "idle_s": task.expected.idle_s,
            "slot_use": None if use is None else use._asdict(),
        }


def step_times(
    planned: PlannedRoles, cluster: Cluster, load: StepLoad, programs: Iterable[ProgramSeconds]
) -> StepTimes:
    """Simulates a step, and adds up the rooflines of its programs by phase.

    Args:
      planned: roles of the run.
      cluster: devices of the run.
      load: work of a step.
      programs: rooflines of all programs of a step.
    """
    floors = _floors(programs, load.lengths.batches)
    stages = expected_step(planned, cluster, load)
    return StepTimes(
        cluster,
        load,
        planned.config.run.num_steps,
        tuple(_tasks(stages, floors)),
        overlaps=runs_free(planned.config),
    )


def _floors(
    programs: Iterable[ProgramSeconds], batches: float
) -> dict[tuple[str, str], list[Seconds]]:
    """The rooflines by stage and role; those of generation for all batches of a step."""
    found: dict[tuple[str, str], list[Seconds]] = {}
    for role, name, phase, seconds in programs:
        stage = "training"
        if name in _PREPARATION or role == "judge":
            stage = "preparation"
        elif phase == "sampling":
            stage = "generation"
        # The weights of the sampler are the actor's, whatever pool they are on.
        key = "actor" if stage == "generation" else role
        runs = batches if stage == "generation" else 1.0
        found.setdefault((stage, key), []).append(seconds.times(runs))
    return found


def _tasks(
    stages: Iterable[StageBreakdown], floors: Mapping[tuple[str, str], list[Seconds]]
) -> Iterator[TaskTime]:
    for stage in stages:
        for task in stage.tasks:
            role = "actor" if stage.name == "generation" else task.role
            found = floors.get((stage.name, role), [])
            slowest = max(found, key=lambda seconds: seconds.total, default=None)
            yield TaskTime(
                stage.name,
                task.role,
                task.pool,
                task.costs,
                sum(seconds.total for seconds in found),
                slowest.bound if slowest else "",
            )
