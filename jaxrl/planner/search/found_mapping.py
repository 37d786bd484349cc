"""Builds the mapping for the user from the choices of a search: devices of pools, and cost breakdown."""

from __future__ import annotations

import dataclasses

from jaxrl.planner.search.mapping import (
    ColocatedSet,
    Mapping,
    PlacementResult,
    RoleMapping,
    StageBreakdown,
    TaskCosts,
)
from jaxrl.planner.search.mapping_problem import MappingProblem
from jaxrl.planner.search.pool_fronts import PoolChoice, PoolSolver
from jaxrl.planner.simulation.step_tasks import RoleTasks


@dataclasses.dataclass(frozen=True)
class ChosenPool:
    """A chosen pool: its roles, its number of devices, and the strategies of its roles."""

    names: tuple[str, ...]
    devices: int
    choice: PoolChoice


def mapping_of(
    problem: MappingProblem,
    solver: PoolSolver,
    chosen: tuple[ChosenPool, ...],
    results: tuple[PlacementResult, ...],
) -> Mapping:
    """Builds the mapping with its cost breakdown.

    Args:
      problem: problem that was solved.
      solver: solver that found the choices.
      chosen: chosen pools.
      results: best result of every placement, for comparison.
    """
    # Larger pools first: none then crosses the border of another's host.
    ordered = sorted(chosen, key=lambda pool: (-pool.devices, pool.names))
    pools, found, first = [], {}, 0
    for index, pool in enumerate(ordered):
        pools.append(ColocatedSet(pool.names, first, pool.devices))
        first += pool.devices
        for name in pool.names:
            generation = pool.choice.generation if name == problem.actor.name else None
            found[name] = RoleMapping(name, index, pool.choice.strategies[name], generation)
    roles = {role.name: found[role.name] for role in problem.roles}
    return Mapping(
        dataflow=problem.dataflow,
        cluster=problem.cluster.name,
        num_devices=problem.cluster.num_devices,
        pools=tuple(pools),
        roles=roles,
        breakdown=_breakdown(problem, solver, roles),
        placements=results,
        budget_bytes=problem.budget_bytes,
    )


def _breakdown(
    problem: MappingProblem, solver: PoolSolver, roles: dict[str, RoleMapping]
) -> tuple[StageBreakdown, ...]:
    stages = {
        "generation": [_generation(problem, solver, roles[problem.actor.name])],
        "preparation": [
            _preparation(problem, solver, tasks, roles[tasks.name])
            for tasks in problem.roles
            if tasks.forwards
        ],
        "training": [
            _training(problem, solver, roles[tasks.name]) for tasks in problem.roles if tasks.trains
        ],
    }
    return tuple(StageBreakdown(name, tuple(tasks)) for name, tasks in stages.items())


def _generation(problem: MappingProblem, solver: PoolSolver, role: RoleMapping) -> TaskCosts:
    assert role.generation is not None, "the actor generates"
    costs = solver.generating.generation(
        problem.models[role.name], role.strategy, role.generation, greedy=problem.actor.greedy
    )
    return TaskCosts(role.name, role.pool, costs)


def _preparation(
    problem: MappingProblem, solver: PoolSolver, tasks: RoleTasks, role: RoleMapping
) -> TaskCosts:
    model, share = problem.models[role.name], solver.passes.share_of(tasks)
    once = solver.passes.inference(model, role.strategy, share=share)
    seconds = {cause: tasks.forwards * s for cause, s in once.seconds.items()}
    # Resident bytes of a trained role are counted once, with its training.
    resident = {} if tasks.trains else once.resident
    costs = dataclasses.replace(once, seconds=seconds, resident=resident)
    return TaskCosts(role.name, role.pool, costs)


def _training(problem: MappingProblem, solver: PoolSolver, role: RoleMapping) -> TaskCosts:
    costs = solver.passes.training(problem.models[role.name], role.strategy)
    return TaskCosts(role.name, role.pool, costs)
