"""The mapping search: finds which roles share devices, the size of each pool, and each role's strategy.

HybridFlow's Algorithm 1 (section 6): the latency of a stage is the sum over the roles of a pool, and of these
the maximum over pools; a step is the sum of its stages.

    every placement (set partition)          mapping.py
      every size of each pool                side_by_side.py: fronts of pools, merged one by one
        every strategy of each role          pool_fronts.py (Algorithm 2), choice_costs.py
          every p_g, t_g, slots of an actor  pool_fronts.py

Example: PPO on two hosts of 8 devices. Suppose the first placement, all roles on all 16 devices, takes 31 s
per step. With the critic in its own pool, on 8 + 8 devices, a step takes max(generation) + max(preparation) +
max(training) = 14 + 3 + 9 = 26 s, which is the new bound. If the fastest generation takes 8 s, a pool of 4
devices whose critic trains for 20 s is then ruled out without looking at other pools.

The paper enumerates allocations that use all N devices. Here devices may be idle, because a number that
divides well can be faster than a larger one. The search drops only choices that are beaten in devices and in
every stage, or slower than a known mapping (side_by_side.py). The optimum is never lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.search.choice_costs import pareto_front
from jaxrl.planner.search.mapping import (
    ColocatedSet,
    Mapping,
    MappingProblem,
    Placement,
    PlacementResult,
    SearchLimits,
    placements_of,
)
from jaxrl.planner.search.pool_fronts import PoolChoice, PoolSolver, divisors
from jaxrl.planner.search.side_by_side import DEVICES, Bounds, SideBySide
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.step_simulator import RoleMapping, StepSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks, tasks_of
from jaxrl.planner.simulation.workload import Workload


def search_mapping(
    dataflow: str,
    models: MappingOf[str, ModelConfig],
    workload: Workload,
    cluster: Cluster | str,
    *,
    assumptions: Assumptions | None = None,
    limits: SearchLimits | None = None,
    tasks: Sequence[RoleTasks] | None = None,
    every_placement: bool = False,
    common_rows: bool = False,
) -> Mapping:
    """Finds the fastest mapping of a dataflow's roles to a cluster, by simulation (HybridFlow Algorithm 1).

    Args:
      dataflow: a name of `step_tasks.TASKS`.
      models: model of each role; a role without a model is a function on the host.
      workload: work of a step.
      cluster: cluster, or its name in the format of `Cluster.parse`.
      assumptions: assumptions of the simulation; None takes those for the kind of device.
      limits: limits of the searched strategies.
      tasks: tasks of the roles, to replace those of `step_tasks.TASKS`.
      every_placement: whether to find the best mapping of every placement, even if a bound shows it is
        slower.
      common_rows: whether all roles have the same number of microbatch rows, as in a run, which has a single
        `train.rows`.

    Raises:
      UserError: a name or a topology is wrong, or the models do not fit; then the message has the smallest
        cluster of this kind that would hold them.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    problem = MappingProblem(
        dataflow,
        tasks_of(dataflow, models, tasks),
        models,
        workload,
        cluster,
        assumptions or Assumptions.on(cluster.accelerator),
        limits or SearchLimits(),
    )
    found = fastest_mapping(problem, every_placement=every_placement)
    if found is None:
        raise UserError(_does_not_fit(problem))
    if not common_rows or len({r.strategy.row_parts for r in found.roles.values()}) == 1:
        return found
    # The fastest mapping needs different numbers of rows: search again with each divisor of their least
    # common multiple.
    mappings = []
    for rows in divisors(found.microbatch_rows):
        work = dataclasses.replace(workload, microbatch_rows=rows)
        with_rows = fastest_mapping(dataclasses.replace(problem, workload=work))
        if with_rows is not None:
            mappings.append(with_rows)
    if not mappings:
        raise UserError(
            f"{cluster.name} holds the models only if their microbatches have different numbers of rows, and "
            "train.rows is one for all; lower train.row_tokens, take a larger cluster, or set mesh.layout to "
            "as_given and name a placement"
        )
    return min(mappings, key=lambda mapping: mapping.seconds)


def fastest_mapping(problem: MappingProblem, *, every_placement: bool = False) -> Mapping | None:
    """The fastest mapping of a problem; None if the models do not fit. Args as of `search_mapping`."""
    search = _Search(problem)
    names = tuple(role.name for role in problem.roles)
    if not every_placement:
        search.look_below_all_together(names)
    best, results = None, []
    # Placements with few pools are searched fast, and their results bound the others.
    for placement in sorted(placements_of(names), key=len):
        found = search.best_of(placement)
        if found is None:
            # It does not fit, or a bound is lower.
            bounded = math.isfinite(search.bounds.best_s)
            results.append(PlacementResult(placement, (), None if bounded else math.inf))
            continue
        devices = {pool.names: pool.devices for pool in found.pools}
        sizes = tuple(devices[pool] for pool in placement)
        results.append(PlacementResult(placement, sizes, found.seconds))
        if best is None or found.seconds < best.seconds:
            best = found
            if not every_placement:
                search.bounds.lower(best.seconds)
    if best is None:
        return None
    results.sort(key=lambda r: math.inf if r.seconds is None else r.seconds)
    return _mapping_of(problem, search.solver.simulator, best.pools, tuple(results))


def _mapping_of(
    problem: MappingProblem,
    simulator: StepSimulator,
    chosen: tuple[_ChosenPool, ...],
    results: tuple[PlacementResult, ...],
) -> Mapping:
    """The mapping of chosen pools, with its cost breakdown."""
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
        breakdown=simulator.step(problem.roles, problem.models, roles),
        placements=results,
        budget_bytes=problem.budget_bytes,
        common_rows=problem.workload.microbatch_rows,
    )


