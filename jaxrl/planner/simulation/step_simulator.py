"""Simulates a whole step: the seconds and bytes of each role's tasks in each stage, for a given mapping.

Plans and the search take their expectation of a step from here. A plan replays the engine's scheduler; the
search ranks thousands of mappings by the quick trace (`decode_trace.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.cost_breakdown import CostBreakdown
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, Workload, layout_of


@dataclasses.dataclass(frozen=True)
class RoleMapping:
    """Pool and strategy of a role.

    Attributes:
      name: name of the role.
      pool: index of its pool.
      strategy: p, t, d and the FSDP share.
      generation: p_g, t_g and slots per replica; None for a role that does not sample.
    """

    name: str
    pool: int
    strategy: Strategy
    generation: GenerationStrategy | None

    @property
    def layout(self) -> ParallelLayout:
        """The strategies as a layout of the pool's mesh."""
        return layout_of(self.strategy, self.generation)


@dataclasses.dataclass(frozen=True)
class TaskCosts:
    """The costs of a role in a stage.

    Attributes:
      role, pool: name of the role, and index of its pool.
      costs: seconds and bytes.
    """

    role: str
    pool: int
    costs: CostBreakdown


@dataclasses.dataclass(frozen=True)
class StageBreakdown:
    """A stage of a step: pools run in parallel, the roles of a pool in sequence.

    Attributes:
      name: one of `step_tasks.STAGES`.
      tasks: tasks of the stage.
    """

    name: str
    tasks: tuple[TaskCosts, ...]

    def times(self, factor: float) -> StageBreakdown:
        """The stage if every task runs `factor` times."""
        tasks = (dataclasses.replace(t, costs=t.costs.times(factor)) for t in self.tasks)
        return dataclasses.replace(self, tasks=tuple(tasks))

    @property
    def seconds(self) -> float:
        """Seconds of the slowest pool."""
        return max(self.seconds_of_pools.values(), default=0.0)

    @property
    def seconds_of_pools(self) -> dict[int, float]:
        """Sum of the seconds of its tasks, by index of the pool."""
        found: dict[int, float] = {}
        for task in self.tasks:
            found[task.pool] = found.get(task.pool, 0.0) + task.costs.total_s
        return found


class StepSimulator:
    """Simulates steps on one cluster.

    Attributes:
      passes: simulator of forward passes and updates.
      generating: simulator of generation.
    """

    def __init__(self, cluster: Cluster, workload: Workload, assumptions: Assumptions):
        """Args are the devices, the work of a step, and the assumptions."""
        self.passes = PassSimulator(cluster, workload, assumptions)
        self.generating = GenerationSimulator(cluster, workload, assumptions)

    def step(
        self,
        tasks: Sequence[RoleTasks],
        models: Mapping[str, ModelConfig],
        roles: Mapping[str, RoleMapping],
        *,
        replay: bool = False,
    ) -> tuple[StageBreakdown, ...]:
        """The costs of each stage of a step.

        Args:
          tasks: tasks of the roles, in the order of the dataflow.
          models: model of each role.
          roles: mapping of each role. The one that generates has a generation strategy, or else the role
            "rollout" samples for it, on devices of its own.
          replay: whether to replay the engine's scheduler, which takes a second for a large batch.
        """
        stages = {
            "generation": [
                self._generation(
                    models[t.name], t, roles.get("rollout", roles[t.name]), replay=replay
                )
                for t in tasks
                if t.generates
            ],
            "preparation": [
                self._preparation(models[t.name], t, roles[t.name]) for t in tasks if t.forwards
            ],
            "training": [
                TaskCosts(
                    t.name,
                    roles[t.name].pool,
                    self.passes.training(models[t.name], roles[t.name].strategy),
                )
                for t in tasks
                if t.trains
            ],
        }
        return tuple(StageBreakdown(name, tuple(costs)) for name, costs in stages.items())

    def _generation(
        self, model: ModelConfig, tasks: RoleTasks, role: RoleMapping, *, replay: bool
    ) -> TaskCosts:
        assert role.generation is not None, "a role that generates has a generation strategy"
        costs = self.generating.generation(
            model, role.strategy, role.generation, greedy=tasks.greedy, replay=replay
        )
        return TaskCosts(role.name, role.pool, costs)

    def _preparation(self, model: ModelConfig, tasks: RoleTasks, role: RoleMapping) -> TaskCosts:
        once = self.passes.inference(model, role.strategy, share=self.passes.share_of(tasks))
        seconds = {cause: tasks.forwards * s for cause, s in once.seconds.items()}
        # Resident bytes of a trained role are counted once, with its training.
        resident = {} if tasks.trains else once.resident
        costs = dataclasses.replace(once, seconds=seconds, resident=resident)
        return TaskCosts(tasks.name, role.pool, costs)
