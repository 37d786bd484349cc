"""Builds the mapping for the user from the choices of a search: devices of pools, and cost breakdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.planner.search.mapping import Alternative, ColocatedSet, Mapping, PlacementResult
from jaxrl.planner.search.mapping_problem import MappingProblem
from jaxrl.planner.search.placements import placement_name
from jaxrl.planner.search.pool_fronts import PoolChoice, PoolFront, PoolSolver
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
    # Larger pools first: with whole hosts, none then crosses the border of another's host.
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


def alternatives_of(
    mapping: Mapping,
    pools: Sequence[ChosenPool],
    fronts: Sequence[PoolFront],
    *,
    within: float,
) -> tuple[Alternative, ...]:
    """Mappings that are slower by at most a share: other placements, and other layouts of one pool.

    Of another placement only the best mapping is listed, and of a pool the layouts that no other layout beats
    in every stage.

    Args:
      mapping: the fastest mapping.
      pools: its pools.
      fronts: front of each pool.
      within: the share.
    """
    own = np.array([_stage_seconds(mapping, pool.names) for pool in pools])
    found = [
        (f"{placement_name(each.placement)} on {' + '.join(map(str, each.devices))}", each.seconds)
        for each in mapping.placements
        if set(each.placement) != {pool.names for pool in pools} and each.seconds is not None
    ]
    for i, (pool, front) in enumerate(zip(pools, fronts, strict=True)):
        others = np.delete(own, i, axis=0).max(axis=0, initial=0.0)
        seconds = np.maximum(front.seconds, others).sum(axis=1).tolist()
        found += [
            (_layouts_text(choice), s)
            for choice, s in zip(front.choices, seconds, strict=True)
            if choice != pool.choice
        ]
    best = mapping.seconds
    slower = [Alternative(name, s / best - 1) for name, s in found if s <= best * (1 + within)]
    return tuple(sorted(slower, key=lambda each: each.slower))


def _stage_seconds(mapping: Mapping, names: Sequence[str]) -> list[float]:
    """Seconds of a pool's roles in each stage."""
    return [
        sum(task.costs.total_s for task in stage.tasks if task.role in names)
        for stage in mapping.breakdown
    ]


def _layouts_text(choice: PoolChoice) -> str:
    """The strategies of a pool's roles in a few words."""
    roles = ", ".join(f"{name} {strategy.name}" for name, strategy in choice.strategies.items())
    if (g := choice.generation) is None:
        return roles
    return f"{roles}; p_g {g.p_g}, t_g {g.t_g}, {g.slots} slots a replica"
