"""Simulates a whole step: the tasks of each role in HybridFlow's three stages, with their seconds and bytes.

    generation     the actor samples                                    (ReMax: and answers greedily)
    preparation    log-probabilities, values, scores                    one forward pass each
    training       the actor and the critics are trained

Plans and the search take their expectation of a step from here. A reward function without a model uses no
device: leave its role out of `models`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl.dataflows.dataflow import Dataflow
from jaxrl.dataflows.lookup import DATAFLOWS
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.trainer.role_table import ROLES
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.step_costs import StepCosts, TaskCosts
from jaxrl_planner.simulation.workload import Workload

STAGES = ("generation", "preparation", "training")


@dataclasses.dataclass(frozen=True)
class RoleTasks:
    """The tasks of a role in a step.

    Attributes:
      name: name of the role.
      trains: whether it is trained, and so has an optimiser state.
      generates: whether it samples.
      forwards: number of forward passes over the sequences in preparation; may be a fraction.
      greedy: whether its work includes greedy answers.
    """

    name: str
    trains: bool = False
    generates: bool = False
    forwards: float = 1.0
    greedy: bool = False

    def share(self, work: Workload) -> float:
        """Sequences in its forward pass, relative to the trained ones: greedy answers are only scored."""
        scores_more = self.greedy and not self.generates
        return (work.samples + 1) / work.samples if scores_more else 1.0


def role_tasks(
    flow: Dataflow, roles: Sequence[str] = (), *, own_forwards: float = 1.0
) -> tuple[RoleTasks, ...]:
    """The tasks of a dataflow's roles: critics learn, and whatever else is frozen reads once.

    Args:
      flow: dataflow.
      roles: roles of a run; empty takes those that the dataflow declares.
      own_forwards: share of the sequences whose old log-probabilities the actor computes in preparation; its
        update computes the others.
    """
    greedy = flow.greedy_baseline
    return tuple(
        RoleTasks(role, trains=True, generates=True, forwards=own_forwards, greedy=greedy)
        if role == "actor"
        # A reward model scores the greedy answers too.
        else RoleTasks(role, trains=ROLES[role].trains, greedy=greedy and role == "reward")
        for role in roles or flow.roles
    )


TASKS: Mapping[str, tuple[RoleTasks, ...]] = {
    name: role_tasks(flow) for name, flow in DATAFLOWS.items()
}


@dataclasses.dataclass(frozen=True)
class RoleMapping:
    """Pool and layout of a role.

    Attributes:
      name: name of the role.
      pool: index of its pool.
      layout: layout of its mesh; of one that does not sample, with the sizes of training for generation too.
      slots: slots per replica of generation; 0 for a role that does not sample.
      cache_tokens: tokens of a paged cache per replica; 0 if every slot has room for the longest sample.
    """

    name: str
    pool: int
    layout: ParallelLayout
    slots: int = 0
    cache_tokens: int = 0


class StepSimulator:
    """Simulates what a role does on one cluster.

    Attributes:
      passes: simulator of forward passes and updates.
      generating: simulator of generation.
      workload: work of a step.
    """

    def __init__(self, cluster: Cluster, workload: Workload, assumptions: Assumptions):
        """Args are the devices, the work of a step, and the assumptions."""
        self.workload = workload
        self.passes = PassSimulator(cluster, workload, assumptions)
        self.generating = GenerationSimulator(cluster, workload, assumptions)


def simulate_step(
    tasks: Sequence[RoleTasks],
    models: Mapping[str, ModelConfig],
    roles: Mapping[str, RoleMapping],
    simulators: Mapping[str, StepSimulator],
) -> StepCosts:
    """The costs of each stage of a step.

    Args:
      tasks: tasks of the roles, in the order of the dataflow.
      models: model of each role.
      roles: mapping of each role. The one that generates has slots, or else the role "rollout" samples for
        it, on devices of its own.
      simulators: by role the simulator of its devices.
    """
    generation, preparation, training = [], [], []
    for task in tasks:
        model, role, simulator = models[task.name], roles[task.name], simulators[task.name]
        if task.generates:
            # With a sampler on devices of its own the actor generates nothing itself.
            sampler = roles.get("rollout", role)
            costs = simulators[sampler.name].generating.generation(
                *(model, sampler.layout, sampler.slots, sampler.cache_tokens),
                greedy=task.greedy,
            )
            generation.append(TaskCosts("generation", sampler.name, sampler.pool, costs))
        if task.forwards:
            share = task.share(simulator.workload)
            once = simulator.passes.inference(model, role.layout, share=share)
            seconds = {cause: task.forwards * s for cause, s in once.seconds.items()}
            # Resident bytes of a trained role are counted once, with its training.
            resident = {} if task.trains else once.resident
            costs = dataclasses.replace(once, seconds=seconds, resident=resident)
            preparation.append(TaskCosts("preparation", task.name, role.pool, costs))
        if task.trains:
            costs = simulator.passes.training(model, role.layout)
            training.append(TaskCosts("training", task.name, role.pool, costs))
    return StepCosts((*generation, *preparation, *training))
