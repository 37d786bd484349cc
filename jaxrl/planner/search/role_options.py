"""Every way to split a role's model over n devices, and its cost: HybridFlow's Algorithm 2 (auto_parallel).

The algorithm as printed ends its loop over p at n / U, U being the devices of a machine: empty for fewer
than U devices, and too short where t is below U; and n / (p t) need not be whole. Here p, t, d and the share
of FSDP run over the divisors of n, and over what divides the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from jaxrl.checks import check_fields, count
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.pareto import front
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import Strategy

RESIDENT, TRANSIENT, PREPARATION, TRAINING, FSDP = range(5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Strategies that a search looks at.

    Attributes:
      max_tensor: t at most, and never beyond devices with fast links to each other.
      max_pipeline: p at most.
      fsdp: weights and states may be shared among replicas.
    """

    max_tensor: Annotated[int, count(1)] = 8
    max_pipeline: Annotated[int, count(1)] = 64
    fsdp: bool = True

    def __post_init__(self):
        check_fields(self)


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """All of them, growing."""
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def strategies_of(
    model: ModelConfig, devices: int, domain: int, limits: Limits
) -> Iterator[Strategy]:
    """All strategies on exactly so many devices that divide the model.

    Heads, feed-forward width and vocabulary divide over t, layers over p, width over FSDP; key-value heads
    that do not are on every device (mesh.rules).
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
            for fsdp in divisors(d) if limits.fsdp else (1,):
                if model.d_model % fsdp == 0:
                    yield Strategy(p, t, d, fsdp)


@dataclasses.dataclass(frozen=True)
class RoleOptions:
    """Strategies of a role on n devices that are worth a look.

    Attributes:
      strategies: K of them.
      costs: float64 [K, 5], columns RESIDENT and TRANSIENT in bytes of a device, PREPARATION and TRAINING in
        seconds of a step, and FSDP, the share.
    """

    strategies: tuple[Strategy, ...]
    costs: np.ndarray

    def __len__(self) -> int:
        return len(self.strategies)


def role_options(
    role: RoleTasks,
    model: ModelConfig,
    devices: int,
    passes: PassSimulator,
    *,
    domain: int,
    limits: Limits,
    budget: float,
) -> RoleOptions:
    """Strategies that fit by themselves and that no other beats in memory and time at once.

    An actor's are compared among those of one (p, t) only: generation divides these, and the resharding
    takes longer the more replicas share its weights.

    Args:
      role, model: whose.
      devices: n.
      passes: the simulator.
      domain: devices among which links are fast.
      limits: which strategies to look at.
      budget: bytes of a device that there are.
    """
    strategies = [s for s in strategies_of(model, devices, domain, limits) if passes.divides(s)]
    costs = np.array([_costs(role, model, s, passes) for s in strategies]).reshape(-1, 5)
    fits = costs[:, RESIDENT] + costs[:, TRANSIENT] <= budget
    groups: dict[tuple[int, int], list[int]] = {}
    for i in np.flatnonzero(fits).tolist():
        s = strategies[i]
        groups.setdefault((s.p, s.t) if role.generates else (0, 0), []).append(i)
    columns = slice(0, FSDP + 1 if role.generates else FSDP)
    kept = [i for group in groups.values() for i in np.array(group)[front(costs[group, columns])]]
    return RoleOptions(tuple(strategies[i] for i in kept), costs[kept])


def _costs(
    role: RoleTasks, model: ModelConfig, strategy: Strategy, passes: PassSimulator
) -> tuple[float, ...]:
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
    return resident, transient, preparation, training, float(strategy.fsdp)
