"""The mapping search: finds which roles share devices, the size of each pool, and each role's strategy.

HybridFlow's Algorithm 1 (section 6): the latency of a stage is the sum over the roles of a pool, and of these
the maximum over pools; a step is the sum of its stages.

    every placement (set partition)          mapping.py
      every size of each pool                here: fronts of pools, merged one by one
        every layout of each role            pool_fronts.py (Algorithm 2)
          every p_g, t_g, slots of an actor  pool_fronts.py

                    devices   generation   preparation   training
    actor pool         8         10 s           2 s          6 s
    critic pool        4          0 s           1 s          9 s
    side by side      12         10 s           2 s          9 s      a step: 21 s

Example: PPO on two hosts of 8 devices. Suppose the first placement, all roles on all 16 devices, takes 31 s
per step. With the critic in its own pool, on 8 + 8 devices, a step takes max(generation) + max(preparation) +
max(training) = 14 + 3 + 9 = 26 s, which is the new bound. If the fastest generation takes 8 s, a pool of 4
devices whose critic trains for 20 s is then ruled out without looking at other pools.

The paper enumerates allocations that use all N devices. Here devices may be idle, because a number that
divides well can be faster than a larger one. The search drops only choices that are beaten in devices and in
every stage, or slower than a known mapping (`Bounds`). The optimum is never lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf

import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.search.mapping import (
    ColocatedSet,
    Mapping,
    MappingProblem,
    Placement,
    PlacementResult,
    SearchLimits,
    placements_of,
)
from jaxrl_planner.search.pool_fronts import (
    DEVICES,
    GENERATION,
    PREPARATION,
    TRAINING,
    PoolFront,
    PoolSolver,
    divisors,
    pareto_front,
)
from jaxrl_planner.simulation.assumptions import Assumptions, Remat
from jaxrl_planner.simulation.step_simulator import TASKS, RoleMapping, RoleTasks
from jaxrl_planner.simulation.workload import Workload


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
    remats: Sequence[Remat] = (),
) -> Mapping:
    """Finds the fastest mapping of a dataflow's roles to a cluster, by simulation (HybridFlow Algorithm 1).

    Args:
      dataflow: name of the dataflow.
      models: model of each role; a role without a model is a function on the host.
      workload: work of a step.
      cluster: cluster, or its name in the format of `Cluster.parse`.
      assumptions: assumptions of the simulation; None takes those for the kind of device.
      limits: limits of the searched strategies.
      tasks: tasks of the roles; None takes those of the dataflow in `step_simulator.TASKS`.
      every_placement: whether to find the best mapping of every placement, even if a bound shows it is
        slower.
      common_rows: whether all roles have the same number of microbatch rows, as in a run, which has a single
        `train.rows`.
      remats: kinds of rematerialisation to try, "offload_inputs" only if those before do not fit; empty for
        that of the assumptions.

    Raises:
      UserError: the topology is wrong, or the models do not fit; then the message has the smallest cluster
        of this kind that would hold them.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    problem = MappingProblem(
        dataflow,
        tuple(role for role in tasks or TASKS[dataflow] if role.name in models),
        models,
        workload,
        cluster,
        assumptions or Assumptions.on(cluster.accelerator),
        limits or SearchLimits(),
    )
    found: list[Mapping] = []
    has_uneven = False
    for remat in remats or (problem.assumptions.remat,):
        if remat == "offload_inputs" and found:
            break
        assume = dataclasses.replace(problem.assumptions, remat=remat)
        problem = dataclasses.replace(problem, assumptions=assume)
        fastest = fastest_mapping(problem, every_placement=every_placement)
        rows = {role.layout.row_parts for role in fastest.roles.values()} if fastest else ()
        if fastest and common_rows and len(rows) > 1:
            # Search again with each divisor of their least common multiple.
            has_uneven, each = True, []
            for number in divisors(fastest.microbatch_rows):
                work = dataclasses.replace(problem.workload, microbatch_rows=number)
                each.append(fastest_mapping(dataclasses.replace(problem, workload=work)))
            fastest = min(filter(None, each), key=lambda mapping: mapping.seconds, default=None)
        found += [fastest] if fastest else []
    if has_uneven and not found:
        raise UserError(
            f"{cluster.name} holds the models only if their microbatches have different numbers of rows, and "
            "train.rows is one for all; lower train.row_tokens, take a larger cluster, or set mesh.layout to "
            "as_given and name a placement"
        )
    if not found:
        raise UserError(_does_not_fit(problem))
    return min(found, key=lambda mapping: mapping.seconds)


