"""The mapping search: which roles share devices, how many each pool gets, and how each model is split there.

HybridFlow's Algorithm 1 (section 6): the latency of a stage is the sum over the roles of a pool, and of these
the maximum over pools; a step is the sum of its stages.

    every placement (set partition)          placements.py
      every size of each pool                here: fronts of pools, merged one by one
        every strategy of each role          role_options.py (Algorithm 2), pool_fronts.py
          every p_g, t_g, slots of an actor  pool_fronts.py

The paper enumerates allocations that use all N devices. Here a pool may leave some idle, where a number that
divides well is faster than a larger one. What is pruned is what another choice beats in devices and in every
stage at once, or what a bound says is slower than a mapping already found: the optimum of the simulation is
never lost.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.search.mapping import (
    Mapping,
    PlacementResult,
    Pool,
    RoleMapping,
    StageBreakdown,
    TaskTerms,
)
from jaxrl.planner.search.pareto import front
from jaxrl.planner.search.placements import Placement, checked_placement, placements_of
from jaxrl.planner.search.pool_fronts import PoolChoice, PoolSolver
from jaxrl.planner.search.role_options import Limits, divisors
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.step_tasks import RoleTasks, tasks_of
from jaxrl.planner.simulation.workload import Workload

DEVICES, GENERATION, PREPARATION, TRAINING = range(4)

# Rounding in sums of seconds; a choice is pruned by a bound only if it is slower by more.
_SLACK = 1 + 1e-12


def search_mapping(
    dataflow: str,
    models: MappingOf[str, ModelConfig],
    workload: Workload,
    cluster: Cluster | str,
    *,
    assumptions: Assumptions | None = None,
    limits: Limits | None = None,
    tasks: Sequence[RoleTasks] | None = None,
    placements: Sequence[Sequence[Sequence[str]]] | None = None,
    every_placement: bool = False,
) -> Mapping:
    """The fastest mapping of a dataflow's roles to a cluster, as simulated (HybridFlow Algorithm 1).

    Args:
      dataflow: a name of `step_tasks.TASKS`.
      models: role -> its model; a reward without one is a function on the host.
      workload: of a step.
      cluster: or its name, as `Cluster.parse` reads it.
      assumptions: of the simulation.
      limits: which strategies are looked at.
      tasks: of the roles, where they are others than in `step_tasks.TASKS`.
      placements: those to choose from; all there are by default.
      every_placement: find the best of each placement, though a bound may say that it is not the fastest.

    Raises:
      UserError: a name, a placement or a topology is wrong, or the models do not fit; then the message has
        the smallest cluster of this kind that would hold them.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    roles = tasks_of(dataflow, models, tasks)
    names = [role.name for role in roles]
    chosen = list(placements_of(names))
    if placements is not None:
        chosen = [checked_placement(placement, names) for placement in placements]
    assume, limits = assumptions or Assumptions(), limits or Limits()
    search = _Search(cluster, roles, models, workload, assume, limits)
    results = search.run(chosen, every_placement=every_placement)
    if search.best is None:
        raise UserError(_does_not_fit(search, chosen))
    return search.mapping(dataflow, results)


def search_mapping_of_common_rows(
    dataflow: str,
    models: MappingOf[str, ModelConfig],
    workload: Workload,
    cluster: Cluster,
    *,
    assumptions: Assumptions,
) -> Mapping:
    """The mapping of `search_mapping` where the microbatches of all roles have the same number of rows.

    A run has one `train.rows`. If the fastest mapping wants other numbers for other roles, each divisor of
    their least common multiple is searched with, and the fastest of these mappings is returned.

    Raises:
      UserError: as `search_mapping`; or the models fit only with numbers of rows of their own.
    """
    found = search_mapping(dataflow, models, workload, cluster, assumptions=assumptions)
    if len({role.strategy.row_parts for role in found.roles.values()}) == 1:
        return found
    roles = tasks_of(dataflow, models)
    placements = list(placements_of([role.name for role in roles]))
    mappings = []
    for rows in divisors(found.microbatch_rows):
        work = dataclasses.replace(workload, microbatch_rows=rows)
        search = _Search(cluster, roles, models, work, assumptions, Limits())
        results = search.run(placements, every_placement=False)
        if search.best is not None:
            mappings.append(search.mapping(dataflow, results))
    if not mappings:
        raise UserError(
            f"{cluster.name} holds the models only if their microbatches have different numbers of rows, and "
            "train.rows is one for all; lower train.row_tokens, take a larger cluster, or set mesh.layout to "
            "as_given and name a placement"
        )
    return min(mappings, key=lambda mapping: mapping.seconds)


