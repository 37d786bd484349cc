"""Every way to split a role's model over n devices, and its cost: HybridFlow's Algorithm 2 (auto_parallel).

The algorithm as printed ends its loop over p at n / U, U being the devices of a machine: empty for fewer
than U devices, and too short where t is below U; and n / (p t) need not be whole. Here p, t, d and the share
of FSDP run over the divisors of n, and over what divides the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.search.choice_costs import ChoiceCosts
from jaxrl.planner.search.mapping_problem import SearchLimits
from jaxrl.planner.search.pareto import pareto_front
from jaxrl.planner.simulation.simulate_passes import PassSimulator
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import Strategy


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """All of them, growing."""
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def strategies_of(
    model: ModelConfig, devices: int, domain: int, limits: SearchLimits
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
    """Strategies of a role on n devices that are worth a look, and what each costs."""

    strategies: tuple[Strategy, ...]
    costs: ChoiceCosts

    def __len__(self) -> int:
        return len(self.strategies)


def role_options(
    role: RoleTasks,
    model: ModelConfig,
    devices: int,
    passes: PassSimulator,
    *,
    domain: int,
    limits: SearchLimits,
    budget: float,
) -> RoleOptions:
    """Strategies that fit by themselves and that no other beats in memory and time at once.

    Args:
      role, model: whose.
      devices: n.
      passes: the simulator.
      domain: devices among which links are fast.
      limits: which strategies to look at.
      budget: bytes of a device that there are.
    """
    strategies = [s for s in strategies_of(model, devices, domain, limits) if passes.divides(s)]
    rows = [_costs(role, model, strategy, passes) for strategy in strategies]
    costs = ChoiceCosts.from_rows(np.array(rows).reshape(-1, 4))
    fitting = np.flatnonzero(costs.fits(budget)).tolist()
    compare = _not_beaten_actors if role.generates else _not_beaten
    kept = compare(fitting, strategies, costs)
    return RoleOptions(tuple(strategies[i] for i in kept), costs[kept])


def _not_beaten(choices: list[int], strategies: list[Strategy], costs: ChoiceCosts) -> list[int]:
    """Those of `choices` that no other beats in bytes and seconds."""
    del strategies
    return [choices[i] for i in pareto_front(costs[choices].rows())]


def _not_beaten_actors(
    choices: list[int], strategies: list[Strategy], costs: ChoiceCosts
) -> list[int]:
    """As `_not_beaten`, each compared with strategies of the same p and t only, and by FSDP too.

    Generation splits p and t further, and resharding takes longer the more replicas share the weights.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for i in choices:
        groups.setdefault((strategies[i].p, strategies[i].t), []).append(i)
    kept = []
    for group in groups.values():
        fsdp = np.array([[float(strategies[i].fsdp)] for i in group])
        compared = np.concatenate([costs[group].rows(), fsdp], axis=1)
        kept += [group[i] for i in pareto_front(compared)]
    return kept


def _costs(
    role: RoleTasks, model: ModelConfig, strategy: Strategy, passes: PassSimulator
) -> tuple[float, float, float, float]:
    """Resident and transient bytes, seconds of preparation and of training."""
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
