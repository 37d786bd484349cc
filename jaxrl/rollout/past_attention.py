"""Attention of new tokens to the cached past, by a kernel on a mesh, and gathering of the past from pages.

B sequences   Q query heads   K kv heads   H head size   L layers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.rules import Rules, axes_of, partition_spec, per_device
from jaxrl.models.cache import page_moves
from jaxrl.models.cache.cached_attention import PartialAttention
from jaxrl.models.cache.interface import Cache
from jaxrl.models.cache.kv_cache import KVCache, cache_axes
from jaxrl.models.cache.page_moves import PagedSlots
from jaxrl.models.cache.paged_cache import Gather
from jaxrl.models.cache.stacked_cache import PastAttention


def past_attention(
    kernel: Callable[..., PartialAttention], mesh: Mesh, rules: Rules
) -> PastAttention:
    """Runs `kernel` on every device for its own slots and heads; XLA cannot partition a kernel by itself.

    Args:
      kernel: one of `models.kernels.paged_attention.KERNELS`.
      mesh, rules: the mesh, and the sharding of slots and heads on it. Layers must not be sharded: inside a
        pipeline, pass the kernel the caches of one pipeline stage.
    """
    if mesh.size == 1:
        return kernel
    sizes = dict(mesh.shape)
    head_axes = axes_of("heads", rules, sizes)

    def on_mesh(q_BQH, cache, layer, length_B):
        group = q_BQH.shape[1] // _num_kv_heads(cache)

        def shard(q_BQH, cache, layer, length_B):
            num_queries, num_held = q_BQH.shape[1], _num_kv_heads(cache)
            num_used = max(1, num_queries // group)
            first = 0
            if num_used < num_held:
                # With fewer kv heads than tensor shards, kv heads are replicated. The first kv head of a
                # device is a multiple of the number that it holds.
                first = jax.lax.axis_index(head_axes) * num_queries // group % num_held
            return kernel(q_BQH, cache, layer, length_B, first_head=first, num_heads=num_used)

        def spec(axes, array):
            return partition_spec(axes, array.shape, rules, sizes, "attention to the past")

        of_queries: Any = spec(("batch", "heads", "head_dim"), q_BQH)
        of_cache = jax.tree.map(lambda leaf, axes: spec(axes, leaf), cache, _axes(cache))
        of_heads: Any = P(*of_queries[:2])
        return per_device(
            shard,
            mesh,
            in_specs=(of_queries, of_cache, P(), spec(("batch",), length_B)),
            out_specs=PartialAttention(of_heads, of_heads, mixed=of_queries),
        )(q_BQH, cache, layer, length_B)

    return on_mesh


def _num_kv_heads(cache: KVCache | PagedSlots) -> int:
    pool = cache.pool if isinstance(cache, PagedSlots) else cache
    return pool.v.shape[2]


def _axes(cache: KVCache | PagedSlots) -> Any:
    """The logical axes of a cache of all layers, which are not split."""
    if isinstance(cache, PagedSlots):
        table: Any = ("batch", None)
        shared: Any = ("batch",)
        return PagedSlots(_axes(cache.pool), table, shared)
    return jax.tree.map(lambda _, axes: (None, *axes[1:]), cache, cache_axes(cache))


def page_gathering(mesh: Mesh, rules: Rules) -> Gather:
    """Gathers pages on every device for its own slots, because a table numbers the pages of its device."""
    sizes = dict(mesh.shape)

    def gather(slots: PagedSlots, axes: PagedSlots) -> Cache:
        def shard(pool, table_nP):
            return page_moves.gathered(pool, axes.pool, table_nP)

        if mesh.size == 1:
            return shard(slots.pool, slots.table)

        def specs(tree, names):
            return jax.tree.map(
                lambda leaf, of_leaf: partition_spec(of_leaf, leaf.shape, rules, sizes, "pages"),
                tree,
                names,
            )

        whole = jax.eval_shape(shard, slots.pool, slots.table)
        return per_device(
            shard,
            mesh,
            in_specs=(specs(slots.pool, axes.pool), specs(slots.table, axes.table)),
            out_specs=specs(whole, axes.pool),
        )(slots.pool, slots.table)

    return gather
