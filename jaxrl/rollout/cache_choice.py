"""Chooses the kind of KV cache from the devices, the mesh and the settings of an engine.

Kernels for attention to the past, and the gathering of pages, run on each device for its own slots and heads.

    B sequences   Q query heads   K kv heads   H head size   L layers
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.mesh import hosts
from jaxrl.mesh.devices import device_of, platform_of
from jaxrl.mesh.rules import GENERATE_RULES, Rules, axes_of, partition_spec, per_device, shards_of
from jaxrl.models.cache.cache_kind import Cache, CacheKind, PastAttention
from jaxrl.models.cache.kv_cache import CacheShape, KVCache, PagedSlots, cache_axes
from jaxrl.models.cache.paged_cache import Gather, PagedCache, gathered_pages
from jaxrl.models.kernels.paged_attention import KERNELS, pick_decode_implementation
from jaxrl.models.kernels.proof import decoding_trial, kinds_of, stands
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.engine_sizes import PageSizes

logger = logging.getLogger(__name__)


def choose_cache(
    model: ModelConfig,
    mesh: Mesh,
    *,
    dtype: Any,
    kv_dtype: Any,
    unroll: int = 1,
    decode_attention: str = "auto",
    pages: PageSizes | None = None,
    keeps_routes: bool = False,
) -> CacheKind:
    """Chooses the cache for a model on a mesh.

    Args:
      model: model whose keys and values are cached.
      mesh: devices, laid out for generation.
      dtype: data type of the queries.
      kv_dtype: data type of the cache.
      unroll: layers per iteration of the layer scan. If it covers all layers, every layer has its own cache.
      decode_attention: "auto" or one of `models.kernels.paged_attention.IMPLEMENTATIONS`.
      pages: pages of a paged cache; None for a contiguous one.
      keeps_routes: keep the experts of every token, too (`EngineConfig.keeps_routes`).

    Raises:
      UserError: `decode_attention` is unknown or cannot run on these devices.
    """
    platform = platform_of(mesh)
    shape = CacheShape(
        model.num_periods,
        model.cached_heads,
        model.cached_dim,
        kv_dtype,
        # On CPU the length is last: q·k is then a plain matmul, 5 to 7 times faster. Kernels need the head
        # size last, as for values.
        keys_last="length" if platform in (None, "cpu") else "head_dim",
        periodic=model if model.period > 1 else None,
        tail_dtype=dtype,
        first_layers=model.first_dense_layers,
        latent=model.kv_latent > 0,
        routes=(model.mixture_layers, model.experts_per_token) if keeps_routes else None,
    )
    one_stage = shards_of("layers", GENERATE_RULES, mesh) == 1
    implementation = pick_decode_implementation(
        platform,
        dtype,
        kv_dtype,
        model.cached_dim,
        decode_attention,
        alike=model.decodes_by_kernel,
    )
    if implementation != "xla":
        parts = shards_of("heads", GENERATE_RULES, mesh)
        heads = [max(1, number // parts) for number in (model.num_heads, model.cached_heads)]
        types = jnp.dtype(dtype).name, jnp.dtype(kv_dtype).name
        page = pages.page_tokens if pages is not None and one_stage else 0
        sizes = (heads[0], heads[1], model.cached_dim, *types)
        trial = decoding_trial(implementation, sizes, page, kinds_of(model))
        if not stands(trial, device_of(mesh), hosts.gather):
            implementation = "xla"
    # Inside a pipeline stage there are only some slots of some layers, but all pages.
    by_table = pages is not None and one_stage
    if implementation != "xla" and (by_table or pages is None):
        # In a pipeline each layer gets its own cache. Otherwise a kernel indexes the cache by layer number.
        by_number = one_stage and model.has_one_cache
        writes = implementation == "paged_gpu"
        kernel = past_attention(KERNELS[implementation], mesh, GENERATE_RULES, writes=writes)
        contiguous = CacheKind(shape, kernel=kernel, by_number=by_number, writes=writes)
    else:
        unrolled = unroll >= model.num_layers and one_stage
        # Plain XLA cannot follow a page table; the pages are gathered below.
        by_table, contiguous = False, CacheKind(shape, unrolled)
    if pages is None:
        return contiguous
    gather = None if by_table else page_gathering(mesh, GENERATE_RULES)
    return PagedCache(
        **{field.name: getattr(contiguous, field.name) for field in dataclasses.fields(contiguous)},
        page_tokens=pages.page_tokens,
        num_pages=pages.num_pages * pages.shards,
        gather=gather,
    )


def warn_of_pages_on_cpu(cache: str, mesh: Mesh, agent: object = None) -> None:
    """Logs a warning if a user has set the cache to "paged" for a CPU. Agents have pages in any case."""
    if cache == "paged" and not agent and platform_of(mesh) == "cpu":
        logger.warning(
            "cache 'paged': on CPU pages are copied for every dispatch, and few samples decode about .4 "
            "times as fast as with 'contiguous'; set it to contiguous unless its memory is short"
        )


def past_attention(
    kernel: Callable[..., Any], mesh: Mesh, rules: Rules, *, writes: bool = False
) -> PastAttention:
    """Runs `kernel` on every device for its own slots and heads; XLA cannot partition a kernel by itself.

    Args:
      kernel: one of `models.kernels.paged_attention.KERNELS`.
      mesh, rules: the mesh, and the sharding of slots and heads on it. Layers must not be sharded: inside a
        pipeline, pass the kernel the caches of one pipeline stage.
      writes: see `CacheKind`.
    """
    if mesh.size == 1:
        return kernel
    head_axes = axes_of("heads", rules, dict(mesh.shape))

    def on_mesh(q_BQH, cache, layer, length_B, *new):
        # Of the whole arrays: inside `shard` a device may hold more kv heads than its queries need.
        group = q_BQH.shape[1] // _num_kv_heads(cache)

        def shard(q_BQH, cache, *rest):
            num_queries, num_held = q_BQH.shape[1], _num_kv_heads(cache)
            num_used = max(1, num_queries // group)
            first = 0
            if num_used < num_held:
                # With fewer kv heads than tensor shards, kv heads are replicated. The first kv head of a
                # device is a multiple of the number that it holds.
                first = jax.lax.axis_index(head_axes) * num_queries // group % num_held
            return kernel(q_BQH, cache, *rest, first_head=first, num_heads=num_used)

        arguments = q_BQH, cache, length_B, *new
        rows, of_new = ("batch",), ("batch", "kv_heads", "head_dim")
        of_kind = jax.tree.map(lambda x: ("heads",) if x.ndim else (), new[-1])
        axes: Any = ("batch", "heads", "head_dim"), _axes(cache), rows
        axes = *axes, of_new, of_new, cache_axes(new[2]), rows, of_kind
        of_queries, of_cache, of_length, *of_rest = _specs(arguments, axes, mesh, rules)
        return per_device(
            shard,
            mesh,
            in_specs=(of_queries, of_cache, P(), of_length, *of_rest),
            out_specs=(of_queries, of_rest[2]) if writes else of_queries,
        )(q_BQH, cache, layer, length_B, *new)

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

    def gather(slots: PagedSlots, axes: PagedSlots) -> Cache:
        def shard(pool, table_nP):
            return gathered_pages(pool, axes.pool, table_nP)

        if mesh.size == 1:
            return shard(slots.pool, slots.table)

        given, names = (slots.pool, slots.table), (axes.pool, axes.table)
        result = _specs(jax.eval_shape(shard, *given), axes.pool, mesh, rules)
        specs = _specs(given, names, mesh, rules)
        return per_device(shard, mesh, in_specs=specs, out_specs=result)(*given)

    return gather


def _specs(tree: Any, axes: Any, mesh: Mesh, rules: Rules) -> Any:
    """Partition specs of arrays with these logical axes."""
    return jax.tree.map(
        lambda leaf, names: partition_spec(names, leaf.shape, rules, dict(mesh.shape), "slots"),
        tree,
        axes,
    )
