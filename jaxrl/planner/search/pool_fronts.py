"""What a pool of n devices can do with the roles that share it: the best trade-offs between the three stages.

Roles of a pool take turns, so their seconds add up in each stage, and share its memory:

    all residents + the largest transient of a task                      <= memory
    all residents + weights of generation + slots x cache of a slot      <= memory

An option of a role that another beats in memory and in time at once is in no optimal mapping: fewer bytes
never mean fewer slots, and more slots never mean more seconds. So fronts are all that is carried on, and
nothing that could be the best is lost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.search.pareto import front
from jaxrl.planner.search.role_options import (
    FSDP,
    PREPARATION,
    RESIDENT,
    TRAINING,
    TRANSIENT,
    Limits,
    RoleOptions,
    divisors,
    role_options,
)
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, Workload


@dataclasses.dataclass(frozen=True)
class PoolChoice:
    """What a pool's roles do at one point of its front."""

    strategies: Mapping[str, Strategy]
    generation: GenerationStrategy | None


@dataclasses.dataclass(frozen=True)
class PoolFront:
    """Trade-offs of some roles on n devices.

    Attributes:
      seconds: float64 [F, 3], by stage.
      choices: what makes them, F of them.
    """

    seconds: np.ndarray
    choices: tuple[PoolChoice, ...]


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Trade-offs of roles that do not generate.

    Attributes:
      costs: float64 [K, 4], columns as in RoleOptions.
      options: which option of each role makes them: int64 [K, roles].
    """

    costs: np.ndarray
    options: np.ndarray


class PoolSolver:
    """Fronts of pools on one cluster; each is computed once."""

    def __init__(
        self,
        cluster: Cluster,
        roles: Sequence[RoleTasks],
        models: Mapping[str, ModelConfig],
        workload: Workload,
        assumptions: Assumptions,
        limits: Limits,
    ):
        """Args: where, who, of which models, how much, what is taken for granted, what is looked at."""
        self.passes = PassSimulator(cluster, workload, assumptions)
        self.generating = GenerationSimulator(cluster, workload, assumptions)
        memory = cluster.accelerator.memory_gb * assumptions.memory_share - assumptions.scratch_gb
        self.budget = memory * 1e9
        self._roles = {role.name: role for role in roles}
        self._models = models
        # Roles that do the same with models of one shape have the same options.
        self._same = {r.name: dataclasses.replace(r, name="", optional=False) for r in roles}
        self._domain = cluster.accelerator.domain
        self._limits = limits
        # Roles that compute for longer are not looked for; only ever lowered, so what is cached stays enough.
        self.most_passes_s = np.inf
        # Caches of this object; `functools.cache` on methods would keep it alive.
        self.front = functools.cache(self._front)
        self._options_of = functools.cache(self._options)
        self._times_of = functools.cache(self._times)
        self._moved_of = functools.cache(self._moved)

    def least_passes_s(self, names: tuple[str, ...], devices: int) -> float:
        """Less than which no step's preparation and training by these roles on so many devices takes."""
        costs = [self._options_for(name, devices).costs for name in names]
        if not all(len(c) for c in costs):
            return np.inf
        return float(sum(_passes_s(c).min() for c in costs))

    def quick_seconds(self, names: tuple[str, ...], devices: int) -> float:
        """Of a good mapping of a pool with the actor, not the best one; infinite where none was found."""
        actor = next(n for n in names if self._roles[n].generates)
        others = tuple(n for n in names if n != actor)
        found = self._with_actor(actor, others, self._share_quickly(others, devices), devices)
        return float(found.seconds.sum(axis=1).min(initial=np.inf))

    def _front(self, names: tuple[str, ...], devices: int) -> PoolFront:
        """Of the roles of these names, which are in the order of the dataflow."""
        actor = next((n for n in names if self._roles[n].generates), None)
        others = tuple(n for n in names if n != actor)
        most_s = self.most_passes_s - (self.least_passes_s((actor,), devices) if actor else 0.0)
        shared = self._share(others, devices, most_s)
        if actor is None:
            seconds = np.zeros((len(shared.costs), 3))
            seconds[:, 1:] = shared.costs[:, [PREPARATION, TRAINING]]
            picked = front(seconds)
            chosen = tuple(self._choice(others, shared, i, devices) for i in picked.tolist())
            return PoolFront(seconds[picked], chosen)
        return self._with_actor(actor, others, shared, devices)

    def _with_actor(
        self, name: str, others: tuple[str, ...], shared: _Shared, devices: int
    ) -> PoolFront:
        """The actor's options beside each of the others', each pair with its best generation."""
        options = self._options_for(name, devices)
        a, b = options.costs[:, None], shared.costs[None]
        resident = a[..., RESIDENT] + b[..., RESIDENT]
        transient = np.maximum(a[..., TRANSIENT], b[..., TRANSIENT])
        free = np.where(resident + transient <= self.budget, self.budget - resident, -1.0)
        generation_s, generation = self._best_generation(name, options, free, devices)
        pairs = np.argwhere(np.isfinite(generation_s))
        i, j = pairs[:, 0], pairs[:, 1]
        seconds = np.stack(
            [
                generation_s[i, j],
                options.costs[i, PREPARATION] + shared.costs[j, PREPARATION],
                options.costs[i, TRAINING] + shared.costs[j, TRAINING],
            ],
            axis=1,
        )
        picked = front(seconds)
        chosen = []
        for k in picked.tolist():
            rest = self._choice(others, shared, int(j[k]), devices).strategies
            own = {name: options.strategies[i[k]]}
            chosen.append(
                PoolChoice({**own, **rest}, GenerationStrategy(*generation[i[k], j[k]].tolist()))
            )
        return PoolFront(seconds[picked], tuple(chosen))

    def _best_generation(
        self, name: str, options: RoleOptions, free: np.ndarray, devices: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the best generation, resharding included, and which it is.

        Args:
          name: of the actor.
          options: of it, K.
          free: bytes that the residents of a pool leave: float64 [K, J].
          devices: n.

        Returns:
          (float64 [K, J], infinite where not one slot fits; int64 [K, J, 3] p_g, t_g, slots).
        """
        model, simulator = self._models[name], self.generating
        seconds = np.full(free.shape, np.inf)
        chosen = np.zeros((*free.shape, 3), np.int64)
        for p_g, t_g in sorted(_generation_sizes(options)):
            room, slots, times = self._times_of(name, devices, p_g, t_g)
            if not len(room):
                continue
            left = free - simulator.weight_bytes(model, p_g, t_g)
            fitting = np.floor(left / simulator.slot_bytes(model, p_g, t_g))
            place = np.searchsorted(room, fitting, side="right") - 1
            fits, place = place >= 0, np.maximum(place, 0)
            moved = self._moved_of(name, devices, p_g, t_g)
            found = np.where(fits, times[place] + moved[:, None], np.inf)
            better = found < seconds
            seconds = np.where(better, found, seconds)
            chosen[better] = (p_g, t_g, 0)
            chosen[better, 2] = slots[place[better]]
        return seconds, chosen

    def _share(self, names: tuple[str, ...], devices: int, most_s: float) -> _Shared:
        """Roles that take turns and do not generate, one after the other added to the front.

        Args:
          names: of the roles.
          devices: n.
          most_s: for which they may compute.
        """
        if not names:
            return _Shared(np.zeros((1, FSDP)), np.zeros((1, 0), np.int64))
        last = names[-1:]
        before = self._share(names[:-1], devices, most_s - self.least_passes_s(last, devices))
        own = self._options_for(names[-1], devices).costs[:, :FSDP]
        costs = before.costs[:, None] + own[None]
        costs[..., TRANSIENT] = np.maximum(
            before.costs[:, None, TRANSIENT], own[None, :, TRANSIENT]
        )
        fits = costs[..., RESIDENT] + costs[..., TRANSIENT] <= self.budget
        i, j = np.nonzero(fits & (_passes_s(costs) <= most_s))
        picked = front(costs[i, j])
        i, j = i[picked], j[picked]
        return _Shared(costs[i, j], np.concatenate([before.options[i], j[:, None]], axis=1))

    def _share_quickly(self, names: tuple[str, ...], devices: int) -> _Shared:
        """Each role by itself at its least of seconds and bytes together, for several prices of a byte."""
        prices = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 81)])[:, None] / self.budget
        costs = np.zeros((len(prices), FSDP))
        options = np.zeros((len(prices), 0), np.int64)
        for name in names:
            own = self._options_for(name, devices).costs[:, :FSDP]
            if not len(own):
                return _Shared(costs[:0], options[:0])
            seconds = _passes_s(own)
            paid = seconds + prices * own[:, RESIDENT] * seconds.min()
            picked = paid.argmin(axis=1)
            transient = np.maximum(costs[:, TRANSIENT], own[picked, TRANSIENT])
            costs = costs + own[picked]
            costs[:, TRANSIENT] = transient
            options = np.concatenate([options, picked[:, None]], axis=1)
        return _Shared(costs, options)

    def _choice(self, names: tuple[str, ...], shared: _Shared, i: int, devices: int) -> PoolChoice:
        picked = zip(names, shared.options[i], strict=True)
        return PoolChoice({n: self._options_for(n, devices).strategies[k] for n, k in picked}, None)

    def _options_for(self, name: str, devices: int) -> RoleOptions:
        return self._options_of(self._same[name], self._models[name], devices)

    def _options(self, role: RoleTasks, model: ModelConfig, devices: int) -> RoleOptions:
        return role_options(
            role,
            model,
            devices,
            self.passes,
            domain=self._domain,
            limits=self._limits,
            budget=self.budget,
        )

    def _moved(self, name: str, devices: int, p_g: int, t_g: int) -> np.ndarray:
        """Seconds of each option's resharding: float64 [K], infinite where p_g or t_g does not divide."""
        model, reshard = self._models[name], self.generating.resharding_s
        divides = (
            (s, s.p % p_g == 0 and s.t % t_g == 0)
            for s in self._options_for(name, devices).strategies
        )
        return np.array([reshard(model, s, p_g, t_g) if fits else np.inf for s, fits in divides])

    def _times(self, name: str, devices: int, p_g: int, t_g: int) -> tuple[np.ndarray, ...]:
        greedy = self._roles[name].greedy
        return self.generating.best_seconds(
            self._models[name], devices, p_g, t_g, budget=self.budget, greedy=greedy
        )


def _generation_sizes(options: RoleOptions) -> set[tuple[int, int]]:
    return {
        (p_g, t_g) for s in options.strategies for p_g in divisors(s.p) for t_g in divisors(s.t)
    }


def _passes_s(costs: np.ndarray) -> np.ndarray:
    """Seconds of preparation and training."""
    return costs[..., PREPARATION] + costs[..., TRAINING]
