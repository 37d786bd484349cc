"""Small models, small devices and a search without pruning, for tests of the planner."""

import dataclasses
import itertools

import numpy as np
from model_sizes import sized_model

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.hardware.cluster import Cluster, MixedCluster
from jaxrl_planner.search.mapping import placements_of
from jaxrl_planner.search.pool_fronts import divisors, layouts_of
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

# Little is hidden and nothing set aside, so that every term decides something.
ASSUME = Assumptions(memory_share=1.0, scratch_gb=0.0, overlap=0.25, latency_scale=0.1)


def toy(memory_gb: float = 1.0, *, per_host: int = 4, **changes) -> Accelerator:
    """Hosts of a few slow devices."""
    return Accelerator(
        **{
            "name": "toy",
            "platform": "cpu",
            "memory_gb": memory_gb,
            "bfloat16_tflops": 1.0,
            "float32_tflops": 0.5,
            "memory_gbs": 20.0,
            "link_gbs": 4.0,
            "host_gbs": 2.0,
            "devices_per_host": per_host,
            "largest": 64,
        }
        | changes
    )


def split(p, t, d, fsdp=1, expert=1, context=1, *, p_g=None, t_g=None) -> ParallelLayout:
    """A layout whose generation has the sizes of training unless others are given."""
    return ParallelLayout(p, t, d, p_g or p, t_g or t, fsdp, expert, context)


def toy_model(layers: int = 2, *, scores: int = 0, width: int = 1026) -> ModelConfig:
    """About 30 million parameters; two or six replicas can share its width, and two split its heads."""
    return sized_model(2048, layers, width, 4098, 2, 2, 64, num_scores=scores)


def toy_work(**changes) -> Workload:
    """A few dozen short sequences."""
    return Workload(
        **{
            "prompts": 12,
            "samples": 2,
            "prompt_lengths": LengthDistribution.exactly(64),
            "response_lengths": LengthDistribution(96, 256, "log-normal"),
            "updates": 2,
            "microbatch_tokens": 512,
        }
        | changes
    )


def brute_force(
    roles, models, work, cluster: Cluster | MixedCluster, assume: Assumptions, limits
) -> float:
    """Seconds of the best mapping: everything is tried with everything."""
    best = np.inf
    names = [role.name for role in roles]
    pools = {}
    for placement in placements_of(names):
        where = [(group, n) for group in cluster.groups for n in group.pool_sizes]
        for chosen in itertools.product(where, repeat=len(placement)):
            taken = {group: 0 for group in cluster.groups}
            for group, n in chosen:
                taken[group] += n
            if any(n > group.num_devices for group, n in taken.items()):
                continue
            stages = np.zeros((1, 3))
            for pool, (group, devices) in zip(placement, chosen, strict=True):
                if (pool, group, devices) not in pools:
                    members = [role for role in roles if role.name in pool]
                    pools[pool, group, devices] = _everything(
                        members, models, work, group, assume, limits, devices
                    )
                here = pools[pool, group, devices]
                stages = np.maximum(stages[:, None], here[None]).reshape(-1, 3)
            best = min(best, stages.sum(axis=1).min(initial=np.inf))
    return float(best)


def _everything(roles, models, work, cluster, assume, limits, devices) -> np.ndarray:
    """Seconds by stage of every combination of strategies that fits: [K, 3]."""
    kind = cluster.accelerator
    budget = (kind.memory_gb * assume.memory_share - assume.scratch_gb) * 1e9
    passes = PassSimulator(cluster, work, assume)
    generating = GenerationSimulator(cluster, work, assume)
    options = [list(layouts_of(models[r.name], devices, kind.domain, limits)) for r in roles]
    found = []
    for combination in itertools.product(*options):
        resident, transient, seconds = 0.0, 0.0, np.zeros(3)
        for role, strategy in zip(roles, combination, strict=True):
            model = models[role.name]
            forward = passes.inference(model, strategy, share=role.share(work))
            seconds[1] += role.forwards * forward.total_s
            transient = max(transient, forward.transient_bytes)
            if role.trains:
                update = passes.training(model, strategy)
                seconds[2] += update.total_s
                transient = max(transient, update.transient_bytes)
            resident += (update if role.trains else forward).resident_bytes
        if resident + transient > budget:
            continue
        for role, strategy in zip(roles, combination, strict=True):
            if role.generates:
                widest = min(limits.max_tensor, kind.domain)
                seconds[0] = _generation_s(
                    role, models[role.name], strategy, generating, work, budget, resident, widest
                )
        if np.isfinite(seconds[0]):
            found.append(seconds)
    return np.array(found).reshape(-1, 3)


_traces: dict = {}


def _generation_s(role, model, strategy, generating, work, budget, resident, widest) -> float:
    best = np.inf
    for p_g, t_g in itertools.product(divisors(strategy.p), range(1, widest + 1)):
        # Two heads: one or two tensor shards, which are those of training, fewer, or of several FSDP shards.
        wider, rest = divmod(t_g, strategy.t)
        if model.num_heads % t_g or (strategy.t % t_g and (rest or strategy.fsdp % wider)):
            continue
        slot, weights = (
            generating.slot_bytes(model, p_g, t_g),
            generating.weight_bytes(model, p_g, t_g, strategy.expert),
        )
        replicas = strategy.num_devices // (p_g * t_g)
        samples = -(-work.prompts * (work.samples + role.greedy) // replicas)
        most = min(samples, work.max_slots, int(max(0, budget - weights) // slot))
        for slots in range(1, most + 1):
            if resident + weights + slots * slot > budget:
                continue
            layout = dataclasses.replace(strategy, p_g=p_g, t_g=t_g)
            if layout.fsdp_gen != strategy.fsdp_gen:
                continue  # another layout, with other groups in training
            groups = generating.groups(layout)
            key = (id(generating), model, groups, slots, role.greedy)
            if key not in _traces:
                times = generating.best_seconds(
                    model, groups, budget=weights + slots * slot, greedy=role.greedy
                )
                _traces[key] = generating, times.seconds
            moved = generating.resharding_s(model, layout)
            best = min(best, _traces[key][1][-1] + moved)
    return best
