"""Chooses p_g, t_g and slots of an actor's generation, in the memory that is free in its pool.

free memory  --minus the weights of generation-->  slots that fit  -->  seconds of the best number of them
                                                                        + resharding from training
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.role_options import RoleOptions, divisors
from jaxrl.planner.simulation.simulate_generation import (
    GenerationGroups,
    GenerationSimulator,
    SlotTimes,
)
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, Workload


@dataclasses.dataclass(frozen=True)
class BestGeneration:
    """The best generation for K training options of the actor and J combinations of other roles.

    Attributes:
      seconds: float64 [K, J], seconds with resharding; infinite if no slot fits.
      chosen: int64 [K, J, 3], p_g, t_g and slots.
      workload: work of a step, which says how much cache as many slots have.
    """

    seconds: np.ndarray
    chosen: np.ndarray
    workload: Workload

    def strategy(self, option: int, others: int) -> GenerationStrategy:
        """The choice for a training option and a combination of other roles."""
        p_g, t_g, slots = self.chosen[option, others].tolist()
        return GenerationStrategy(p_g, t_g, slots, self.workload.cache_tokens(slots))


class GenerationChoice:
    """Chooses generation for an actor; simulates each number of devices only once."""

    def __init__(
        self, simulator: GenerationSimulator, model: ModelConfig, *, budget: float, greedy: bool
    ):
        """Args are the simulator, the model, available bytes per device, and whether it adds greedy ones."""
        self._simulator = simulator
        self._model = model
        self._budget = budget
        self._greedy = greedy
        self._times: dict[GenerationGroups, SlotTimes] = {}
        self._exact: dict[tuple[GenerationGroups, int], float] = {}
        self._resharding: dict[tuple[Strategy, int, int], float] = {}

    def best(self, options: RoleOptions, free: np.ndarray) -> BestGeneration:
        """The fastest p_g, t_g and slots of each pair.

        Args:
          options: K training options of the actor on n devices.
          free: float64 [K, J], bytes per device besides resident buffers.
        """
        seconds = np.full(free.shape, np.inf)
        chosen = np.zeros((*free.shape, 3), np.int64)
        for groups, rows in self._groups_of(options).items():
            found, slots = self._with_groups(options, groups, rows, free[rows])
            better = found < seconds[rows]
            seconds[rows] = np.where(better, found, seconds[rows])
            sizes = np.full(better.shape, groups.p_g), np.full(better.shape, groups.t_g)
            picked = np.stack([*sizes, slots], axis=-1)
            chosen[rows] = np.where(better[..., None], picked, chosen[rows])
        return BestGeneration(seconds, chosen, self._simulator.workload)

    def _groups_of(self, options: RoleOptions) -> dict[GenerationGroups, list[int]]:
        """The options of the same groups, for each p_g and t_g that divide p and t of an option."""
        found: dict[GenerationGroups, list[int]] = {}
        for i, strategy in enumerate(options.strategies):
            for p_g, t_g in itertools.product(divisors(strategy.p), divisors(strategy.t)):
                groups = self._simulator.groups(strategy, p_g, t_g)
                found.setdefault(groups, []).append(i)
        return dict(sorted(found.items()))

    def _with_groups(
        self, options: RoleOptions, groups: GenerationGroups, rows: list[int], free: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(seconds [R, J], slots [R, J]) of R options of the same groups; infinite if no slot fits."""
        simulator, model = self._simulator, self._model
        times = self._times_of(groups)
        if not len(times.room):
            return np.full(free.shape, np.inf), np.zeros(free.shape, np.int64)
        fitting = simulator.fitting_slots(model, groups, free)
        # More slots than the samples of a replica are never used.
        usable = np.clip(fitting, 0, times.room[-1]).astype(np.int64)
        numbers, place = np.unique(usable, return_inverse=True)
        best = [self._best_within(times, groups, n) for n in numbers.tolist()]
        # No numbers if there is no combination of other roles.
        pairs = np.array(best).reshape(-1, 2)[place].reshape(*free.shape, 2)
        best_s, slots = pairs[..., 0], pairs[..., 1].astype(np.int64)
        moved = [self._resharding_s(options.strategies[i], groups) for i in rows]
        return best_s + np.array(moved)[:, None], slots

    def _best_within(
        self, times: SlotTimes, groups: GenerationGroups, most: int
    ) -> tuple[float, int]:
        """(seconds, slots) of the best number of slots up to `most`, which itself is also tried."""
        if most < 1:
            return np.inf, 0
        place = np.searchsorted(times.room, most, side="right") - 1
        known = float(times.seconds[place]), int(times.slots[place])
        if times.room[place] == most:
            return known
        key = (groups, most)
        if key not in self._exact:
            self._exact[key] = self._simulator.seconds_of(self._model, *key, greedy=self._greedy)
        return min(known, (self._exact[key], most))

    def _times_of(self, groups: GenerationGroups) -> SlotTimes:
        if groups not in self._times:
            self._times[groups] = self._simulator.best_seconds(
                self._model, groups, budget=self._budget, greedy=self._greedy
            )
        return self._times[groups]

    def _resharding_s(self, strategy: Strategy, groups: GenerationGroups) -> float:
        key = (strategy, groups.p_g, groups.t_g)
        if key not in self._resharding:
            self._resharding[key] = self._simulator.resharding_s(self._model, *key)
        return self._resharding[key]