@dataclasses.dataclass(frozen=True)
class _ChosenPool:
    """A chosen pool: its roles, its number of devices, and the strategies of its roles."""

    names: tuple[str, ...]
    devices: int
    choice: PoolChoice


@dataclasses.dataclass(frozen=True)
class _Found:
    """The best mapping of a placement."""

    seconds: float
    pools: tuple[_ChosenPool, ...]


@dataclasses.dataclass(frozen=True)
class _PoolPoints:
    """Trade-offs of one pool over all its sizes: float64 [K, 4] as in `SideBySide`, and their origins."""

    points: np.ndarray
    choices: tuple[PoolChoice, ...]


class _Search:
    """Searches placements one after the other; results of a pool are shared by all placements with it.

    Attributes:
      solver: solver for pools.
      bounds: upper bounds of the seconds of a step. The cached points of a pool may lack points that a bound
        excluded. Bounds only decrease, so these points stay useless.
    """

    def __init__(self, problem: MappingProblem):
        """Simulates the actor alone, to get a lower bound for every generation."""
        self._cluster = problem.cluster
        self._actor = problem.actor.name
        self.solver = PoolSolver(problem)
        sizes = problem.cluster.pool_sizes
        alone = (self.solver.front([self._actor], n).seconds[:, 0] for n in sizes)
        self.bounds = Bounds(sizes, [seconds.min(initial=np.inf) for seconds in alone])
        self._pool_points: dict[tuple[str, ...], _PoolPoints] = {}
        self._merged: dict[Placement, SideBySide] = {(): SideBySide.of_no_pools()}

    def look_below_all_together(self, names: tuple[str, ...]) -> None:
        """Bounds the search by the mapping of all roles on all devices: fast to find and often good."""
        self.bounds.lower(self.solver.quick_seconds(names, self._cluster.num_devices))

    def best_of(self, placement: Placement) -> _Found | None:
        """The best mapping of a placement; None if none fits or none is faster than the bound."""
        # The actor's pool is last. Before it no pool generates, so points have one coordinate less.
        pools = tuple(sorted(placement, key=lambda pool: (self._actor in pool, pool)))
        best = self._merge(pools[:-1]).best_with(
            self._points_of(pools[-1]).points,
            most_devices=self._cluster.num_devices,
            below_s=self.bounds.below_s,
        )
        if best is None:
            return None
        seconds, picks = best
        chosen = []
        for names, k in zip(pools, picks, strict=True):
            found = self._points_of(names)
            chosen.append(_ChosenPool(names, int(found.points[k, DEVICES]), found.choices[k]))
        return _Found(seconds, tuple(chosen))

    def _points_of(self, names: tuple[str, ...]) -> _PoolPoints:
        """The trade-offs of a pool over all its sizes."""
        if names not in self._pool_points:
            points, choices = [np.zeros((0, 4))], []
            for devices in self._cluster.pool_sizes:
                if self._least_s(names, devices) > self.bounds.below_s:
                    continue
                most_passes_s = self.bounds.most_passes_s
                front = self.solver.front(names, devices, most_passes_s=most_passes_s)
                size = np.full((len(front.choices), 1), float(devices))
                points.append(np.concatenate([size, front.seconds], axis=1))
                choices += front.choices
            every = np.concatenate(points)
            near = np.flatnonzero(self.bounds.may_be_best(every))
            kept = near[pareto_front(every[near])]
            self._pool_points[names] = _PoolPoints(every[kept], tuple(choices[i] for i in kept))
        return self._pool_points[names]

    def _least_s(self, names: tuple[str, ...], devices: int) -> float:
        """A lower bound of a step in which these roles share this many devices."""
        here = self._actor in names
        generating = devices if here else self._cluster.num_devices - devices
        generation_s = float(self.bounds.generation_s(np.array(float(generating))))
        return self.solver.least_passes_s(names, devices) + generation_s

    def _merge(self, pools: Placement) -> SideBySide:
        """Combines pools side by side, leaving devices for another pool."""
        if pools not in self._merged:
            self._merged[pools] = self._merge(pools[:-1]).with_pool(
                self._points_of(pools[-1]).points,
                most_devices=self._cluster.num_devices - self._cluster.pool_sizes[0],
                interesting=self.bounds.may_be_best,
            )
        return self._merged[pools]


def _does_not_fit(problem: MappingProblem) -> str:
    """Names a cluster that would hold the models that do not fit this one."""
    cluster, kind = problem.cluster, problem.cluster.accelerator
    counts = {role.name: problem.models[role.name].num_params for role in problem.roles}
    models = ", ".join(f"{name} of {count / 1e9:.1f}B" for name, count in counts.items())
    start = (
        f"{cluster.name} ({cluster.num_devices} devices of {kind.memory_gb:g} GB, of which a "
        f"program may use {problem.budget_bytes / 1e9:.1f}) does not hold {models} in any mapping; "
    )
    for shape in kind.growing_shapes():
        if kind.num_devices(shape) <= cluster.num_devices:
            continue
        larger = dataclasses.replace(problem, cluster=Cluster(kind, shape))
        if fastest_mapping(larger) is not None:
            return start + f"the smallest cluster of this kind that does is {larger.cluster.name}"
    return start + (
        f"no {kind.name} up to {kind.largest:,} devices does: take a kind with more memory, shorter "
        "sequences, or smaller microbatches"
    )
