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

In a cluster of groups (`MixedCluster`) a pool lies in one of them, any one, and is simulated with the figures
of its kind; devices count for each group. No weights move between groups, because the actor samples where it
learns.

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
import functools
import math
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf

import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.hardware.cluster import Cluster, MixedCluster, read_cluster
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
    SECONDS,
    TRAINING,
    PoolFront,
    PoolSolver,
    divisors,
    pareto_front,
)
from jaxrl_planner.simulation.assumptions import Assumptions, Remat
from jaxrl_planner.simulation.step_simulator import TASKS, RoleMapping, RoleTasks, simulate_step
from jaxrl_planner.simulation.workload import Workload


def search_mapping(
    dataflow: str,
    models: MappingOf[str, ModelConfig],
    workload: Workload,
    cluster: Cluster | MixedCluster | str,
    *,
    assumptions: Assumptions | Callable[[Accelerator], Assumptions] = Assumptions.on,
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
      cluster: cluster, or its name in the format of `read_cluster`.
      assumptions: assumptions of the simulation, or those for a kind of device.
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
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    problems = [
        MappingProblem(
            dataflow,
            tuple(role for role in tasks or TASKS[dataflow] if role.name in models),
            models,
            workload,
            group,
            assumptions(group.accelerator) if callable(assumptions) else assumptions,
            limits or SearchLimits(),
        )
        for group in cluster.groups
    ]

    fastest = functools.partial(
        _fastest_remat, remats=remats, every_placement=every_placement, common_rows=common_rows
    )
    found, has_uneven = fastest(problems)
    if len(problems) > 1:
        # To be compared with the cluster, a group is also tried with the number of rows found there.
        rows = (found.microbatch_rows,) if found and common_rows else ()
        alone = [fastest([problem], also_rows=rows)[0] for problem in problems]
        # A mapping to one group is one to the cluster. The cluster's own is slower than it only because not
        # all numbers of rows and kinds of rematerialisation were tried.
        every = [mapping for mapping in (found, *alone) if mapping is not None]
        found = min(every, key=lambda mapping: mapping.seconds, default=None)
        if found is not None:
            names = [group.name for group in cluster.groups]
            found = dataclasses.replace(
                found,
                cluster=cluster.name,
                num_devices=cluster.num_devices,
                alone=tuple(zip(names, alone, strict=True)),
            )
    if found is None and has_uneven:
        raise UserError(
            f"{cluster.name} holds the models only if their microbatches have different numbers of rows, and "
            "train.rows is one for all; lower train.row_tokens, take a larger cluster, or set mesh.layout to "
            "as_given and name a placement"
        )
    if found is None:
        raise UserError(_does_not_fit(problems, remats))
    return found


def _with_remat(problems: Sequence[MappingProblem], remat: Remat) -> list[MappingProblem]:
    return [
        dataclasses.replace(each, assumptions=dataclasses.replace(each.assumptions, remat=remat))
        for each in problems
    ]


def _fastest_remat(
    problems: Sequence[MappingProblem],
    *,
    remats: Sequence[Remat],
    every_placement: bool,
    common_rows: bool,
    also_rows: Sequence[int] = (),
) -> tuple[Mapping | None, bool]:
    # The fastest mapping, args as of `search_mapping`; and whether some fit with uneven rows only.
    # `also_rows` are further common numbers of rows to try.
    found: list[Mapping] = []
    has_uneven = False
    for remat in remats or (problems[0].assumptions.remat,):
        if remat == "offload_inputs" and found:
            break
        problems = _with_remat(problems, remat)
        fastest = fastest_mapping(problems, every_placement=every_placement)
        rows = {role.layout.row_parts for role in fastest.roles.values()} if fastest else ()
        each, numbers = [fastest], also_rows
        if fastest and common_rows and len(rows) > 1:
            # Search again with each divisor of their least common multiple.
            has_uneven, each = True, []
            numbers = dict.fromkeys((*divisors(fastest.microbatch_rows), *also_rows))
        for number in numbers:
            work = dataclasses.replace(problems[0].workload, microbatch_rows=number)
            each.append(fastest_mapping([dataclasses.replace(p, workload=work) for p in problems]))
        fits = filter(None, each)
        found += sorted(fits, key=lambda mapping: mapping.seconds)[:1]
    return min(found, key=lambda mapping: mapping.seconds, default=None), has_uneven


def fastest_mapping(
    problems: Sequence[MappingProblem], *, every_placement: bool = False
) -> Mapping | None:
    """The fastest mapping; None if the models do not fit.

    Args:
      problems: the problem on each group of the cluster, which differ in devices and assumptions.
      every_placement: as of `search_mapping`.
    """
    search, problem = _Search(problems), problems[0]
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
        devices = {pool: n for pool, _, n, _ in chosen}
        sizes = tuple(devices[pool] for pool in placement)
        results.append(PlacementResult(placement, sizes, seconds))
        if best is None or seconds < best[0]:
            best = found
            if not every_placement:
                search.bounds.lower(seconds)
    if best is None:
        return None
    results.sort(key=lambda r: math.inf if r.seconds is None else r.seconds)
    pools, mappings, simulators = [], {}, {}
    firsts = [each.cluster.first for each in problems]
    # Larger pools first: with whole hosts, none then crosses the border of another's host.
    for pool, group, devices, choice in sorted(best[1], key=lambda c: (c[1], -c[2], c[0])):
        mappings |= {name: dataclasses.replace(choice[name], pool=len(pools)) for name in pool}
        simulators |= dict.fromkeys(pool, search.solvers[group].simulator)
        where = problems[group]
        pools.append(
            ColocatedSet(pool, firsts[group], devices, where.cluster.name, where.budget_bytes)
        )
        firsts[group] += devices
    roles = {name: mappings[name] for name in names}
    return Mapping(
        dataflow=problem.dataflow,
        cluster="+".join(each.cluster.name for each in problems),
        num_devices=sum(each.cluster.num_devices for each in problems),
        pools=tuple(pools),
        roles=roles,
        breakdown=simulate_step(problem.roles, problem.models, roles, simulators),
        placements=tuple(results),
        common_rows=problem.workload.microbatch_rows,
        remat=problem.assumptions.remat,
    )


# A chosen pool: names of its roles, index of its group, number of its devices, and the mapping of each role.
_ChosenPool = tuple[tuple[str, ...], int, int, MappingOf[str, RoleMapping]]


class _Search:
    """Searches placements one after the other; results of a pool are shared by all placements with it.

    Attributes:
      solvers: solver for the pools of each group.
      bounds: upper bounds of the seconds of a step. The cached fronts of a pool may lack points that a bound
        excluded. Bounds only decrease, so these points stay useless.
    """

    def __init__(self, problems: Sequence[MappingProblem]):
        """Simulates the actor alone, to get a lower bound for every generation."""
        self._actor = problems[0].actor.name
        self.solvers = [PoolSolver(problem) for problem in problems]
        self._sizes = [problem.cluster.pool_sizes for problem in problems]
        self._devices = np.array([problem.cluster.num_devices for problem in problems])
        alone = [
            [
                solver.front([self._actor], n).points[:, GENERATION].min(initial=np.inf)
                for n in sizes
            ]
            for solver, sizes in zip(self.solvers, self._sizes, strict=True)
        ]
        self.bounds = Bounds(self._sizes, alone)
        self._fronts: dict[tuple[str, ...], PoolFront] = {}
        # No pools have no devices and take no seconds.
        nothing = SideBySide(np.zeros((1, len(problems) + 3)), np.zeros((1, 0), int))
        self._merged: dict[Placement, SideBySide] = {(): nothing}

    def best_of(self, placement: Placement) -> tuple[float, list[_ChosenPool]] | None:
        """(seconds, pools) of a placement's best mapping; None if none fits or is faster than the bound."""
        # The actor's pool is last. Before it no pool generates, so points have one coordinate less.
        pools = tuple(sorted(placement, key=lambda pool: (self._actor in pool, pool)))
        best = self._merge(pools[:-1]).best_with(
            self._front_of(pools[-1]).points,
            most_devices=self._devices,
            below_s=self.bounds.below_s,
        )
        if best is None:
            return None
        seconds, picks = best
        chosen = []
        for names, k in zip(pools, picks, strict=True):
            front = self._front_of(names)
            # It has devices of one group.
            devices = front.points[k, DEVICES]
            group = int(devices.argmax())
            chosen.append((names, group, int(devices[group]), front.choices[k]))
        return seconds, chosen

    def _front_of(self, names: tuple[str, ...]) -> PoolFront:
        # The trade-offs of a pool over all its groups and sizes.
        if names not in self._fronts:
            groups = np.eye(len(self.solvers))
            points, choices = [np.zeros((0, len(groups) + 3))], []
            for g, solver in enumerate(self.solvers):
                for n in self._sizes[g]:
                    # A lower bound of a step in which these roles share this many devices.
                    devices = n * groups[g]
                    generating = devices if self._actor in names else self._devices - devices
                    least_s = solver.least_passes_s(names, n)
                    if least_s + self.bounds.generation_s(generating) > self.bounds.below_s:
                        continue
                    most_passes_s = self.bounds.most_passes_s
                    front = solver.front(names, n, most_passes_s=most_passes_s)
                    whose = np.broadcast_to(devices, (len(front.points), len(groups)))
                    points.append(np.concatenate([whose, front.points], axis=1))
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
                most_devices=self._devices,
                interesting=self._may_be_part,
            )
        return self._merged[pools]

    def _may_be_part(self, points: np.ndarray) -> np.ndarray:
        # Which pools side by side may be part of the best mapping, and leave a group devices for another.
        left = self._devices - points[..., DEVICES]
        has_room = (left >= [sizes[0] for sizes in self._sizes]).any(axis=-1)
        return has_room & self.bounds.may_be_best(points)


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Trade-offs of several pools together.

    Attributes:
      points: float64 [K, G + 3], columns as of `PoolFront`.
      picks: int64 [K, pools], index of each pool's point.
    """

    points: np.ndarray
    picks: np.ndarray

    def with_pool(
        self,
        pool: np.ndarray,
        *,
        most_devices: np.ndarray,
        interesting: Callable[[np.ndarray], np.ndarray],
    ) -> SideBySide:
        """Combines each trade-off with each point of another pool, and keeps the Pareto front.

        Args:
          pool: float64 [J, G + 3], points of the pool.
          most_devices: [G], maximum number of devices of all pools together, of each group.
          interesting: mask of the points to keep, from points float64 [..., G + 3].
        """
        points = np.maximum(self.points[:, None], pool[None])
        points[..., DEVICES] = self.points[:, None, DEVICES] + pool[None, :, DEVICES]
        there = (points[..., DEVICES] <= most_devices).all(axis=-1)
        i, j = np.nonzero(there & interesting(points))
        kept = pareto_front(points[i, j])
        i, j = i[kept], j[kept]
        return SideBySide(points[i, j], np.concatenate([self.picks[i], j[:, None]], axis=1))

    def best_with(
        self, pool: np.ndarray, *, most_devices: np.ndarray, below_s: float
    ) -> tuple[float, tuple[int, ...]] | None:
        """(seconds, index of each pool's point) of the fastest step with a last pool.

        None if no step on at most `most_devices` takes less than `below_s` seconds.
        """
        best = None
        for j, point in enumerate(pool):
            seconds = np.maximum(self.points[:, SECONDS], point[SECONDS]).sum(axis=1)
            over = self.points[:, DEVICES] + point[DEVICES] > most_devices
            seconds[over.any(axis=1)] = np.inf
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

    def __init__(self, sizes: Sequence[Sequence[int]], alone_s: Sequence[Sequence[float]]):
        """Nothing is known yet.

        Args:
          sizes: of each group the possible numbers of devices of a pool, ascending; the last is all of them.
          alone_s: of each group the seconds of the fastest generation of an actor alone, by size; infinite if
            it does not fit.
        """
        self.best_s = math.inf
        self._sizes = [np.array(each) for each in sizes]
        self._generation_s = [np.minimum.accumulate(each) for each in alone_s]
        self._devices = np.array([each[-1] for each in sizes])

    def lower(self, seconds: float) -> None:
        self.best_s = min(self.best_s, seconds)

    @property
    def below_s(self) -> float:
        """Upper bound: the best mapping takes fewer seconds per step than this."""
        return self.best_s * _SLACK

    @property
    def most_passes_s(self) -> float:
        """Maximum seconds of preparation and training, with any generation."""
        return self.below_s - float(self.generation_s(self._devices))

    def generation_s(self, devices: np.ndarray) -> np.ndarray:
        """Seconds of the fastest generation in one group, on at most so many devices of each, [..., G].

        They are infinite if the actor does not fit.
        """
        found = []
        for g, (sizes, seconds) in enumerate(zip(self._sizes, self._generation_s, strict=True)):
            place = np.searchsorted(sizes, devices[..., g], side="right") - 1
            found.append(np.where(place >= 0, seconds[np.maximum(place, 0)], np.inf))
        return np.minimum.reduce(found)

    def may_be_best(self, points: np.ndarray) -> np.ndarray:
        """Which pools side by side may be part of a mapping that is faster than the best known.

        Their step takes preparation and training, and generation: theirs, or the fastest on what they leave.

        Args:
          points: float64 [..., G + 3], as of `SideBySide`.
        """
        left = self._devices - points[..., DEVICES]
        here = points[..., GENERATION]
        generation = np.where(here > 0, here, self.generation_s(left))
        return points[..., PREPARATION] + points[..., TRAINING] + generation <= self.below_s


def _does_not_fit(problems: Sequence[MappingProblem], remats: Sequence[Remat]) -> str:
    # Names a cluster of one kind, that of most memory, which would hold the models that do not fit.
    problems = _with_remat(problems, remats[-1]) if remats else problems
    problem = max(problems, key=lambda each: each.cluster.accelerator.memory_gb)
    kind = problem.cluster.accelerator
    counts = {role.name: problem.models[role.name].num_params for role in problem.roles}
    models = ", ".join(f"{name} of {count / 1e9:.1f}B" for name, count in counts.items())
    groups = [
        f"{each.cluster.name} ({each.cluster.num_devices} devices of "
        f"{each.cluster.accelerator.memory_gb:g} GB, of which a program may use "
        f"{each.budget_bytes / 1e9:.1f})"
        for each in problems
    ]
    start = f"{' + '.join(groups)} does not hold {models} in any mapping; "
    which = "this kind" if len(problems) == 1 else "one kind"
    for shape in kind.growing_shapes():
        if kind.num_devices(shape) <= problem.cluster.num_devices:
            continue
        larger = dataclasses.replace(problem, cluster=Cluster(kind, shape))
        if fastest_mapping([larger]) is not None:
            return start + f"the smallest cluster of {which} that does is {larger.cluster.name}"
    return start + (
        f"no {kind.name} up to {kind.largest:,} devices does: take a kind with more memory, shorter "
        "sequences, or smaller microbatches"
    )
