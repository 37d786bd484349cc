"""What a move between two layouts costs a device: bytes received, peak, redundant.

Three sources, for any two spec tables:

    table_2         the paper's closed forms, for weights that split evenly
    from_shardings  exact: which part of every array each device has before and needs after
    of_resharding,  the compiled programs: collectives of their text, memory of their analysis
    of_gather_and_keep

Received bytes are those of the device that receives most; so are the others. M is the whole model.
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
from jaxrl.planner.compiled.hlo import Collective, collectives


@dataclasses.dataclass(frozen=True)
class CostBreakdown:
    """Bytes on one device.

    Attributes:
      received: from other devices.
      peak: of weights, at the worst moment.
      redundant: of training weights kept beside the generation copy.
    """

    received: Fraction | int
    peak: Fraction | int
    redundant: Fraction | int


@dataclasses.dataclass(frozen=True)
class Measured:
    """Costs read from compiled programs, and their collectives: (how often it runs, what)."""

    costs: CostBreakdown
    collectives: tuple[tuple[int, Collective], ...]


def table_2(layout: ParallelLayout, model_bytes: int) -> dict[str, CostBreakdown]:
    """HybridFlow Table 2 by name of grouping.

    With ZeRO or FSDP on top (`layout.fsdp`) a device also receives what it does not hold of its own
    training shard, which the paper does not count.
    """
    M, one = Fraction(model_bytes), Fraction(1)
    devices, tp, generate = layout.num_devices, layout.t * layout.p, layout.t_g * layout.p_g
    return {
        "gather_all": CostBreakdown((one - one / devices) * M, M, M / devices),
        "vanilla": CostBreakdown((one - one / tp) * M, M, M / tp),
        "hybrid": CostBreakdown(Fraction(tp - generate, generate * tp) * M, M / generate, 0),
    }


def from_shardings(weights: list[Weight]) -> CostBreakdown:
    """The least that any procedure costs, from shapes and shardings alone.

    A device receives what it needs and does not hold, keeps what generation does not use, and has both
    copies at the peak, their common part once. Parts of leaves are compared, not of their bytes, so the
    type of generation counts everywhere.
    """
    received, peak, redundant = (0 for _ in range(3))
    for weight in weights:
        before, after = (boxes(s, weight.shape) for s in (weight.train, weight.generate))
        common = _volume(_intersection(before, after))
        size = weight.generate_dtype.itemsize
        received = received + (_volume(after) - common) * size
        redundant = redundant + (_volume(before) - common) * size
        peak = peak + (_volume(before) + _volume(after) - common) * size
    return CostBreakdown(*(int(np.max(x)) for x in (received, peak, redundant)))


def boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """Which part of an array every device holds: [device, dimension, (first, last + 1)].

    Devices are numbered as in the mesh, flattened.
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


def _intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])], axis=-1)


def _volume(box: np.ndarray) -> np.ndarray:
    return np.prod(np.maximum(box[..., 1] - box[..., 0], 0), axis=-1)


def of_resharding(resharding: Resharding) -> Measured:
    """Compiles a resharding's way to generation and reads its costs from the programs.

    The peak is that of `Resharding.peak_bytes`, with the temporaries that the compiler reports.
    """
    weights = resharding.weights
    programs: dict[Any, Any] = {}  # of leaves of equal shape and layout there is one
    found: list[tuple[int, Collective]] = []
    own_bytes = []
    for bucket in resharding.buckets:
        key = bucket.weights, bucket.num_slices
        if key not in programs:
            programs[key] = bucket.gather_program.lower(*bucket.gather_arguments()).compile()
        found += [(bucket.num_slices, c) for c in _collectives(programs[key], weights)]
        own_bytes.append(programs[key].memory_analysis().temp_size_in_bytes)
    kept = 0 if resharding.donate else sum(w.train_bytes for w in weights if w.moves)
    costs = CostBreakdown(_received(found, weights), resharding.peak_bytes(own_bytes), kept)
    return Measured(costs, tuple(found))


def of_gather_and_keep(weights: list[Weight]) -> Measured:
    """Compiles the procedure that Table 2 counts for DeepSpeed-Chat and HybridFlow-V, and reads it.

    Every device gathers the whole model, leaf by leaf, keeps what it generates with, and its training shard
    beside that. The peak is of weights, as in the paper: the gathered model, no temporaries of programs.
    """
    found: list[tuple[int, Collective]] = []
    gathered = kept = 0
    for weight, count in collections.Counter(weights).items():
        whole = replicated(weight.train.mesh)
        gather = jax.jit(gather_everything(weight.train)).lower(weight.abstract()).compile()
        leaf = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=whole)
        keep = jax.jit(lambda leaf: leaf, out_shardings=weight.generate).lower(leaf).compile()
        found += [(count, c) for p in (gather, keep) for c in _collectives(p, weights)]
        memory: Any = gather.memory_analysis()
        gathered += count * memory.output_size_in_bytes
        kept += count * memory.argument_size_in_bytes
    return Measured(CostBreakdown(_received(found, weights), gathered, kept), tuple(found))


def gather_everything(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A function that gathers an array of a sharding whole onto every device, axis by axis of the mesh."""

    def gather(shard: jax.Array) -> jax.Array:
        for dim, axes in enumerate(sharding.spec):
            # One axis at a time: a gather over a whole slice XLA's TPU backend makes an all-reduce of
            # shards padded with zeros, which moves twice the bytes.
            for axis in reversed((axes,) if isinstance(axes, str) else axes or ()):
                shard = jax.lax.all_gather(shard, axis, axis=dim, tiled=True)
        # An array that is whole already would be handed through and missing from the memory analysis.
        return jnp.copy(shard)

    return jax.shard_map(
        gather, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=P(), check_vma=False
    )


def _collectives(compiled: Any, weights: list[Weight]) -> list[Collective]:
    return collectives(compiled.as_text(), _num_devices(weights))


def _received(found: list[tuple[int, Collective]], weights: list[Weight]) -> int:
    total = sum(
        (n * c.received(_num_devices(weights)) for n, c in found), np.zeros(_num_devices(weights))
    )
    return round(float(total.max()))


def _num_devices(weights: list[Weight]) -> int:
    return weights[0].train.mesh.size


def state_bytes(shapes: Any, shardings: Any, bytes_per_value: int) -> int:
    """Bytes on a device of one part of a training state: weights, gradients or moments."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    values = sum(int(np.prod(s.shard_shape(leaf.shape), dtype=np.int64)) for leaf, s in pairs)
    return values * bytes_per_value
