"""Predicted seconds of a run's step by phase: the expectation, and a lower bound of it.

expectation   the step simulated for its layouts, pools and slots
at least      the roofline of every program of the phase, at the vendors' rates (compiled/ahead.py)

The search prints the same expectation for the mapping that it proposes. Not covered: offloading, transfers
between pools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.trainer.resolved import Resolved
from jaxrl_planner.compiled.ahead import Seconds
from jaxrl_planner.compiled.counts import Counts
from jaxrl_planner.hardware.cluster import Cluster, MixedCluster, group_of
from jaxrl_planner.planned_roles import PlannedRoles
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.kernel_times import TokenCounts
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.step_costs import StepCosts, TaskCosts
from jaxrl_planner.simulation.step_simulator import (
    STAGES,
    RoleMapping,
    RoleTasks,
    StepSimulator,
    role_tasks,
    simulate_step,
)
from jaxrl_planner.step_load import StepLoad, assumptions_of

# Roles that sample with an engine; their work is no pass over packed rows.
_SAMPLERS = ("rollout", "judge")
_PREPARATION = ("logprobs", "values", "scores")

# A program's role, name, phase ("sampling" or "learning") and roofline.
ProgramSeconds = tuple[str, str, str, Seconds]


@dataclasses.dataclass(frozen=True)
class StepTimes(StepCosts):
    """Predicted seconds of a step. Nothing of it was measured.

    Attributes:
      cluster: devices.
      load: assumed work of a step.
      num_steps: number of steps of the run.
      overlaps: whether sampling for the next step overlaps with the rest of a step (free running).
    """

    cluster: Cluster | MixedCluster
    load: StepLoad
    num_steps: int
    overlaps: bool = False

    @property
    def step_s(self) -> float:
        return self._step_s(at_least=False)

    @property
    def at_least_s(self) -> float:
        return self._step_s(at_least=True)

    def _step_s(self, *, at_least: bool) -> float:
        # A sampler on devices of its own works on the next step; the slower side decides.
        generation, *rest = (self.stage_s(stage, at_least=at_least) for stage in self.stages)
        return max(generation, sum(rest)) if self.overlaps else generation + sum(rest)

    def chip_hours(self, step_s: float) -> float:
        """Number of devices times hours of the run, if a step takes `step_s` seconds."""
        return step_s * self.num_steps * self.cluster.num_devices / 3600


def step_times(
    planned: PlannedRoles,
    cluster: Cluster | MixedCluster,
    load: StepLoad,
    programs: Iterable[ProgramSeconds],
    token: Counts | None = None,
) -> StepTimes:
    """Simulates a step, and adds up the rooflines of its programs by phase.

    Args:
      planned: roles of the run.
      cluster: devices of the run.
      load: work of a step.
      programs: rooflines of all programs of a step.
      token: what the compiled decode loop does for a token; None takes a table.
    """
    floors: dict[tuple[str, str], list[Seconds]] = {}
    # The weights of the sampler are the actor's, whatever pool they are on.
    sampler = {"rollout": "actor"}
    for role, name, phase, seconds in programs:
        stage = "training"
        if name in _PREPARATION or role == "judge":
            stage = "preparation"
        elif phase == "sampling":
            stage = "generation"
        floors.setdefault((stage, sampler.get(role, role)), []).append(seconds)
    tasks = []
    for task in expected_step(planned, cluster, load, token).tasks:
        found = floors.get((task.stage, sampler.get(task.role, task.role)), [])
        slowest = max(found, key=lambda seconds: seconds.total, default=None)
        at_least_s = sum(seconds.total for seconds in found)
        bound = slowest.bound if slowest else ""
        tasks.append(dataclasses.replace(task, at_least_s=at_least_s, bound=bound))
    steps, overlaps = planned.config.run.num_steps, planned.resolved.runs_free
    return StepTimes(tuple(tasks), cluster, load, steps, overlaps)


def expected_step(
    planned: PlannedRoles,
    cluster: Cluster | MixedCluster,
    load: StepLoad,
    token: Counts | None = None,
) -> StepCosts:
    """Simulates each stage of a step, as the search does.

    Args:
      planned: roles of the run.
      cluster: devices of the run.
      load: work of a step.
      token: as of `step_times`.
    """
    models, roles, simulators = planned.models.by_role, {}, {}
    engines = {planned.sampler: planned.engine, "judge": planned.judge}
    for number, pool in enumerate(planned.pools):
        group = group_of(pool, cluster)
        assumptions = assumptions_of(planned.config, group.accelerator)
        counted = _counted(assumptions, token, planned) if token else assumptions
        simulators |= dict.fromkeys(pool.roles, StepSimulator(group, load.work, counted))
        for name in pool.roles:
            layout, engine, slots, tokens = pool.layout_of(name), engines.get(name), 0, 0
            if name in _SAMPLERS:
                # The weights of a role that only samples are in the layout of generation already.
                p, t = layout.p_g, layout.t_g
                replicas = layout.num_devices // (p * t)
                layout = ParallelLayout(p, t, replicas, p, t, expert=layout.expert)
            if engine is not None:
                slots = engine.config.slots // engine.shards
                if (pages := engine.pages) is not None:
                    # Page 0 is a scratch page.
                    tokens = (pages.num_pages - 1) * pages.page_tokens
            roles[name] = RoleMapping(name, number, layout, slots, tokens)
    step = simulate_step(tasks_of_run(planned.resolved), models, roles, simulators)
    if "judge" not in roles:
        return step
    role, group = roles["judge"], group_of(planned.pool_of("judge"), cluster)
    verdicts = load.of_verdicts(planned.config.reward.judge.max_verdict_tokens).work
    assumptions = assumptions_of(planned.config, group.accelerator)
    costs = GenerationSimulator(group, verdicts, assumptions).generation(
        *(models["judge"], role.layout, role.slots, role.cache_tokens)
    )
    judged = TaskCosts("preparation", "judge", role.pool, costs)
    # After the tasks of preparation.
    return StepCosts(tuple(sorted((*step.tasks, judged), key=lambda t: STAGES.index(t.stage))))


def _counted(assumptions: Assumptions, token: Counts, planned: PlannedRoles) -> Assumptions:
    # With what the compiled decode loop does for a token.
    rows = planned.engine.config.slots // planned.engine.shards
    found = TokenCounts(
        token.kernels,
        token.weight_bytes_copied,
        (token.other_bytes + token.product_bytes) / rows,
        token.host_visits,
        assumptions.kernels.row_rounds * (token.loops_beside > 0),
    )
    return dataclasses.replace(assumptions, token=found)


def tasks_of_run(resolved: Resolved) -> tuple[RoleTasks, ...]:
    """The tasks of a run's roles, without a judge and without a sampler on devices of its own."""
    # The update computes the old log-probabilities of the first minibatch.
    shared = resolved.shares_forward / resolved.config.algorithm.updates_per_step
    roles = [role for role in resolved.roles if role not in _SAMPLERS]
    return role_tasks(resolved.dataflow, roles, own_forwards=1 - shared)
