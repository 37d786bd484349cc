"""All strategies of a role's model on n devices, with their costs: HybridFlow's Algorithm 2 (auto_parallel).

The printed algorithm ends its loop over p at n / U, for U devices per machine. This loop is empty for fewer
than U devices and too short for t below U, and n / (p t) may not be an integer. Here p, t, d and the size of
FSDP run over divisors of n that also divide the model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.choice_costs import ChoiceCosts
from jaxrl.planner.search.mapping_problem import SearchLimits
from jaxrl.planner.search.pareto import pareto_front
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.step_simulator import StepSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import Strategy


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
                if (
                    d % (expert * context)
                    or (model.num_experts or 1) % expert
                    or context > min(limits.max_context, max(1, domain // t))
                    or not _exchanges(model, t, context)
                ):
                    continue
                for fsdp in divisors(d // (expert * context)) if limits.fsdp else (1,):
                    if model.d_model % fsdp == 0:
                        yield Strategy(p, t, d, fsdp, expert, context)


def _exchanges(model: ModelConfig, t: int, context: int) -> bool:
    """Whether the heads of a device divide over the context axis (mesh.parallel_layers)."""
    keys = max(1, model.num_kv_heads // t)
    return (model.num_heads // t) % context == 0 and (keys % context == 0 or context % keys == 0)


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
    rows = [_costs(role, model, strategy, passes) for strategy in strategies]
    costs = ChoiceCosts.from_rows(np.array(rows).reshape(-1, 4))
    fitting = np.flatnonzero(costs.fits(budget)).tolist()
    if role.generates:
        unshard_s = {i: simulator.generating.unshard_s(model, strategies[i]) for i in fitting}
        kept = _best_of_each_shape(fitting, strategies, costs, unshard_s)
    else:
        kept = [fitting[i] for i in pareto_front(costs[fitting].rows())]
    return RoleOptions(tuple(strategies[i] for i in kept), costs[kept])


def _best_of_each_shape(
    choices: list[int],
    strategies: list[Strategy],
    costs: ChoiceCosts,
    unshard_s: Mapping[int, float],
) -> list[int]:
    """An actor's Pareto-optimal choices among strategies with the same p, t and expert size.

    Generation splits p and t further, and FSDP shards are gathered before it, in `unshard_s` seconds.
    """
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i in choices:
        shape = strategies[i].p, strategies[i].t, strategies[i].expert
        groups.setdefault(shape, []).append(i)
    kept = []
    for group in groups.values():
        gathers = np.array([[unshard_s[i]] for i in group])
        compared = np.concatenate([costs[group].rows(), gathers], axis=1)
        kept += [group[i] for i in pareto_front(compared)]
    return kept


def _costs(
    role: RoleTasks, model: ModelConfig, strategy: Strategy, passes: PassSimulator
) -> tuple[float, float, float, float]:
    """Resident bytes, transient bytes, seconds of preparation, seconds of training."""
    preparation, transient, resident = 0.0, 0.0, 0.0
    if role.forwards:
        forward = passes.inference(model, strategy, share=passes.share_of(role))
        preparation = role.forwards * forward.total_s
        resident, transient = forward.resident_bytes, forward.transient_bytes
    training = 0.0
    if role.trains:
        update = passes.training(model, strategy)
        training, resident = update.total_s, update.resident_bytes
        transient = max(transient, update.transient_bytes)
    return resident, transient, preparation, training
