"""Simulates a whole step: the seconds and bytes of each role's tasks in each stage, for a given mapping.

Plans and the search take their expectation of a step from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.step_costs import StepCosts, TaskCosts
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
    ) -> StepCosts:
        """The costs of each stage of a step.

        Args:
          tasks: tasks of the roles, in the order of the dataflow.
          models: model of each role.
          roles: mapping of each role. The one that generates has a generation strategy, or else the role
            "rollout" samples for it, on devices of its own.
        """
        generation, preparation, training = [], [], []
        for task in tasks:
            model, role = models[task.name], roles[task.name]
            if task.generates:
                sampler = roles.get("rollout", role)
                assert sampler.generation is not None, "the sampler has a generation strategy"
                costs = self.generating.generation(
                    model, sampler.strategy, sampler.generation, greedy=task.greedy
                )
                generation.append(TaskCosts("generation", sampler.name, sampler.pool, costs))
            if task.forwards:
                once = self.passes.inference(model, role.strategy, share=self.passes.share_of(task))
                seconds = {cause: task.forwards * s for cause, s in once.seconds.items()}
                # Resident bytes of a trained role are counted once, with its training.
                resident = {} if task.trains else once.resident
                costs = dataclasses.replace(once, seconds=seconds, resident=resident)
                preparation.append(TaskCosts("preparation", task.name, role.pool, costs))
            if task.trains:
                costs = self.passes.training(model, role.strategy)
                training.append(TaskCosts("training", task.name, role.pool, costs))
        return StepCosts((*generation, *preparation, *training))