def fastest_mapping(problem: MappingProblem, *, every_placement: bool = False) -> Mapping | None:
    """The fastest mapping of a problem; None if the models do not fit. Args as of `search_mapping`."""
    search = _Search(problem)
    names = tuple(role.name for role in problem.roles)
    best, results = None, []
    # Placements with few pools are searched fast, and their results bound the others.
    for placement in sorted(placements_of(names), key=len):
        found = search.best_of(placement)
        if found is None:
            # It does not fit, or a bound is lower.
            bounded = math.isfinite(search.bounds.best_s)
            results.append(PlacementResult(placement, (), None if bounded else math.inf))
            continue
        seconds, chosen = found
        devices = {pool: n for pool, n, _ in chosen}
        sizes = tuple(devices[pool] for pool in placement)
        results.append(PlacementResult(placement, sizes, seconds))
        if best is None or seconds < best[0]:
            best = found
            if not every_placement:
                search.bounds.lower(seconds)
    if best is None:
        return None
    results.sort(key=lambda r: math.inf if r.seconds is None else r.seconds)
    pools, mappings, first = [], {}, 0
    # Larger pools first: with whole hosts, none then crosses the border of another's host.
    for pool, devices, choice in sorted(best[1], key=lambda found: (-found[1], found[0])):
        mappings |= {name: dataclasses.replace(choice[name], pool=len(pools)) for name in pool}
        pools.append(ColocatedSet(pool, first, devices))
        first += devices
    roles = {name: mappings[name] for name in names}
    return Mapping(
        dataflow=problem.dataflow,
        cluster=problem.cluster.name,
        num_devices=problem.cluster.num_devices,
        pools=tuple(pools),
        roles=roles,
        breakdown=search.solver.simulator.step(problem.roles, problem.models, roles),
        placements=tuple(results),
        budget_bytes=problem.budget_bytes,
        common_rows=problem.workload.microbatch_rows,
        remat=problem.assumptions.remat,
    )


# A chosen pool: names of its roles, number of its devices, and the mapping of each role.
_ChosenPool = tuple[tuple[str, ...], int, MappingOf[str, RoleMapping]]


