"""Chooses the kind of KV cache from the devices, the mesh and the settings of an engine."""

from __future__ import annotations

import logging
from typing import Any

from jax.sharding import Mesh

from jaxrl.mesh.devices import platform_of
from jaxrl.mesh.rules import GENERATE_RULES, shards_of
from jaxrl.models.cache.interface import CacheKind
from jaxrl.models.cache.kv_cache import CacheShape
from jaxrl.models.cache.paged_cache import PagedCache
from jaxrl.models.cache.per_layer_cache import PerLayerCache
from jaxrl.models.cache.stacked_cache import StackedCache
from jaxrl.models.kernels.paged_attention import KERNELS, pick_decode_implementation
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.past_attention import page_gathering, past_attention

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

    Raises:
      UserError: `decode_attention` is unknown or cannot run on these devices.
    """
    platform = platform_of(mesh)
    shape = CacheShape(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        kv_dtype,
        keys_last="length" if platform in (None, "cpu") else "head_dim",
    )
    one_stage = shards_of("layers", GENERATE_RULES, mesh) == 1
    implementation = pick_decode_implementation(
        platform,
        dtype,
        kv_dtype,
        model.head_dim,
        decode_attention,
        plain=not any(model.sliding_layers) and not model.attention_softcap,
    )
    # Inside a pipeline stage there are only some slots of some layers, but all pages.
    by_table = pages is not None and one_stage
    if implementation != "xla" and (by_table or pages is None):
        kernel = past_attention(KERNELS[implementation], mesh, GENERATE_RULES)
        # In a pipeline each layer gets its own cache. Otherwise a kernel indexes the cache by layer number.
        contiguous = StackedCache(shape, kernel, by_number=one_stage)
    elif unroll >= model.num_layers and one_stage:
        by_table, contiguous = False, PerLayerCache(shape)
    else:
        by_table, contiguous = False, StackedCache(shape)
    if pages is None:
        return contiguous
    if platform == "cpu":
        logger.warning(
            "cache 'paged': on CPU pages are copied for every dispatch, and few samples decode about .4 "
            "times as fast as with 'contiguous'; set it to contiguous unless its memory is short"
        )
    gather = None if by_table else page_gathering(mesh, GENERATE_RULES)
    return PagedCache(contiguous, pages.page_tokens, pages.num_pages * pages.shards, gather)
