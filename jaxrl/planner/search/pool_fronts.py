"""The Pareto front of a pool: seconds of each stage, for roles that share n devices.

Strategies of a role's model are those of HybridFlow's Algorithm 2 (auto_parallel). The printed algorithm ends
its loop over p at n / U, for U devices per machine. This loop is empty for fewer than U devices and too short
for t below U, and n / (p t) may not be an integer. Here p, t, d and the size of FSDP run over divisors of n
that also divide the model.

Roles of a pool take turns, so their seconds add up in each stage, and they share its memory:

    all residents + the largest transient of a task                      <= memory
    all residents + weights of generation + slots x cache of a slot      <= memory

    free memory  --minus the weights of generation-->  slots that fit  -->  seconds of the best number of them
                                                                            + resharding from training

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
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.choice_costs import ChoiceCosts, Turns, pareto_front
from jaxrl.planner.search.mapping import MappingProblem, SearchLimits
from jaxrl.planner.simulation.simulate_generation import (
    GenerationGroups,
    GenerationSimulator,
    SlotTimes,
)
from jaxrl.planner.simulation.step_simulator import StepSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, Workload


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, ascending."""
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def strategies_of(
    model: ModelConfig, devices: int, domain: int, limits: SearchLimits
) -> Iterator[Strategy]:
    """All strategies on exactly `devices` devices that divide the model.

    Heads, feed-forward width and vocabulary divide over t, layers over p, width over FSDP, experts over the
    expert axis, and the heads of a device over the context axis. Key-value heads that do not divide are
    replicated (mesh.rules). Context groups stay inside fast links: they exchange whole activations.
    """
    for t in divisors(devices):
        if t > min(limits.max_tensor, domain) or any(
            size % t for size in (model.num_heads, model.d_ff, model.vocab_size)
        ):
            continue
        for p in divisors(devices // t):
            if model.num_layers % p or p > limits.max_pipeline:
                continue
            d = devices // t // p
            for expert, context in itertools.product(divisors(d), divisors(d)):
                # The heads of a device divide over the context axis (mesh.parallel_layers).
                keys = max(1, model.num_kv_heads // t)
                exchanges = keys % context == 0 or context % keys == 0
                if (
                    d % (expert * context)
                    or (model.num_experts or 1) % expert
                    or context > min(limits.max_context, max(1, domain // t))
                    or (model.num_heads // t) % context
                    or not exchanges
                ):
                    continue
                for fsdp in divisors(d // (expert * context)) if limits.fsdp else (1,):
                    if model.d_model % fsdp == 0:
                        yield Strategy(p, t, d, fsdp, expert, context)


@dataclasses.dataclass(frozen=True)
class RoleOptions:
    """The Pareto-optimal strategies of a role on n devices, and their costs."""

    strategies: tuple[Strategy, ...]
    costs: ChoiceCosts

    def __len__(self) -> int:
        return len(self.strategies)


def role_options(
    role: RoleTasks,
    model: ModelConfig,
    devices: int,
    simulator: StepSimulator,
    *,
    domain: int,
    limits: SearchLimits,
    budget: float,
) -> RoleOptions:
    """Strategies that fit alone and that no other strategy beats in both memory and time.

    Args:
      role, model: tasks and model of the role.
      devices: n, number of devices.
      simulator: simulator of steps.
      domain: number of devices joined by fast links.
      limits: limits of the strategies.
      budget: available bytes per device.
    """
    passes = simulator.passes
    strategies = [s for s in strategies_of(model, devices, domain, limits) if passes.divides(s)]
    costs = np.zeros((len(strategies), 4))
    for row, strategy in zip(costs, strategies, strict=True):
        if role.forwards:
            forward = passes.inference(model, strategy, share=passes.share_of(role))
            row[:3] = forward.resident_bytes, forward.transient_bytes, forward.total_s
            row[2] *= role.forwards
        if role.trains:
            update = passes.training(model, strategy)
            row[0], row[3] = update.resident_bytes, update.total_s
            row[1] = max(row[1], update.transient_bytes)
    fitting = np.flatnonzero(ChoiceCosts(costs).fits(budget)).tolist()
    if not role.generates:
        kept = [fitting[i] for i in pareto_front(costs[fitting])]
        return RoleOptions(tuple(strategies[i] for i in kept), ChoiceCosts(costs[kept]))
    # Generation splits p and t further, and FSDP shards are gathered before it: an actor's options compete
    # with those of the same p, t and expert size only, and in the seconds of this gather too.
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i in fitting:
        shape = strategies[i].p, strategies[i].t, strategies[i].expert
        groups.setdefault(shape, []).append(i)
    kept = []
    for group in groups.values():
        gathers = [[simulator.generating.unshard_s(model, strategies[i])] for i in group]
        kept += [group[i] for i in pareto_front(np.concatenate([costs[group], gathers], axis=1))]
    return RoleOptions(tuple(strategies[i] for i in kept), ChoiceCosts(costs[kept]))


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
