"""Builds the mapping for the user from the choices of a search: devices of pools, and cost breakdown."""

from __future__ import annotations

import dataclasses

from jaxrl.planner.search.mapping import ColocatedSet, Mapping, PlacementResult
from jaxrl.planner.search.mapping_problem import MappingProblem
from jaxrl.planner.search.pool_fronts import PoolChoice, PoolSolver
from jaxrl.planner.simulation.step_simulator import RoleMapping


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
        breakdown=solver.simulator.step(problem.roles, problem.models, roles),
        placements=results,
        budget_bytes=problem.budget_bytes,
        common_rows=problem.workload.microbatch_rows,
    )
