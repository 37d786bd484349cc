"""All strategies of a role's model on n devices, with their costs: HybridFlow's Algorithm 2 (auto_parallel).

The printed algorithm ends its loop over p at n / U, for U devices per machine. This loop is empty for fewer
than U devices and too short for t below U, and n / (p t) may not be an integer. Here p, t, d and the size of
FSDP run over divisors of n that also divide the model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.choice_costs import ChoiceCosts, pareto_front
from jaxrl.planner.search.mapping import SearchLimits
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
                # The heads of a device divide over the context axis (mesh.attention_parallel).
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
