"""Chooses p_g, t_g and slots of an actor's generation, in the memory that is free in its pool.

free memory  --minus the weights of generation-->  slots that fit  -->  seconds of the best number of them
                                                                        + resharding from training
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.role_options import RoleOptions, divisors
from jaxrl.planner.simulation.simulate_generation import GenerationSimulator, SlotTimes
from jaxrl.planner.simulation.workload import GenerationStrategy, Workload


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
        self._times: dict[tuple[int, int, int], SlotTimes] = {}
        self._exact: dict[tuple[int, int, int, int], float] = {}
        self._resharding: dict[tuple[int, int, int], np.ndarray] = {}

    def best(self, options: RoleOptions, devices: int, free: np.ndarray) -> BestGeneration:
        """The fastest p_g, t_g and slots of each pair.

        Args:
          options: K training options of the actor on n devices.
          devices: n, number of devices.
          free: float64 [K, J], bytes per device besides resident buffers.
        """
        seconds = np.full(free.shape, np.inf)
        chosen = np.zeros((*free.shape, 3), np.int64)
        for p_g, t_g in sorted(set(_sizes(options))):
            found, slots = self._with_sizes(options, devices, p_g, t_g, free)
            better = found < seconds
            seconds = np.where(better, found, seconds)
            chosen[better] = (p_g, t_g, 0)
            chosen[better, 2] = slots[better]
        return BestGeneration(seconds, chosen, self._simulator.workload)

    def _with_sizes(
        self, options: RoleOptions, devices: int, p_g: int, t_g: int, free: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(seconds [K, J], slots [K, J]) of one p_g and t_g; infinite seconds if no slot fits."""
        simulator, model = self._simulator, self._model
        times = self._times_of(devices, p_g, t_g)
        if not len(times.room):
            return np.full(free.shape, np.inf), np.zeros(free.shape, np.int64)
        fitting = simulator.fitting_slots(model, p_g, t_g, free)
        # More slots than the samples of a replica are never used.
        usable = np.clip(fitting, 0, times.room[-1]).astype(np.int64)
        numbers, place = np.unique(usable, return_inverse=True)
        best = [self._best_within(times, devices, p_g, t_g, n) for n in numbers.tolist()]
        # No numbers if there is no combination of other roles.
        pairs = np.array(best).reshape(-1, 2)[place].reshape(*free.shape, 2)
        best_s, slots = pairs[..., 0], pairs[..., 1].astype(np.int64)
        return best_s + self._resharding_of(options, devices, p_g, t_g)[:, None], slots

    def _best_within(
        self, times: SlotTimes, devices: int, p_g: int, t_g: int, most: int
    ) -> tuple[float, int]:
        """(seconds, slots) of the best number of slots up to `most`, which itself is also tried."""
        if most < 1:
            return np.inf, 0
        place = np.searchsorted(times.room, most, side="right") - 1
        known = float(times.seconds[place]), int(times.slots[place])
        if times.room[place] == most:
            return known
        key = (devices, p_g, t_g, most)
        if key not in self._exact:
            self._exact[key] = self._simulator.seconds_of(self._model, *key, greedy=self._greedy)
        return min(known, (self._exact[key], most))

    def _times_of(self, devices: int, p_g: int, t_g: int) -> SlotTimes:
        key = (devices, p_g, t_g)
        if key not in self._times:
            self._times[key] = self._simulator.best_seconds(
                self._model, *key, budget=self._budget, greedy=self._greedy
            )
        return self._times[key]

    def _resharding_of(self, options: RoleOptions, devices: int, p_g: int, t_g: int) -> np.ndarray:
        """Seconds of each option's resharding: float64 [K], infinite if p_g or t_g does not divide p or t."""
        key = (devices, p_g, t_g)
        if key not in self._resharding:
            self._resharding[key] = np.array(
                [
                    self._simulator.resharding_s(self._model, s, p_g, t_g)
                    if s.p % p_g == 0 and s.t % t_g == 0
                    else np.inf
                    for s in options.strategies
                ]
            )
        return self._resharding[key]


def _sizes(options: RoleOptions) -> Iterator[tuple[int, int]]:
    """Every (p_g, t_g) that divides p and t of an option."""
    for strategy in options.strategies:
        for p_g in divisors(strategy.p):
            yield from ((p_g, t_g) for t_g in divisors(strategy.t))
