"""Costs of resharding between two layouts on a device: received, peak and redundant bytes.

Three sources, for any two sets of sharding rules:

    table_2         the paper's closed forms, for weights that split evenly
    from_shardings  exact: the part of every array that each device has before and needs after
    of_resharding,  compiled programs: collectives from their text, memory from their analysis
    of_gather_and_keep

All figures are maxima over the devices. M is the size of the whole model.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.resharding import Resharding, Weight
from jaxrl.mesh.rules import replicated
from jaxrl_planner.compiled.traffic import Collective, collectives


@dataclasses.dataclass(frozen=True)
class ReshardingCosts:
    """Maximum bytes on one device.

    Attributes:
      received: bytes received from other devices.
      peak: peak bytes of weights.
      redundant: bytes of training weights kept in addition to the generation copy.
    """

    received: Fraction | int
    peak: Fraction | int
    redundant: Fraction | int


@dataclasses.dataclass(frozen=True)
class Measured:
    """Costs read from compiled programs, and their collectives as (number of runs, collective)."""

    costs: ReshardingCosts
    collectives: tuple[tuple[int, Collective], ...]


def table_2(layout: ParallelLayout, model_bytes: int) -> dict[str, ReshardingCosts]:
    """HybridFlow's Table 2, by name of the sharding strategy.

    With ZeRO or FSDP (`layout.fsdp`) a device also receives the missing parts of its own training shard,
    which the paper does not count.
    """
    # Fractions, so that they can be compared with the bytes of shardings exactly.
    M, one = Fraction(model_bytes), Fraction(1)
    devices, tp, generate = layout.num_devices, layout.t * layout.p, layout.t_g * layout.p_g
    sizes = layout.axis_sizes
    # The two shards lie in one of tensor_gen parts of a stage: one is its 1/m-th, the other its 1/k-th.
    m, k = sizes["tensor_micro"], sizes["fsdp_gen"]
    # In the paper t_g divides t. Where it does not, the shard of a device in generation is no union of
    # training shards: with `hybrid` it receives what its training shard lacks, and the training shard is
    # given up.
    common = M / (layout.p * layout.t * k) if min(m, k) == 1 else Fraction(0)
    return {
        "gather_all": ReshardingCosts((one - one / devices) * M, M, M / devices),
        "vanilla": ReshardingCosts((one - one / tp) * M, M, M / tp),
        "hybrid": ReshardingCosts(M / generate - common, M / generate, 0),
    }


def from_shardings(weights: list[Weight]) -> ReshardingCosts:
    """Lower bound of the costs of any procedure, from shapes and shardings alone.

    A device receives the parts that it needs and does not hold, keeps the parts that generation does not use,
    and holds both copies at the peak, with their common part once. All bytes are in the data type of
    generation, without scales.
    """
    received, peak, redundant = (0 for _ in range(3))
    for weight in weights:
        before, after = (boxes(s, weight.shape) for s in (weight.train, weight.generate))
        first, last = (
            np.maximum(before[..., 0], after[..., 0]),
            np.minimum(before[..., 1], after[..., 1]),
        )
        common = _volume(np.stack([first, last], axis=-1))
        size = weight.stored.dtype.itemsize
        received = received + (_volume(after) - common) * size
        redundant = redundant + (_volume(before) - common) * size
        peak = peak + (_volume(before) + _volume(after) - common) * size
    return ReshardingCosts(*(int(np.max(x)) for x in (received, peak, redundant)))


def boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """The part of an array that every device holds: [device, dimension, (first, last + 1)].

    Devices are numbered in the order of the flattened mesh.
    """
    sizes = dict(sharding.mesh.shape)
    place = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    num_devices = sharding.mesh.size
    result = np.zeros((num_devices, len(shape), 2), np.int64)
    for dim, (axes, size) in enumerate(zip(spec, shape, strict=True)):
        index, shards = np.zeros(tuple(sizes.values()), np.int64), 1
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            index, shards = index * sizes[axis] + place[axis], shards * sizes[axis]
        result[:, dim, 0] = index.reshape(-1) * (size // shards)
        result[:, dim, 1] = result[:, dim, 0] + size // shards
    return result


def _volume(box: np.ndarray) -> np.ndarray:
    return np.prod(np.maximum(box[..., 1] - box[..., 0], 0), axis=-1)


def of_resharding(resharding: Resharding) -> Measured:
    """Compiles the programs of a resharding to generation, and reads their costs.

    The peak is `Resharding.peak_bytes` with the compiler's figures for temporaries.
    """
    weights = resharding.weights
    devices = weights[0].train.mesh.size
    # Compiling is what takes long here, and leaves with equal shapes and layouts share a program.
    programs: dict[Any, Any] = {}
    found: list[tuple[int, Collective]] = []
    own_bytes = []
    for bucket in resharding.buckets:
        key = bucket.weights, bucket.num_slices
        if key not in programs:
            programs[key] = bucket.gather_program.lower(*bucket.gather_arguments()).compile()
        found += [
            (bucket.num_slices, c) for c in collectives(programs[key].as_text() or "", devices)
        ]
        own_bytes.append(programs[key].memory_analysis().temp_size_in_bytes)
    kept = 0 if resharding.donate else sum(w.train_bytes for w in weights if w.moves)
    costs = ReshardingCosts(_received(found, weights), resharding.peak_bytes(own_bytes), kept)
    return Measured(costs, tuple(found))


def of_gather_and_keep(weights: list[Weight]) -> Measured:
    """Compiles the procedure of DeepSpeed-Chat and HybridFlow-V in Table 2, and reads its costs.

    Every device gathers the whole model leaf by leaf, and keeps its generation shard and its training shard.
    """
    found: list[tuple[int, Collective]] = []
    gathered = kept = 0
    # Equal leaves share a program.
    for weight, count in collections.Counter(weights).items():
        whole = replicated(weight.train.mesh)
        gather = jax.jit(gather_everything(weight.train)).lower(weight.abstract()).compile()
        leaf = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=whole)
        keep = jax.jit(lambda leaf: leaf, out_shardings=weight.generate).lower(leaf).compile()
        found += [
            (count, c)
            for p in (gather, keep)
            for c in collectives(p.as_text() or "", weights[0].train.mesh.size)
        ]
        memory: Any = gather.memory_analysis()
        # As in the paper the peak is the gathered model, without temporaries of programs.
        gathered += count * memory.output_size_in_bytes
        kept += count * memory.argument_size_in_bytes
    return Measured(ReshardingCosts(_received(found, weights), gathered, kept), tuple(found))


def gather_everything(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A function that gathers a sharded array onto every device, one mesh axis at a time."""

    def gather(shard: jax.Array) -> jax.Array:
        for dim, axes in enumerate(sharding.spec):
            # One axis at a time: XLA's TPU backend turns a gather over a whole slice into an all-reduce of
            # zero-padded shards, which moves twice the bytes.
            for axis in reversed((axes,) if isinstance(axes, str) else axes or ()):
                shard = jax.lax.all_gather(shard, axis, axis=dim, tiled=True)
        # Without the copy, an array that is already whole would be missing from the memory analysis.
        return jnp.copy(shard)

    return jax.shard_map(
        gather, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=P(), check_vma=False
    )


def _received(found: list[tuple[int, Collective]], weights: list[Weight]) -> int:
    devices = weights[0].train.mesh.size
    total = sum((n * c.received(devices) for n, c in found), np.zeros(devices))
    return round(float(total.max()))