@dataclasses.dataclass(frozen=True)
class _Points:
    """Trade-offs of some pools together: float64 [K, 4], devices and seconds by stage.

    Attributes:
      values: DEVICES, GENERATION, PREPARATION, TRAINING.
      left, right: which points of the pools before, and of the last pool, make each.
    """

    values: np.ndarray
    left: np.ndarray
    right: np.ndarray


@dataclasses.dataclass(frozen=True)
class _PoolPoints:
    """Trade-offs of one pool over all its sizes: [K, 4], and what makes each."""

    values: np.ndarray
    choices: tuple[PoolChoice, ...]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A mapping: pools of a placement with devices and choices."""

    seconds: float
    pools: tuple[tuple[tuple[str, ...], int, PoolChoice], ...]


class _Search:
    def __init__(
        self,
        cluster: Cluster,
        roles: Sequence[RoleTasks],
        models: MappingOf[str, ModelConfig],
        workload: Workload,
        assumptions: Assumptions,
        limits: Limits,
    ):
        self.cluster = cluster
        self.arguments = (roles, models, workload, assumptions, limits)
        self.roles = {role.name: role for role in roles}
        self.models = models
        self.solver = PoolSolver(cluster, roles, models, workload, assumptions, limits)
        self.best: _Found | None = None
        self._bound = math.inf
        self._actor = next(role.name for role in roles if role.generates)
        self._pool_points: dict[tuple[str, ...], _PoolPoints] = {}
        self._merged: dict[Placement, _Points] = {}

    def run(
        self, placements: Sequence[Placement], *, every_placement: bool
    ) -> tuple[PlacementResult, ...]:
        """Looks at placements, keeps the best; returns what each can do, the fastest first."""
        results = []
        together = tuple(self.roles)
        if not every_placement and (together,) in placements:
            # The whole cluster for all in turn is a mapping, and seldom a bad one.
            self._look_below(self.solver.quick_seconds(together, self.cluster.num_devices))
        # Few pools first: their mappings are found quickly, and bound the rest.
        for placement in sorted(placements, key=len):
            found = self._best_of(placement)
            bounded = math.isfinite(self._bound)
            if found is None:
                results.append(PlacementResult(placement, (), None if bounded else math.inf))
                continue
            devices = {names: n for names, n, _ in found.pools}
            sizes = tuple(devices[names] for names in placement)
            results.append(PlacementResult(placement, sizes, found.seconds))
            if self.best is None or found.seconds < self.best.seconds:
                self.best = found
            if not every_placement:
                self._look_below(self.best.seconds)
        return tuple(sorted(results, key=lambda r: math.inf if r.seconds is None else r.seconds))

    def _look_below(self, seconds: float) -> None:
        """From now on only what may be faster than so many seconds a step is of interest."""
        self._bound = min(self._bound, seconds)
        self.solver.most_passes_s = self._bound * _SLACK - float(self._generation_s[-1])

    def _best_of(self, placement: Placement) -> _Found | None:
        """The best mapping of a placement; None if none fits or is faster than the bound."""
        # The actor's pool comes last: without it nothing generates, and points have a coordinate less.
        pools = tuple(sorted(placement, key=lambda pool: (self._actor in pool, pool)))
        last = self._points_of(pools[-1])
        before = self._merge(pools[:-1])
        best, pair = self._bound * _SLACK, None
        for j, point in enumerate(last.values):
            total = before.values[:, DEVICES] + point[DEVICES]
            stages = np.maximum(before.values[:, GENERATION:], point[GENERATION:]).sum(axis=1)
            stages[total > self.cluster.num_devices] = np.inf
            i = int(stages.argmin()) if len(stages) else -1
            if i >= 0 and stages[i] < best:
                best, pair = float(stages[i]), (i, j)
        if pair is None:
            return None
        chosen = [*self._unmerged(pools[:-1], pair[0]), pair[1]]
        found = []
        for names, k in zip(pools, chosen, strict=True):
            points = self._points_of(names)
            found.append((names, int(points.values[k, DEVICES]), points.choices[k]))
        return _Found(best, tuple(found))

    def _points_of(self, names: tuple[str, ...]) -> _PoolPoints:
        """Of a pool, over all its sizes; those that alone are slower than the bound may be missing."""
        if names not in self._pool_points:
            values, choices = [np.zeros((0, 4))], []
            for devices in self.cluster.pool_sizes:
                if self._least_seconds(names, devices) > self._bound * _SLACK:
                    continue
                pool = self.solver.front(names, devices)
                size = np.full((len(pool.choices), 1), float(devices))
                values.append(np.concatenate([size, pool.seconds], axis=1))
                choices += pool.choices
            joined = np.concatenate(values)
            near = np.flatnonzero(self._least_steps_s(joined) <= self._bound * _SLACK)
            kept = near[front(joined[near])]
            self._pool_points[names] = _PoolPoints(joined[kept], tuple(choices[i] for i in kept))
        return self._pool_points[names]

    def _merge(self, pools: Placement) -> _Points:
        """Of several pools side by side; what could not beat the bound may be missing."""
        if not pools:
            return _Points(np.zeros((1, 4)), np.zeros(1, np.int64), np.zeros(1, np.int64))
        if pools not in self._merged:
            left, right = self._merge(pools[:-1]).values, self._points_of(pools[-1]).values
            values = np.maximum(left[:, None], right[None])
            values[..., DEVICES] = left[:, None, DEVICES] + right[None, :, DEVICES]
            fits = values[..., DEVICES] <= self.cluster.num_devices - self.cluster.pool_sizes[0]
            i, j = np.nonzero(fits & (self._least_steps_s(values) <= self._bound * _SLACK))
            kept = front(values[i, j])
            self._merged[pools] = _Points(values[i, j][kept], i[kept], j[kept])
        return self._merged[pools]

    def _least_steps_s(self, values: np.ndarray) -> np.ndarray:
        """Less than which no step of these pools takes: generation, here or on what they leave, and the rest.

        Args:
          values: float64 [..., 4] of pools side by side.
        """
        passes_s = values[..., PREPARATION] + values[..., TRAINING]
        here = values[..., GENERATION]
        elsewhere = self._least_generation_s(self.cluster.num_devices - values[..., DEVICES])
        return passes_s + np.where(here > 0, here, elsewhere)

    def _least_seconds(self, names: tuple[str, ...], devices: int) -> float:
        """As `_least_steps_s`, of roles that share so many devices."""
        generating = devices if self._actor in names else self.cluster.num_devices - devices
        generation_s = float(self._least_generation_s(np.array(float(generating))))
        return self.solver.least_passes_s(names, devices) + generation_s

    def _least_generation_s(self, devices: np.ndarray) -> np.ndarray:
        """Of an actor that has devices for itself; infinite where they do not hold it.

        Roles that share memory leave no more slots than the actor has alone.
        """
        place = np.searchsorted(self.cluster.pool_sizes, devices, side="right") - 1
        return np.where(place >= 0, self._generation_s[np.maximum(place, 0)], np.inf)

    @functools.cached_property
    def _generation_s(self) -> np.ndarray:
        """The fastest generation of an actor alone on at most so many devices: float64 [pool sizes]."""
        alone = [self.solver.front((self._actor,), n).seconds for n in self.cluster.pool_sizes]
        fastest = [seconds[:, GENERATION - 1].min(initial=np.inf) for seconds in alone]
        return np.minimum.accumulate(fastest)

    def _unmerged(self, pools: Placement, i: int) -> list[int]:
        """Which point of each pool makes a merged one."""
        found = []
        while pools:
            points = self._merged[pools]
            found.append(int(points.right[i]))
            pools, i = pools[:-1], int(points.left[i])
        return found[::-1]

    def mapping(self, dataflow: str, results: tuple[PlacementResult, ...]) -> Mapping:
        """The best that was found, with its terms."""
        assert self.best is not None, "run() has found one"
        # Larger pools first: none then crosses the border of another's host.
        ordered = sorted(self.best.pools, key=lambda pool: (-pool[1], pool[0]))
        pools, roles, first = [], {}, 0
        for index, (names, devices, choice) in enumerate(ordered):
            pools.append(Pool(names, first, devices))
            first += devices
            for name in names:
                generation = choice.generation if self.roles[name].generates else None
                roles[name] = RoleMapping(name, index, choice.strategies[name], generation)
        return Mapping(
            dataflow=dataflow,
            cluster=self.cluster.name,
            num_devices=self.cluster.num_devices,
            pools=tuple(pools),
            roles={name: roles[name] for name in self.roles},
            breakdown=self._breakdown(roles),
            placements=results,
            budget_bytes=self.solver.budget,
        )

    def _breakdown(self, roles: MappingOf[str, RoleMapping]) -> tuple[StageBreakdown, ...]:
        generation, preparation, training = [], [], []
        passes = self.solver.passes
        for name, tasks in self.roles.items():
            model, role = self.models[name], roles[name]
            if role.generation is not None:
                terms = self.solver.generating.generation(
                    model, role.strategy, role.generation, greedy=tasks.greedy
                )
                generation.append(TaskTerms(name, role.pool, terms))
            if tasks.forwards:
                terms = passes.inference(model, role.strategy, share=passes.share_of(tasks))
                seconds = {cause: tasks.forwards * s for cause, s in terms.seconds.items()}
                # What a trained role keeps is counted once, with its training.
                resident = {} if tasks.trains else terms.resident
                terms = dataclasses.replace(terms, seconds=seconds, resident=resident)
                preparation.append(TaskTerms(name, role.pool, terms))
            if tasks.trains:
                training.append(TaskTerms(name, role.pool, passes.training(model, role.strategy)))
        return (
            StageBreakdown("generation", tuple(generation)),
            StageBreakdown("preparation", tuple(preparation)),
            StageBreakdown("training", tuple(training)),
        )


def _does_not_fit(search: _Search, placements: Sequence[Placement]) -> str:
    """Which cluster would hold what this one does not."""
    kind = search.cluster.accelerator
    counts = {name: search.models[name].num_params for name in search.roles}
    models = ", ".join(f"{name} of {count / 1e9:.1f}B" for name, count in counts.items())
    start = (
        f"{search.cluster.name} ({search.cluster.num_devices} devices of {kind.memory_gb:g} GB, of which a "
        f"program may use {search.solver.budget / 1e9:.1f}) does not hold {models} in any mapping; "
    )
    for shape in kind.growing_shapes():
        if kind.num_devices(shape) <= search.cluster.num_devices:
            continue
        larger = _Search(Cluster(kind, shape), *search.arguments)
        larger.run(placements, every_placement=False)
        if larger.best is not None:
            return start + f"the smallest cluster of this kind that does is {larger.cluster.name}"
    return start + (
        f"no {kind.name} up to {kind.largest:,} devices does: take a kind with more memory, shorter "
        "sequences, or smaller microbatches"
    )
