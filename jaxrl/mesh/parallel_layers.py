"""Layers on a mesh: attention over split heads and sequences, and experts on several devices.

**Attention.** Every device attends with its own heads to its own rows. If sequences are split over `context`,
u of its devices exchange parts of the sequence for parts of the heads, and between r of them keys and values
travel in a ring (`mesh.ring`). Without a ring the kernel sees whole sequences, packed ones too:

    [B, T/c, Q, H] --all-to-all over u--> [B, T/r, Q/u, H] --attention--> --all-to-all--> [B, T/c, Q, H]

Kernels written by hand cannot be partitioned by the compiler, so all of them run inside `shard_map`. Delta
layers exchange key heads in the same way, over all context devices: a ring cannot pass their state on.

**Experts.** Every device of an `expert` group holds consecutive experts and a share of the batch. The tokens
of the group are gathered, each device sums the outputs of its own experts, and the sums return to the owners
of the tokens; `token_exchange` has another way. Devices of a tensor group have the same tokens; they hold
different experts, or parts of them:

    tokens [B/e, T, D] --all-gather over expert--> [B, T, D] --own experts--> part of the sum [B, T, D]
                        --reduce-scatter over expert--> [B/e, T, D], and summed over the tensor axes

No token is dropped, because every device has room for all tokens of its group. The price is that memory, and
the traffic: each token (D numbers) goes to every device of the group, not only to the owners of its experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.ring import ONE_DEVICE, ContextSplit
from jaxrl.mesh.rules import REPLICABLE, Rules, axes_of, partition_spec, per_device
from jaxrl.mesh.token_exchange import RaggedMove, exchange_pays, exchange_tokens, gather_tokens

# (q_BTQH, k_BTKH, v_BTKH, ids, *rest) -> out_BTQH. `ids` is a pytree of [B, T], such as segment ids. `rest`
# are pytrees of scalars that are equal on every device, and of [Q], such as the attention kind.
Attention = Callable[..., jax.Array]


def attention_parallel(
    attention: Attention, mesh: Mesh, rules: Rules, split: ContextSplit = ONE_DEVICE
) -> Attention:
    """Runs `attention` on every device for its own rows and heads.

    Args:
      attention: attention on one device, over whole sequences. With a ring it is also called with arguments
        `first_N`, `size` and `shift`, which `models.xla_attention.Ring` explains.
      mesh, rules: mesh, and sharding rules of rows, heads and parts of sequences.
      split: what the devices that share a row do. With a ring the rows are in the order of `ring.spread`.
    """
    if mesh.size == 1:
        return attention
    sizes = dict(mesh.shape)
    head_axes = axes_of("heads", rules, sizes)
    context_axes = axes_of("length", rules, sizes)
    parts = math.prod(sizes[axis] for axis in context_axes)
    assert split.size == parts, f"{split} does not share rows over {parts} devices"
    swap = functools.partial(
        jax.lax.all_to_all,
        axis_name=context_axes,
        tiled=True,
        axis_index_groups=split.groups(),
    )

    def spec(axes, array):
        return partition_spec(axes, array.shape, rules, sizes, "attention")

    def on_mesh(q_BTQH, k_BTKH, v_BTKH, ids, *rest):
        group = q_BTQH.shape[2] // k_BTKH.shape[2]

        def shard(q, k, v, ids, *rest):
            k, v = (_kv_heads_of(q, x, group, head_axes) for x in (k, v))
            if split.exchanged > 1:
                # Each part of the heads gets at least one key-value head.
                copies = max(1, split.exchanged // k.shape[2])
                k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
                q, k, v = (swap(x, split_axis=2, concat_axis=1) for x in (q, k, v))
                # The heads that are here now attend to all tokens of the exchange, and need the ids of all.
                ids = jax.lax.all_gather(
                    ids, context_axes, axis=1, tiled=True, axis_index_groups=split.groups()
                )
                # Sinks and the like have an entry for each head: those of the heads that are here now.
                first = jax.lax.axis_index(context_axes) % split.exchanged * q.shape[2]
                rest = jax.tree.map(
                    lambda x: jax.lax.dynamic_slice_in_dim(x, first, q.shape[2]) if x.ndim else x,
                    rest,
                )
            around = {}
            if split.ring > 1:
                around = _around(split, context_axes, q.shape[1])
            out = attention(q, k, v, ids, *rest, **around)
            return swap(out, split_axis=1, concat_axis=2) if split.exchanged > 1 else out

        queries = ("batch", "length", "heads", "head_dim")
        keys = ("batch", "length", "kv_heads", "head_dim")
        of_queries, of_keys = spec(queries, q_BTQH), spec(keys, k_BTKH)
        of_ids = jax.tree.map(functools.partial(spec, queries[:2]), ids)
        of_rest = jax.tree.map(lambda x: spec(("heads",), x) if jnp.ndim(x) else P(), rest)
        in_specs = (of_queries, of_keys, of_keys, of_ids, *of_rest)
        attend = per_device(shard, mesh, in_specs=in_specs, out_specs=of_queries)
        return attend(q_BTQH, k_BTKH, v_BTKH, ids, *rest)

    return on_mesh


def delta_parallel(
    recur: Callable[..., Any], mesh: Mesh, rules: Rules, split: ContextSplit
) -> Callable[..., Any]:
    """Runs the recurrence of delta layers on every device for its own rows and key heads, over whole rows.

    Args:
      recur: recurrence on one device, a `models.delta_net.Recur` over packed rows.
      mesh, rules: mesh, and sharding rules of rows, heads and parts of sequences.
      split: the order of tokens, which attention needs. All devices that share a row exchange heads here.
    """
    sizes = dict(mesh.shape)
    axes = axes_of("length", rules, sizes)
    if not axes:
        return recur
    swap = functools.partial(jax.lax.all_to_all, axis_name=axes, tiled=True)

    def spec(names, array):
        names = (*names, *[None] * (array.ndim - len(names)))
        return partition_spec(names, array.shape, rules, sizes, "delta layer")

    def shard(inputs, segment_ids):
        def of_heads(x):
            return split.in_order(swap(x, split_axis=2, concat_axis=1))

        def of_all(x):
            return split.in_order(jax.lax.all_gather(x, axes, axis=1, tiled=True))

        def own_taps(x):
            size = x.shape[0] // split.size
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size)

        whole = inputs._replace(
            qkv=tuple(map(of_heads, inputs.qkv)),
            taps=tuple(map(own_taps, inputs.taps)),
            log_decay=of_heads(inputs.log_decay),
            step=of_heads(inputs.step),
            live=of_all(inputs.live),
        )
        out, _ = recur(whole, None, of_all(segment_ids))
        return swap(split.in_order(out, back=True), split_axis=1, concat_axis=2)

    def on_mesh(inputs, _, segment_ids_BT):
        of_tokens = functools.partial(spec, ("batch", "length", "heads"))
        of_ids = spec(("batch", "length"), segment_ids_BT)
        in_specs = inputs._replace(
            qkv=tuple(map(of_tokens, inputs.qkv)),
            taps=tuple(spec(("heads",), x) for x in inputs.taps),
            log_decay=of_tokens(inputs.log_decay),
            step=of_tokens(inputs.step),
            live=of_ids,
        )
        out_specs = of_tokens(inputs.qkv[2])
        run = per_device(shard, mesh, in_specs=(in_specs, of_ids), out_specs=out_specs)
        return run(inputs, segment_ids_BT), None

    return on_mesh


def _around(split: ContextSplit, axes: tuple[str, ...], tokens: int) -> dict[str, Any]:
    """The arguments of attention in a ring; `tokens` is the length of a part."""
    part = jax.lax.axis_index(axes) // split.exchanged
    chunks = split.chunks(tokens * split.ring)
    first = (part, 2 * split.ring - 1 - part)[:chunks]
    return {
        "first_N": jnp.stack(first) * (tokens // chunks),
        "size": split.ring,
        "shift": functools.partial(jax.lax.ppermute, axis_name=axes, perm=split.next_part()),
    }


def _kv_heads_of(q: jax.Array, x: jax.Array, group: int, head_axes: tuple[str, ...]) -> jax.Array:
    """Selects the key-value heads that this device's query heads use.

    Example: 8 query heads, 2 key-value heads, tensor_gen = 4. Each device has 2 query heads and holds both
    key-value heads; devices 0 and 1 use the first, devices 2 and 3 the second.
    """
    num_queries, num_held = q.shape[2], x.shape[2]
    num_used = max(1, num_queries // group)
    # A device holds more than it uses if there are fewer key-value heads than tensor shards, so that they are
    # replicated.
    if num_used == num_held:
        return x
    first_query = jax.lax.axis_index(head_axes) * num_queries
    # The first held head is a multiple of `num_held`, so the remainder is the position among held heads.
    first = (first_query // group) % num_held
    return jax.lax.dynamic_slice_in_dim(x, first, num_used, axis=2)


# Begin of the name of the jitted function that computes the experts of a device; the number of devices that
# share them follows. The planner finds its operations by this name.
HELD_EXPERTS = "held_experts_of_"

# (x_BTD, expert_BTA, share_BTA, weights, logical axes of the weights, activation) -> out_BTD
Layer = Callable[[jax.Array, jax.Array, jax.Array, Any, Any, str], jax.Array]


def expert_parallel(
    layer: Callable[..., jax.Array],
    mesh: Mesh,
    rules: Rules,
    *,
    in_order: bool = False,
    move: RaggedMove | None = None,
) -> Layer:
    """Runs `layer` on every device for the experts that it holds.

    Args:
      layer: a function that sums over given experts; its `first_expert` is the number of the first of them,
        and `expert_shards` the number of devices that share all of them.
      mesh, rules: mesh, and sharding rules of experts, tokens and the width of an expert.
      in_order: add up a token's A experts on its own device, in float32 and in their order, so that the
        result is the same on every mesh that leaves experts whole. A times as much is sent back.
      move: `jax.lax.ragged_all_to_all`, by which tokens go to the devices of their experts alone where that
        pays; None gathers them.
    """
    assert not (in_order and move), "an exchange sums before it returns"
    if mesh.size == 1 and not in_order:
        return layer
    sizes = dict(mesh.shape)
    token_axes = axes_of("experts", {"experts": REPLICABLE["experts"]}, sizes)
    tensor_axes = axes_of("mlp", rules, sizes)

    def spec(axes, array):
        # "embed" is None: the compiler gathers weights that are split over their width (fsdp) before this.
        whole = tuple(None if axis == "embed" else axis for axis in axes)
        return partition_spec(whole, array.shape, rules, sizes, "experts")

    def shard(activation, expert_axes, num_experts, x, expert, share, weights):
        own_share, share = share, None if in_order else share
        group, per_token = math.prod(sizes[a] for a in token_axes), expert.shape[-1]
        if move and group > 1 and exchange_pays(group, num_experts, per_token):
            (x, expert, share), back = exchange_tokens(
                *(x, expert, own_share), num_experts=num_experts, axis=token_axes[0], move=move
            )
        else:
            (x, expert, share), back = gather_tokens([x, expert, share], token_axes)
        num_held = weights["gate"]["weight"].shape[0]
        first = jax.lax.axis_index(expert_axes) * num_held if expert_axes else 0
        inner_axes = tuple(a for a in tensor_axes if a not in expert_axes)
        if inner_axes and "bias" in weights["down"]:
            # The parts of an expert are summed; one of them adds the bias.
            is_first = jax.lax.axis_index(inner_axes) == 0
            bias = weights["down"]["bias"] * is_first.astype(x.dtype)
            weights = {**weights, "down": {**weights["down"], "bias": bias}}
        shards = math.prod(sizes[a] for a in expert_axes)

        def held_experts(x, expert, share, weights, first):
            return layer(
                *(x, expert, share, weights),
                activation=activation,
                first_expert=first,
                expert_shards=shards,
            )

        held_experts.__name__ = f"{HELD_EXPERTS}{shards}"
        out = jax.jit(held_experts)(x, expert, share, weights, first)
        out = back(out)
        # Devices of a tensor group hold other experts, or other parts of them.
        out = jax.lax.psum(out, tensor_axes) if tensor_axes else out
        if not in_order:
            return out
        # All devices but one had zeros for a pair, so that the sums so far are exact.
        parts = out.astype(jnp.float32) * own_share[..., None]
        total = functools.reduce(jnp.add, [parts[:, :, i] for i in range(parts.shape[2])])
        return total.astype(x.dtype)

    def on_mesh(x_BTD, expert_BTA, share_BTA, weights, axes, activation="silu"):
        tokens = ("batch", "length", None)
        token_specs = [spec(tokens, a) for a in (x_BTD, expert_BTA, share_BTA)]
        weight_specs = jax.tree.map(spec, axes, weights, is_leaf=lambda v: isinstance(v, tuple))
        expert_axes = weight_specs["gate"]["weight"][0] or ()
        if isinstance(expert_axes, str):
            expert_axes = (expert_axes,)
        return per_device(
            functools.partial(shard, activation, expert_axes, weights["gate"]["weight"].shape[0]),
            mesh,
            in_specs=(*token_specs, weight_specs),
            out_specs=token_specs[0],
        )(x_BTD, expert_BTA, share_BTA, weights)

    return on_mesh