class _Search:
    """Searches placements one after the other; results of a pool are shared by all placements with it.

    Attributes:
      solver: solver for pools.
      bounds: upper bounds of the seconds of a step. The cached fronts of a pool may lack points that a bound
        excluded. Bounds only decrease, so these points stay useless.
    """

    def __init__(self, problem: MappingProblem):
        """Simulates the actor alone, to get a lower bound for every generation."""
        self._cluster = problem.cluster
        self._actor = problem.actor.name
        self.solver = PoolSolver(problem)
        sizes = problem.cluster.pool_sizes
        alone = (self.solver.front([self._actor], n).points[:, GENERATION] for n in sizes)
        self.bounds = Bounds(sizes, [seconds.min(initial=np.inf) for seconds in alone])
        self._fronts: dict[tuple[str, ...], PoolFront] = {}
        # No pools have no devices and take no seconds.
        nothing = SideBySide(np.zeros((1, 4)), np.zeros((1, 0), int))
        self._merged: dict[Placement, SideBySide] = {(): nothing}

    def best_of(self, placement: Placement) -> tuple[float, list[_ChosenPool]] | None:
        """(seconds, pools) of a placement's best mapping; None if none fits or is faster than the bound."""
        # The actor's pool is last. Before it no pool generates, so points have one coordinate less.
        pools = tuple(sorted(placement, key=lambda pool: (self._actor in pool, pool)))
        best = self._merge(pools[:-1]).best_with(
            self._front_of(pools[-1]).points,
            most_devices=self._cluster.num_devices,
            below_s=self.bounds.below_s,
        )
        if best is None:
            return None
        seconds, picks = best
        fronts = [self._front_of(names) for names in pools]
        return seconds, [
            (names, int(front.points[k, DEVICES]), front.choices[k])
            for names, front, k in zip(pools, fronts, picks, strict=True)
        ]

    def _front_of(self, names: tuple[str, ...]) -> PoolFront:
        # The trade-offs of a pool over all its sizes.
        if names not in self._fronts:
            points, choices = [np.zeros((0, 4))], []
            for devices in self._cluster.pool_sizes:
                # A lower bound of a step in which these roles share this many devices.
                left = self._cluster.num_devices - devices
                generating = float(devices if self._actor in names else left)
                least_s = self.solver.least_passes_s(names, devices)
                if least_s + self.bounds.generation_s(np.array(generating)) > self.bounds.below_s:
                    continue
                most_passes_s = self.bounds.most_passes_s
                front = self.solver.front(names, devices, most_passes_s=most_passes_s)
                points.append(front.points)
                choices += front.choices
            every = np.concatenate(points)
            near = np.flatnonzero(self.bounds.may_be_best(every))
            kept = near[pareto_front(every[near])]
            self._fronts[names] = PoolFront(every[kept], tuple(choices[i] for i in kept))
        return self._fronts[names]

    def _merge(self, pools: Placement) -> SideBySide:
        # Combines pools side by side, leaving devices for another pool.
        if pools not in self._merged:
            self._merged[pools] = self._merge(pools[:-1]).with_pool(
                self._front_of(pools[-1]).points,
                most_devices=self._cluster.num_devices - self._cluster.pool_sizes[0],
                interesting=self.bounds.may_be_best,
            )
        return self._merged[pools]


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Trade-offs of several pools together.

    Attributes:
      points: float64 [K, 4], columns as of `PoolFront`.
      picks: int64 [K, pools], index of each pool's point.
    """

    points: np.ndarray
    picks: np.ndarray

    def with_pool(
        self,
        pool: np.ndarray,
        *,
        most_devices: int,
        interesting: Callable[[np.ndarray], np.ndarray],
    ) -> SideBySide:
        """Combines each trade-off with each point of another pool, and keeps the Pareto front.

        Args:
          pool: float64 [J, 4], points of the pool.
          most_devices: maximum number of devices of all pools together.
          interesting: mask of the points to keep, from points float64 [..., 4].
        """
        points = np.maximum(self.points[:, None], pool[None])
        points[..., DEVICES] = self.points[:, None, DEVICES] + pool[None, :, DEVICES]
        i, j = np.nonzero((points[..., DEVICES] <= most_devices) & interesting(points))
        kept = pareto_front(points[i, j])
        i, j = i[kept], j[kept]
        return SideBySide(points[i, j], np.concatenate([self.picks[i], j[:, None]], axis=1))

    def best_with(
        self, pool: np.ndarray, *, most_devices: int, below_s: float
    ) -> tuple[float, tuple[int, ...]] | None:
        """(seconds, index of each pool's point) of the fastest step with a last pool.

        None if no step on at most `most_devices` takes less than `below_s` seconds.
        """
        best = None
        for j, point in enumerate(pool):
            seconds = np.maximum(self.points[:, GENERATION:], point[GENERATION:]).sum(axis=1)
            seconds[self.points[:, DEVICES] + point[DEVICES] > most_devices] = np.inf
            i = int(seconds.argmin()) if len(seconds) else -1
            if i >= 0 and seconds[i] < below_s:
                below_s = float(seconds[i])
                best = below_s, (*self.picks[i].tolist(), j)
        return best


# Rounding in sums of seconds; a choice is ruled out only if it is slower by more.
_SLACK = 1 + 1e-12


class Bounds:
    """Lower and upper bounds of the seconds of a step, by which the search skips what cannot be the best.

    A bound is safe if it never rules out the best mapping. These rest on one fact: roles that share memory
    with the actor leave it no more slots than it has alone, so it never generates faster than alone.

    Attributes:
      best_s: seconds of the fastest known mapping. It only decreases, so excluded choices stay excluded.
    """

    def __init__(self, sizes: Sequence[int], alone_s: Sequence[float]):
        """Nothing is known yet.

        Args:
          sizes: possible numbers of devices of a pool, ascending; the last is the whole cluster.
          alone_s: seconds of the fastest generation of an actor alone, by size; infinite if it does not fit.
        """
        self.best_s = math.inf
        self._sizes = np.array(sizes)
        self._generation_s = np.minimum.accumulate(alone_s)

    def lower(self, seconds: float) -> None:
        self.best_s = min(self.best_s, seconds)

    @property
    def below_s(self) -> float:
        """Upper bound: the best mapping takes fewer seconds per step than this."""
        return self.best_s * _SLACK

    @property
    def most_passes_s(self) -> float:
        """Maximum seconds of preparation and training, with any generation."""
        return self.below_s - float(self._generation_s[-1])

    def generation_s(self, devices: np.ndarray) -> np.ndarray:
        """Seconds of the fastest generation on at most `devices`; infinite if the actor does not fit."""
        place = np.searchsorted(self._sizes, devices, side="right") - 1
        return np.where(place >= 0, self._generation_s[np.maximum(place, 0)], np.inf)

    def may_be_best(self, points: np.ndarray) -> np.ndarray:
        """Which pools side by side may be part of a mapping that is faster than the best known.

        Their step takes preparation and training, and generation: theirs, or the fastest on what they leave.

        Args:
          points: float64 [..., 4], as of `SideBySide`.
        """
        left = self._sizes[-1] - points[..., DEVICES]
        here = points[..., GENERATION]
        generation = np.where(here > 0, here, self.generation_s(left))
        return points[..., PREPARATION] + points[..., TRAINING] + generation <= self.below_s


def _does_not_fit(problem: MappingProblem) -> str:
    # Names a cluster that would hold the models that do not fit this one.
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
