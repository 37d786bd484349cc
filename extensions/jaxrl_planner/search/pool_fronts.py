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
Roles are added one after the other. A combination off the front can be dropped: with any later roles, the one
that beats it is at least as good. So the best combination is never lost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl_planner.search.mapping import MappingProblem, SearchLimits
from jaxrl_planner.simulation.simulate_generation import GenerationGroups, GenerationSimulator
from jaxrl_planner.simulation.step_simulator import RoleMapping, StepSimulator

# Stages that would hold more layers than this, relative to the model's, are not tried: fewer stages are
# faster then.
_MOST_OF_STACK = 1.1


def pareto_front(points: np.ndarray) -> np.ndarray:
    """Indices of the points on the Pareto front: no other point is at most as large in every coordinate.

        points (1, 5), (2, 2), (3, 3), (5, 1)  -->  all but (3, 3), because (2, 2) beats it

    The first of equal points is kept.

    Args:
      points: float64 [K, D].

    Returns:
      int64 [F], by ascending sum of the points, with every coordinate scaled to at most 1.
    """
    scale = np.maximum(np.abs(points).max(axis=0, initial=0), 1e-300)
    order = np.argsort((points / scale).sum(axis=1), kind="stable")
    left, kept = points[order], []
    while len(order):
        # No remaining point beats the point with the smallest sum.
        kept.append(order[0])
        better = (left[1:] < left[0]).any(axis=1)
        left, order = left[1:][better], order[1:][better]
    return np.array(kept, np.int64)


# Costs of choices for one role, or for roles that use the same devices one after the other: float64 [..., 4],
# resident bytes, which stay from step to step; transient bytes while a task runs; seconds of preparation and
# of training.


def fits(costs: np.ndarray, budget: float) -> np.ndarray:
    """Which choices fit into this many bytes per device."""
    return costs[..., 0] + costs[..., 1] <= budget


def passes_s(costs: np.ndarray) -> np.ndarray:
    """Seconds of preparation and training."""
    return costs[..., 2] + costs[..., 3]


