"""The Pareto front of a pool: seconds of each stage, for roles that share n devices.

Roles of a pool take turns, so their seconds add up in each stage, and they share its memory:

    all residents + the largest transient of a task                      <= memory
    all residents + weights of generation + slots x cache of a slot      <= memory

Example: an actor and a critic on 8 devices of 20 GB; weights of generation take 2 GB, a slot 0.5 GB:

                 resident   transient   preparation   training
    actor   a0      6 GB       2 GB          1 s          4 s
            a1      9 GB       1 GB          1 s          3 s
    critic  c0      5 GB       3 GB          1 s          2 s

    a0 + c0   resident 11 GB, transient 3 GB: fits.   Free 9 GB: 14 slots, generation 10 s
    a1 + c0   resident 14 GB, transient 3 GB: fits.   Free 6 GB:  8 slots, generation 16 s

    front, seconds of (generation, preparation, training):   (10, 2, 6) and (16, 2, 5)

Neither beats the other, so both are kept: the better one depends on the other pools. An option that is beaten
in both memory and time is never needed: less memory in use never means fewer slots, nor more slots more time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.planner.search.choice_costs import Turns, pareto_front
from jaxrl.planner.search.generation_choice import GenerationChoice
from jaxrl.planner.search.mapping import MappingProblem
from jaxrl.planner.search.role_options import RoleOptions, role_options
from jaxrl.planner.simulation.step_simulator import StepSimulator
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy


@dataclasses.dataclass(frozen=True)
class PoolChoice:
    """Strategies of a pool's roles at one point of its front; generation is None without the actor."""

    strategies: Mapping[str, Strategy]
    generation: GenerationStrategy | None


@dataclasses.dataclass(frozen=True)
class PoolFront:
    """Trade-offs of roles that share n devices.

    Attributes:
      seconds: float64 [F, 3], seconds of generation, preparation and training.
      choices: strategies of each point, F of them.
    """

    seconds: np.ndarray
    choices: tuple[PoolChoice, ...]


class PoolSolver:
    """Finds the fronts of pools for one problem, and caches what it simulates."""

    def __init__(self, problem: MappingProblem):
        """Builds the simulators; nothing is simulated yet."""
        self._problem = problem
        self.simulator = StepSimulator(problem.cluster, problem.workload, problem.assumptions)
        actor = problem.actor
        self._actor = actor.name
        self._generation = GenerationChoice(
            self.simulator.generating,
            problem.models[actor.name],
            budget=problem.budget_bytes,
            greedy=actor.greedy,
        )
        # Roles with the same tasks and the same model shape share their options.
        self._alike = {
            role.name: (
                dataclasses.replace(role, name="", optional=False),
                problem.models[role.name],
            )
            for role in problem.roles
        }
        self._options: dict[tuple, RoleOptions] = {}

    def front(
        self, names: Sequence[str], devices: int, *, most_passes_s: float = np.inf
    ) -> PoolFront:
        """The front of a pool.

        Args:
          names: names of its roles, in the order of the dataflow.
          devices: n, number of devices.
          most_passes_s: maximum seconds of preparation and training; slower points may be left out.
        """
        others = [name for name in names if name != self._actor]
        if self._actor not in names:
            return self._without_actor(others, self._turns(others, devices, most_passes_s), devices)
        most_s = most_passes_s - self.least_passes_s([self._actor], devices)
        return self._with_actor(others, self._turns(others, devices, most_s), devices)

    def least_passes_s(self, names: Sequence[str], devices: int) -> float:
        """Lower bound of the seconds of preparation and training of these roles on n devices."""
        costs = [self._options_of(name, devices).costs for name in names]
        return sum(float(each.passes_s.min(initial=np.inf)) for each in costs)

    def quick_seconds(self, names: Sequence[str], devices: int) -> float:
        """Seconds of a good mapping of a pool with the actor, not always the best; infinite if none."""
        others = [name for name in names if name != self._actor]
        costs = [self._options_of(name, devices).costs for name in others]
        turns = Turns.quick(costs, self._problem.budget_bytes)
        found = self._with_actor(others, turns, devices)
        return float(found.seconds.sum(axis=1).min(initial=np.inf))

    def _turns(self, names: Sequence[str], devices: int, most_s: float) -> Turns:
        """Combinations of roles that do not generate, within `most_s` seconds of preparation and training."""
        found, budget = Turns.of_no_roles(), self._problem.budget_bytes
        for i, name in enumerate(names):
            # Reserve the least seconds that the later roles need.
            later_s = self.least_passes_s(names[i + 1 :], devices)
            costs = self._options_of(name, devices).costs
            found = found.with_role(costs, budget=budget, most_s=most_s - later_s)
        return found

    def _without_actor(self, names: Sequence[str], turns: Turns, devices: int) -> PoolFront:
        seconds = np.pad(turns.costs.rows[:, 2:], ((0, 0), (1, 0)))
        kept = pareto_front(seconds)
        choices = (
            PoolChoice(self._strategies(names, turns, i, devices), None) for i in kept.tolist()
        )
        return PoolFront(seconds[kept], tuple(choices))

    def _with_actor(self, others: Sequence[str], turns: Turns, devices: int) -> PoolFront:
        """Pairs each option of the actor with each combination of the others, with its best generation."""
        budget, own = self._problem.budget_bytes, self._options_of(self._actor, devices)
        pairs = own.costs.in_turn(turns.costs)
        # Negative if the pair does not fit, so that no slot fits either.
        free = np.where(pairs.fits(budget), budget - pairs.resident, -1.0)
        generation = self._generation.best(own, free)
        i, j = np.nonzero(np.isfinite(generation.seconds))
        seconds = np.column_stack([generation.seconds[i, j], pairs.rows[i, j, 2:]])
        kept = pareto_front(seconds)
        choices = (
            PoolChoice(
                {
                    self._actor: own.strategies[a],
                    **self._strategies(others, turns, b, devices),
                },
                generation.strategy(a, b),
            )
            for a, b in zip(i[kept].tolist(), j[kept].tolist(), strict=True)
        )
        return PoolFront(seconds[kept], tuple(choices))

    def _strategies(
        self, names: Sequence[str], turns: Turns, i: int, devices: int
    ) -> dict[str, Strategy]:
        """The strategy of each role in combination i."""
        picked = zip(names, turns.options[i].tolist(), strict=True)
        return {name: self._options_of(name, devices).strategies[k] for name, k in picked}

    def _options_of(self, name: str, devices: int) -> RoleOptions:
        key = (*self._alike[name], devices)
        if key not in self._options:
            problem = self._problem
            self._options[key] = role_options(
                *key,
                self.simulator,
                domain=problem.cluster.accelerator.domain,
                limits=problem.limits,
                budget=problem.budget_bytes,
            )
        return self._options[key]
