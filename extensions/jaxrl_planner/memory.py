"""Predicts the bytes per device of an actor and the other roles, from shapes and shardings.

Covered: all buffers of the actor that live between programs, and the two largest temporaries of its update;
the same for every other role, on its own devices. Not covered: other temporaries of the compiled programs.
Only compiling them shows these (`ahead.py`).

L layers   S slots   K kv heads   H head size   C tokens of a slot
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jax_core

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.pipeline import microbatches_of
from jaxrl.mesh.rules import TRAIN_RULES, shards_of
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots, is_part
from jaxrl.models.decoder import Params
from jaxrl.quantized import Quantized
from jaxrl.roles.learner import Learner, TrainState
from jaxrl.roles.packed_model import Frozen
from jaxrl.roles.packing import PackedShape
from jaxrl.types import PackedBatch
from jaxrl_planner.compiled.programs import SamplerShapes, bytes_of, layer_memory, nbytes_of
from jaxrl_planner.simulation.workload import train_name

_OFFLOADED = "in host memory while sampling"


@dataclasses.dataclass(frozen=True)
class ResidentBuffers:
    """Arrays that are in memory at the same time.

    Attributes:
      name: description of the arrays.
      layout: description of their sharding.
      num_values: number of values on the whole mesh, each counted once.
      bytes_per_device: bytes on each device.
      sampling, learning: whether they are in memory in this phase.
      turn: role whose update needs them; "" if they always stay, also between updates. Roles update one after
        the other.
      not_at: role during whose update they are released.
    """

    name: str
    layout: str
    num_values: int
    bytes_per_device: int
    sampling: bool
    learning: bool
    turn: str = ""
    not_at: str | None = None


def learner_memory(
    name: str, role: Learner, layout: ParallelLayout, *, offload: bool = False
) -> list[ResidentBuffers]:
    """The weights and moments of a role that is trained, which live between its updates.

    Args:
      name: name of the role.
      role: the role.
      layout: layout of its mesh.
      offload: whether both wait in host memory while sampling; for the actor only.
    """
    state, rank, where = role.abstract_state(), role.model.lora.rank, train_name(layout)
    adapters = f", adapters of rank {rank} in float32 included" if rank and name == "actor" else ""
    trained = f"{role.frozen_dtype.name}, {where}{adapters}"
    like = f"like the {'adapters' if adapters else 'weights'}"
    if offload:
        like = _OFFLOADED
    # The actor's moments have a name without its own.
    shown, of_role = name.replace("_", " "), "" if name == "actor" else f"{name}, "
    weights, here = f"{trained}, {_OFFLOADED}" if offload else trained, not offload
    buffers = [_buffers(f"{shown} in training", weights, state.params, sampling=here)]
    # TRPO takes its step without an optimiser.
    if jax.tree.leaves(state.opt_state):
        what = f"{of_role.replace('_', ' ')}optimiser state"
        # The type of most values.
        sizes: collections.Counter[str] = collections.Counter()
        for leaf in jax.tree.leaves(state.opt_state):
            sizes["8 bits" if leaf.dtype.itemsize == 1 else leaf.dtype.name] += leaf.size
        moments = f"{sizes.most_common(1)[0][0]}, {where}, {like}"
        buffers.append(_buffers(what, moments, state.opt_state, sampling=here))
    return buffers


def frozen_memory(
    name: str, role: Frozen, layout: ParallelLayout, *, offload: bool
) -> list[ResidentBuffers]:
    """The weights of a role that is not trained; offloaded ones wait in host memory between calls."""
    where = f"float32, {train_name(layout)}" + (", in host memory between calls" if offload else "")
    weights, here = role.abstract_params(), not offload
    shown = f"{name.replace('_', ' ')}, frozen"
    return [_buffers(shown, where, weights, sampling=here, learning=here)]


def sampling_memory(
    layout: ParallelLayout, state: TrainState, sampler: SamplerShapes
) -> list[ResidentBuffers]:
    """The buffers of sampling: the weights that are not shared with training, and the KV cache."""
    # [L, S, K, H, C] or [L, S, K, C, H], or one array per layer; of a paged cache S counts pages. States of
    # delta layers have no kv heads, and kinds of layers may have different numbers of them.
    cache = sampler.slots.context.cache
    keys = [part.k for part in jax.tree.leaves(cache, is_leaf=is_part) if isinstance(part, KVCache)]
    sizes = {k.sharding.shard_shape(k.shape)[-4:-2] for k in keys}
    (slots,) = {slots for slots, _ in sizes}
    kv_heads = " and ".join(str(heads) for heads in sorted(heads for _, heads in sizes))
    what, tokens = "slots", sampler.slots.capacity
    if isinstance(cache, PagedSlots):
        what, tokens = "pages", tokens // cache.table.shape[1]
    stored = f"{_stored_types(sampler.params)}, {layout.generate}"
    weights = _buffers("actor in generation", stored, sampler.params)
    # Leaves that share no memory with training, as `mesh.resharding` decides.
    trained = jax.tree.leaves(state.params)
    sampled = jax.tree.structure(state.params).flatten_up_to(sampler.params)
    moved = [
        after
        for before, after in zip(trained, sampled, strict=True)
        if isinstance(after, list | Quantized)
        or before.dtype != after.dtype
        or not before.sharding.is_equivalent_to(after.sharding, before.ndim)
    ]
    held = f"{slots:,} {what} x {kv_heads} kv heads a device, {tokens:,} tokens each"
    return [
        # Released before the actor's update, which makes new weights anyway.
        dataclasses.replace(weights, bytes_per_device=bytes_of(moved), not_at="actor"),
        _buffers("KV cache and slots", held, sampler.slots, learning=False),
    ]


def engine_memory(
    name: str, layout: ParallelLayout, sampler: SamplerShapes
) -> list[ResidentBuffers]:
    """Weights and KV cache of a role that samples on devices where it is not trained."""
    where = f"{_stored_types(sampler.params)}, {layout.generate}"
    return [
        _buffers(f"{name}, frozen", where, sampler.params),
        _buffers(f"{name}, cache and slots", where, sampler.slots, learning=False),
    ]


def _stored_types(params: Params) -> str:
    # The data types of weights, the type of most values first.
    sizes: collections.Counter[str] = collections.Counter()
    for leaf in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized)):
        narrow = isinstance(leaf, Quantized)
        values = leaf.values if narrow else leaf
        sizes[f"{values.dtype.name} with scales" if narrow else values.dtype.name] += values.size
    return " and ".join(name for name, _ in sizes.most_common())


def update_memory(
    name: str,
    role: Learner,
    layout: ParallelLayout,
    shape: PackedShape,
    batch: PackedBatch,
    update: jax_core.Jaxpr,
) -> list[ResidentBuffers]:
    """The temporaries of a role's update: outside of its layers, and inside from the traced update.

    Args:
      name, role: role that is updated.
      layout: layout of its mesh.
      shape, batch: shape of a batch, and its arrays.
      update: traced program.
    """
    of_role = "" if name == "actor" else f"{name.replace('_', ' ')}, "
    # The batch axes split rows, the context axis splits tokens.
    row_shards, token_shards = (
        shards_of(axis, TRAIN_RULES, role.mesh) for axis in ("batch", "length")
    )
    rows, tokens, stages = shape.rows // row_shards, shape.tokens // token_shards, layout.p
    # The stages of a pipeline split the rows of a microbatch further.
    micro = microbatches_of(shape.rows, TRAIN_RULES, role.mesh, role.train.pipeline_microbatches)
    kept, largest = layer_memory(
        *(update, role.model.periods_of_stage(stages)), micro + stages - 1 if stages > 1 else 0
    )
    if sharing := role.model.sharing_layers // role.model.period:
        kept = [*kept, *layer_memory(update, sharing, 0)[0]]
    kept = [a for a in kept if a.memory_space != jax.memory.Space.Host]
    beside = ", beside what is in host memory" if role.train.remat.startswith("offload") else ""
    in_update = functools.partial(ResidentBuffers, sampling=False, learning=True, turn=name)
    summed = "float32: one sum, which the backward pass adds to"
    packed = f"{rows} x {tokens:,} tokens a device and microbatch"
    outside = {"gradients": (summed, role.abstract_gradients()), "train batch": (packed, batch)}
    return [
        *(
            _buffers(f"{of_role}{what}", text, tree, sampling=False, turn=name)
            for what, (text, tree) in outside.items()
        ),
        in_update(
            f"{of_role}kept of the layers",
            f"remat {role.train.remat}, split over rows and tokens{beside}",
            sum(a.size for a in kept) * stages,
            sum(map(nbytes_of, kept)) // (row_shards * token_shards),
        ),
        in_update(
            f"{of_role}largest value in a layer",
            f"{largest.dtype.name} {list(largest.shape)}, if split over all devices"
            + (" of a stage" if stages > 1 else ""),
            largest.size,
            nbytes_of(largest) * stages // layout.num_devices,
        ),
    ]


def _buffers(
    name: str,
    layout: str,
    tree: Any,
    *,
    sampling: bool = True,
    learning: bool = True,
    turn: str = "",
) -> ResidentBuffers:
    return ResidentBuffers(
        name,
        layout,
        num_values=sum(leaf.size for leaf in jax.tree.leaves(tree)),
        bytes_per_device=bytes_of(tree),
        sampling=sampling,
        learning=learning,
        turn=turn,
    )


def phase_bytes(buffers: Sequence[ResidentBuffers], phase: str) -> int:
    """Bytes per device in a phase, "sampling" or "learning", during the update that needs most."""
    # Roles update one after the other, so the temporaries of two updates are never there together.
    present = [held for held in buffers if getattr(held, phase)]
    turns = {held.turn for held in present} | {""}
    return max(
        sum(h.bytes_per_device for h in present if h.turn in ("", turn) and h.not_at != turn)
        for turn in turns
    )