def in_turn(costs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Combines each of K choices with each of J others on the same devices: float64 [K, J, 4].

    Resident bytes add up. Tasks run one at a time, so only the larger transient counts. Seconds add up.

        resident 6 + 5 = 11 GB   transient max(2, 3) = 3 GB   training 4 + 2 = 6 s
    """
    found = costs[:, None] + others
    found[..., 1] = np.maximum(costs[:, None, 1], others[:, 1])
    return found


@dataclasses.dataclass(frozen=True)
class Turns:
    """Combinations of roles that do not generate.

    Attributes:
      costs: float64 [K, 4], costs of K combinations.
      options: int64 [K, roles], index of each role's option.
    """

    costs: np.ndarray
    options: np.ndarray

    def with_role(self, own: np.ndarray, *, budget: float, most_s: float) -> Turns:
        """Combines each combination with each option of another role, and keeps the Pareto front.

        Args:
          own: float64 [J, 4], costs of the role's options.
          budget: available bytes per device.
          most_s: maximum seconds of preparation and training.
        """
        pairs = in_turn(self.costs, own)
        i, j = np.nonzero(fits(pairs, budget) & (passes_s(pairs) <= most_s))
        kept = pareto_front(pairs[i, j])
        i, j = i[kept], j[kept]
        return Turns(pairs[i, j], np.concatenate([self.options[i], j[:, None]], axis=1))


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, ascending."""
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def layouts_of(
    model: ModelConfig, devices: int, domain: int, limits: SearchLimits
) -> Iterator[ParallelLayout]:
    """All layouts of training on exactly `devices` devices that divide the model.

    FSDP splits weights over the replicas of `fsdp`; where all replicas with rows of their own are, ZeRO-3
    splits them over those that share a row too.
    Heads, feed-forward width and vocabulary divide over t, width over FSDP, and experts over the expert axis.
    Stages have equally many layers, a few of which may be absent in the last one. Key-value heads are split
    as far as they divide (mesh.rules). Context groups, which pass on parts of whole rows, stay inside fast
    links.

    Generation may take replicas as tensor shards. Those are neighbours then, and the groups of `expert` and
    `context` lie further apart in training too: such layouts have their t_g.
    """
    widest = min(limits.max_tensor, domain)
    for t in divisors(devices):
        if not _splits(model, t, widest):
            continue
        for p in divisors(devices // t):
            layers, of_stage = model.num_periods, model.periods_of_stage(p)
            if of_stage * p > _MOST_OF_STACK * layers or of_stage * (p - 1) >= layers:
                continue
            if p > limits.max_pipeline:
                continue
            if p > 1 and (model.sharing_layers or model.layer_inputs):
                continue
            d = devices // t // p
            for expert, context in itertools.product(divisors(d), divisors(d)):
                if (
                    d % (expert * context)
                    or (model.num_experts or 1) % expert
                    or context > min(limits.max_context, max(1, domain // t))
                    or model.delta_key_heads % (t * context)
                ):
                    continue
                most = d // (expert * context)
                shares = [(fsdp, fsdp, "FSDP") for fsdp in divisors(most)]
                shares += [(most, most * context, "ZeRO-3")] if context > 1 else []
                for fsdp, shards, sharding in shares if limits.fsdp else shares[:1]:
                    widths = (model.d_model, model.kv_latent, model.q_latent)
                    if any(width % shards for width in widths):
                        continue
                    for t_g in (t * k for k in divisors(fsdp)):
                        if _splits(model, t_g, widest):
                            yield ParallelLayout(p, t, d, p, t_g, fsdp, expert, context, sharding)


def _splits(model: ModelConfig, t: int, most: int) -> bool:
    # Whether t tensor shards, at most `most`, divide the model.
    widths = (model.d_ff, model.shared_d_ff, model.dense_d_ff)
    return t <= most and not any(n % t for n in (model.num_heads, model.vocab_size, *widths))


@dataclasses.dataclass(frozen=True)
class RoleOptions:
    """The Pareto-optimal layouts of a role on n devices, and their costs, float64 [K, 4]."""

    layouts: tuple[ParallelLayout, ...]
    costs: np.ndarray


class GenerationChoice:
    """Chooses generation for an actor; simulates each number of devices only once."""

    def __init__(self, simulator: GenerationSimulator, problem: MappingProblem):
        """Args are the simulator and the input of the search."""
        actor = problem.actor
        model, greedy = problem.models[actor.name], actor.greedy
        self._simulator = simulator
        self._model = model
        # Keyed by the groups that decode together: many layouts of training share them.
        cache = functools.cache
        self._times = cache(
            lambda groups: simulator.best_seconds(
                model, groups, budget=problem.budget_bytes, greedy=greedy
            )
        )
        self._exact = cache(functools.partial(simulator.seconds_of, model, greedy=greedy))
        self._resharding = cache(functools.partial(simulator.resharding_s, model))

    def best(self, options: RoleOptions, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The fastest p_g, t_g and slots of each pair.

        Args:
          options: K training options of the actor on n devices.
          free: float64 [K, J], bytes per device besides resident buffers, for J combinations of other roles.

        Returns:
          Seconds with resharding, float64 [K, J], infinite if no slot fits; and p_g, t_g and slots, int64
          [K, J, 3].
        """
        seconds = np.full(free.shape, np.inf)
        chosen = np.zeros((*free.shape, 3), np.int64)
        # Options of the same groups share their times.
        by_groups: dict[GenerationGroups, list[int]] = {}
        for i, layout in enumerate(options.layouts):
            # Divisors of p and t, or the layout's own t_g, if that takes replicas.
            tensor = divisors(layout.t) if layout.fsdp_gen == 1 else (layout.t_g,)
            for p_g, t_g in itertools.product(divisors(layout.p), tensor):
                if self._model.num_periods % p_g:
                    continue
                groups = self._simulator.groups(dataclasses.replace(layout, p_g=p_g, t_g=t_g))
                by_groups.setdefault(groups, []).append(i)
        # In a fixed order, so that of equally fast choices each search takes the same.
        for groups, rows in sorted(by_groups.items()):
            found, slots = self._with_groups(options, groups, rows, free[rows])
            better = found < seconds[rows]
            seconds[rows] = np.where(better, found, seconds[rows])
            sizes = np.full(better.shape, groups.p_g), np.full(better.shape, groups.t_g)
            picked = np.stack([*sizes, slots], axis=-1)
            chosen[rows] = np.where(better[..., None], picked, chosen[rows])
        return seconds, chosen

    def _with_groups(
        self, options: RoleOptions, groups: GenerationGroups, rows: list[int], free: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        # (seconds [R, J], slots [R, J]) of R options of the same groups; infinite if no slot fits.
        times = self._times(groups)
        if not len(times.room):
            return np.full(free.shape, np.inf), np.zeros(free.shape, np.int64)
        fitting = self._simulator.fitting_slots(self._model, groups, free)
        # More slots than the samples of a replica are never used.
        usable = np.clip(fitting, 0, times.room[-1]).astype(np.int64)
        numbers, number_of = np.unique(usable, return_inverse=True)
        # (seconds, slots) of the best number of slots up to each of these, which itself is also tried.
        best: list[tuple[float, int]] = []
        for most in numbers.tolist():
            place = np.searchsorted(times.room, most, side="right") - 1
            found = (float(times.seconds[place]), int(times.slots[place])) if most else (np.inf, 0)
            if most and times.room[place] != most:
                found = min(found, (self._exact(groups, most), most))
            best.append(found)
        # No numbers if there is no combination of other roles.
        pairs = np.array(best).reshape(-1, 2)[number_of].reshape(*free.shape, 2)
        sizes = {"p_g": groups.p_g, "t_g": groups.t_g}
        layouts = [dataclasses.replace(options.layouts[i], **sizes) for i in rows]
        moved = [self._resharding(layout) for layout in layouts]
        return pairs[..., 0] + np.array(moved)[:, None], pairs[..., 1].astype(np.int64)


# Columns of points: devices of each group of the cluster, if any, then seconds of each stage.
GENERATION, PREPARATION, TRAINING = -3, -2, -1
DEVICES, SECONDS = slice(None, GENERATION), slice(GENERATION, None)


@dataclasses.dataclass(frozen=True)
class PoolFront:
    """Trade-offs of roles that share devices.

    Attributes:
      points: float64 [F, G + 3], columns DEVICES and SECONDS; those of `PoolSolver` have no devices.
      choices: mapping of each role at each point, F of them; the pools have no numbers yet.
    """

    points: np.ndarray
    choices: tuple[Mapping[str, RoleMapping], ...]


class PoolSolver:
    """Finds the fronts of pools on one group of devices, and caches what it simulates."""

    def __init__(self, problem: MappingProblem):
        self._problem = problem
        self.simulator = StepSimulator(problem.cluster, problem.workload, problem.assumptions)
        actor = problem.actor
        self._actor = actor.name
        self._generation = GenerationChoice(self.simulator.generating, problem)
        # Roles with the same tasks and the same model shape share their options.
        self._alike = {
            role.name: (dataclasses.replace(role, name=""), problem.models[role.name])
            for role in problem.roles
        }
        # By tasks and model, not by name: two critics of one shape are simulated once.
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
            turns = self._turns(others, devices, most_passes_s)
            points = np.pad(turns.costs[:, 2:], ((0, 0), (1, 0)))
            kept = pareto_front(points)
            choices = [self._mappings(others, turns, i, devices) for i in kept.tolist()]
            return PoolFront(points[kept], tuple(choices))
        most_s = most_passes_s - self.least_passes_s([self._actor], devices)
        turns = self._turns(others, devices, most_s)
        # Pairs each option of the actor with each combination of the others, with its best generation.
        budget, own = self._problem.budget_bytes, self._options_of(self._actor, devices)
        pairs = in_turn(own.costs, turns.costs)
        # Negative if the pair does not fit, so that no slot fits either.
        free = np.where(fits(pairs, budget), budget - pairs[..., 0], -1.0)
        generation_s, chosen = self._generation.best(own, free)
        i, j = np.nonzero(np.isfinite(generation_s))
        seconds = np.column_stack([generation_s[i, j], pairs[i, j, 2:]])
        kept, choices = pareto_front(seconds), []
        for a, b in zip(i[kept].tolist(), j[kept].tolist(), strict=True):
            p_g, t_g, slots = chosen[a, b].tolist()
            layout = dataclasses.replace(own.layouts[a], p_g=p_g, t_g=t_g)
            tokens = self._problem.workload.cache_tokens(slots)
            actor = RoleMapping(self._actor, 0, layout, slots, tokens)
            mappings = self._mappings(others, turns, b, devices)
            choices.append({self._actor: actor, **mappings})
        return PoolFront(seconds[kept], tuple(choices))

    def least_passes_s(self, names: Sequence[str], devices: int) -> float:
        """Lower bound of the seconds of preparation and training of these roles on n devices."""
        costs = [self._options_of(name, devices).costs for name in names]
        return sum(float(passes_s(each).min(initial=np.inf)) for each in costs)

    def _turns(self, names: Sequence[str], devices: int, most_s: float) -> Turns:
        # Combinations of roles that do not generate, within `most_s` seconds of preparation and training.
        # At first one combination of no roles, without costs.
        found, budget = Turns(np.zeros((1, 4)), np.zeros((1, 0), int)), self._problem.budget_bytes
        for i, name in enumerate(names):
            # Reserve the least seconds that the later roles need.
            later_s = self.least_passes_s(names[i + 1 :], devices)
            costs = self._options_of(name, devices).costs
            found = found.with_role(costs, budget=budget, most_s=most_s - later_s)
        return found

    def _mappings(
        self, names: Sequence[str], turns: Turns, i: int, devices: int
    ) -> dict[str, RoleMapping]:
        # The mapping of each role in combination i.
        picked = zip(names, turns.options[i].tolist(), strict=True)
        return {
            name: RoleMapping(name, 0, self._options_of(name, devices).layouts[k])
            for name, k in picked
        }

    def _options_of(self, name: str, devices: int) -> RoleOptions:
        # Layouts that fit alone and that no other layout beats in both memory and time.
        role, model = self._alike[name]
        key = role, model, devices
        if key in self._options:
            return self._options[key]
        passes, problem = self.simulator.passes, self._problem
        every = layouts_of(model, devices, problem.cluster.accelerator.domain, problem.limits)
        layouts = [
            layout
            for layout in every
            if passes.divides(layout) and (role.generates or layout.fsdp_gen == 1)
        ]
        costs = np.zeros((len(layouts), 4))
        for row, layout in zip(costs, layouts, strict=True):
            if role.forwards:
                forward = passes.inference(model, layout, share=role.share(problem.workload))
                row[:3] = forward.resident_bytes, forward.transient_bytes, forward.total_s
                row[2] *= role.forwards
            if role.trains:
                update = passes.training(model, layout)
                row[0], row[3] = update.resident_bytes, update.total_s
                row[1] = max(row[1], update.transient_bytes)
        # Generation splits p and t further, or takes FSDP replicas as tensor shards, and gathers FSDP shards:
        # an actor's options compete with those of the same sizes only, and in the seconds of this gather too.
        # ZeRO-3 leaves room for more slots, of which other numbers are tried, so neither sharding rules out
        # the other.
        groups: dict[tuple[int | str, ...], list[int]] = {}
        points = costs
        if role.generates:
            gathers = [[self.simulator.generating.unshard_s(model, layout)] for layout in layouts]
            points = np.concatenate([costs, np.reshape(gathers, (-1, 1))], axis=1)
        for i in np.flatnonzero(fits(costs, problem.budget_bytes)).tolist():
            each = layouts[i]
            same = (each.p, each.t, each.fsdp, each.fsdp_gen, each.expert, each.sharding)
            groups.setdefault(same if role.generates else (), []).append(i)
        kept = [group[i] for group in groups.values() for i in pareto_front(points[group])]
        self._options[key] = RoleOptions(tuple(layouts[i] for i in kept), costs[kept])
        return self._options[key]
