"""Expert parallelism: tokens go to the devices that hold their experts, and the results come back.

Every device of an `expert` group holds consecutive experts and a share of the batch. The tokens of the group
are gathered, each device sums the outputs of its own experts, and the sums return to the owners of the
tokens:

    tokens [B/e, T, D] --all-gather over expert--> [B, T, D] --own experts--> part of the sum [B, T, D]
                        --reduce-scatter over expert--> [B/e, T, D], and summed over the tensor axes

No token is dropped, because every device has room for all tokens of its group. The price is that memory, and
the traffic: each token (D numbers) goes to every device of the group, not only to the owners of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.mesh.manual import per_device
from jaxrl.mesh.rules import Rules, axes_of, partition_spec

# (x_BTD, expert_BTA, share_BTA, weights, logical axes of the weights) -> out_BTD
Layer = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], jax.Array]


def expert_parallel(layer: Callable[..., jax.Array], mesh: Mesh, rules: Rules) -> Layer:
    """Runs `layer` on every device for the experts that it holds.

    Args:
      layer: a function that sums over given experts; its `first_expert` is the number of the first of them.
      mesh, rules: mesh, and sharding rules of experts, tokens and the width of an expert.
    """
    if mesh.size == 1:
        return layer
    sizes = dict(mesh.shape)
    expert_axes = axes_of("experts", rules, sizes)
    inner_axes = axes_of("mlp", rules, sizes)

    def spec(axes, array):
        # "embed" is None: the compiler gathers weights that are split over their width (fsdp) before this.
        whole = tuple(None if axis == "embed" else axis for axis in axes)
        return partition_spec(whole, array.shape, rules, sizes, "experts")

    def shard(x, expert, share, weights):
        for axis in expert_axes:
            x, expert, share = (
                jax.lax.all_gather(a, axis, axis=0, tiled=True) for a in (x, expert, share)
            )
        num_held = weights["gate"]["weight"].shape[0]
        first = jax.lax.axis_index(expert_axes) * num_held if expert_axes else 0
        out = layer(x, expert, share, weights, first_expert=first)
        for axis in reversed(expert_axes):
            out = jax.lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)
        return jax.lax.psum(out, inner_axes) if inner_axes else out

    def on_mesh(x_BTD, expert_BTA, share_BTA, weights, axes):
        tokens = ("batch", "length", None)
        token_specs = [spec(tokens, a) for a in (x_BTD, expert_BTA, share_BTA)]
        weight_specs = jax.tree.map(spec, axes, weights, is_leaf=lambda v: isinstance(v, tuple))
        return per_device(
            shard, mesh, in_specs=(*token_specs, weight_specs), out_specs=token_specs[0]
        )(x_BTD, expert_BTA, share_BTA, weights)

    return on_mesh
