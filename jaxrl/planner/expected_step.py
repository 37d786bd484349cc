"""The expected seconds of a run's step, simulated for its layouts, pools and slots.

`jaxrl plan` prints them above the roofline's lower bounds, and the search prints them for the mapping that it
proposes. Not covered: offloading, transfers between pools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxrl.config.schema import Config
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.planned_roles import PlannedRoles
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator
from jaxrl.planner.simulation.step_simulator import (
    RoleMapping,
    StageBreakdown,
    StepSimulator,
    TaskCosts,
)
from jaxrl.planner.simulation.step_tasks import RoleTasks, role_tasks
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy
from jaxrl.planner.step_load import StepLoad, assumptions_of
from jaxrl.rollout.engine import Engine
from jaxrl.trainer.algorithm import Algorithm

# Roles that sample with an engine; their work is no pass over packed rows.
_SAMPLERS = ("rollout", "judge")


def tasks_of_run(algorithm: Algorithm, config: Config) -> tuple[RoleTasks, ...]:
    """The tasks of a run's roles, without a judge and without a sampler on devices of its own."""
    shared = algorithm.shares_forward / config.algorithm.updates_per_step
    roles = [role for role in algorithm.roles if role not in _SAMPLERS]
    return role_tasks(algorithm.dataflow, roles, own_forwards=1 - shared)


def expected_step(
    planned: PlannedRoles, cluster: Cluster, load: StepLoad
) -> tuple[StageBreakdown, ...]:
    """Simulates each stage of a step, with the engine's own scheduler and pages.

    Args:
      planned: roles of the run.
      cluster: devices of the run.
      load: work of a step.
    """
    tasks = tasks_of_run(planned.algorithm, planned.config)
    roles = {
        name: RoleMapping(name, number, _training(pool.layout_of(name)), None)
        for number, pool in enumerate(planned.pools.values())
        for name in pool.roles
        if name not in _SAMPLERS
    }
    if planned.sampler == "rollout":
        roles["rollout"] = _sampler(planned, "rollout", planned.engine)
    else:
        generation = _generation(planned.pool_of("actor").layout_of("actor"), planned.engine)
        roles["actor"] = dataclasses.replace(roles["actor"], generation=generation)
    assumptions = assumptions_of(planned.config, cluster.accelerator, load.system)
    simulator = StepSimulator(cluster, load.work, assumptions)
    stages = simulator.step(tasks, planned.models.by_role, roles, replay=True)
    generation, preparation, training = stages
    generation = generation.times(load.lengths.batches)
    if planned.judge is None:
        return generation, preparation, training
    role = _sampler(planned, "judge", planned.judge)
    verdicts = load.of_verdicts(planned.config.reward.judge.max_verdict_tokens).work
    assert role.generation is not None, "a judge samples"
    costs = GenerationSimulator(cluster, verdicts, assumptions).generation(
        planned.models.by_role["judge"], role.strategy, role.generation, replay=True
    )
    judged = (*preparation.tasks, TaskCosts("judge", role.pool, costs))
    return generation, dataclasses.replace(preparation, tasks=judged), training


def step_seconds(stages: Iterable[float], *, overlaps: bool) -> float:
    """Seconds of a step from those of its stages, of which generation is the first.

    Args:
      stages: seconds of each stage.
      overlaps: whether generation runs at the same time as the others, for the next step.
    """
    generation, *rest = stages
    return max(generation, sum(rest)) if overlaps else generation + sum(rest)


def _training(layout: ParallelLayout) -> Strategy:
    shares = (layout.fsdp, layout.expert, layout.context)
    return Strategy(layout.p, layout.t, layout.d, *shares)


def _generation(layout: ParallelLayout, engine: Engine) -> GenerationStrategy:
    pages, slots = engine.pages, engine.config.slots // engine.shards
    tokens = 0 if pages is None else (pages.num_pages - 1) * pages.page_tokens
    return GenerationStrategy(layout.p_g, layout.t_g, slots, tokens)


def _sampler(planned: PlannedRoles, role: str, engine: Engine) -> RoleMapping:
    """A role that only samples: its weights are in the layout of generation already."""
    pool = planned.pool_of(role)
    layout = pool.layout_of(role)
    replicas = layout.num_devices // (layout.p_g * layout.t_g)
    number = list(planned.pools).index(pool.name)
    strategy = Strategy(layout.p_g, layout.t_g, replicas, expert=layout.expert)
    return RoleMapping(role, number, strategy, _generation(layout, engine))
