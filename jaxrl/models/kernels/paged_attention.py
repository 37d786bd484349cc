"""Attention of one new token to a long cache, by the paged attention kernels that ship with JAX.

    B sequences   Q query heads   K kv heads   H head size   C capacity   L layers   G = Q / K
    N = B * K pairs of a sequence and a kv head   P parts of a page

A cache is a pool [L, pages, K, page, H] with a table of the pages of each row, or contiguous rows
[L, B, K, C, H]: then row b is the only page of its table, of C tokens. Without a copy both can be viewed as
L * pages * K * P pages of the kernel, which are 1 / P of a page of the pool, and the number of one is

    part p of page g, head k and layer l   ->   ((l * pages + g) * K + k) * P + p

So each pair is a sequence of the kernel with one kv head and G query heads, and the table of the kernel is
computed on the fly. The kernel reads the pages up to the length of the row. It gets the stack of all layers,
because a kernel cannot be fused with a slice: slicing out one layer would copy it.

The kernels are called directly, as they are in jax 0.10.2. JAX's `paged_attention` functions do not return
the maximum and the sum of the softmax, although their kernels compute them. They are needed to merge the
result with attention to the newest tokens.

Covered: bfloat16 on TPUs; 16 bits and int8 on GPUs. Not covered: int8 on TPUs, where the kernel needs a scale
per entry instead of per token; float32 on TPUs, which the kernel rounds. Entries of a block beyond the length
of a row get weight 0, so they must be finite: zeros, or entries of an earlier row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.gpu import paged_attention as gpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as tpu

from jaxrl.models.attention_kind import picked
from jaxrl.models.cache.cached_attention import PartialAttention
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots

# Rows of a float32 tile in a TPU's vector memory, and rows of the smallest matmul on a GPU.
_TPU_QUERIES, _GPU_QUERIES = 8, 16
# Tokens that a kernel processes at a time; also the largest page.
_TPU_BLOCK, _GPU_BLOCK = 512, 64
# Largest number of parts of a row that a GPU processes in parallel, and the number of parts of all rows that
# keeps it busy. Each part writes a result in float32: 256 rows of 2 heads are read at 1,446 GB/s in 4 parts
# and at 1,255 in 16 (H200, benchmarks/results/2026-11-26-h200.md).
_GPU_SPLITS, _GPU_PARTS = 16, 2048


class _Pages(NamedTuple):
    """A cache and the queries of one layer, in the form of the kernels.

    Attributes:
      q_NGH: float32, scaled queries; G is padded with zeros.
      k, v: [number of pages, tokens of a page, H].
      scales: [number of pages, tokens of a page], of k and v; None if they are not int8.
      length_N: int32, length of each pair.
      table_NP: int32, page numbers of each pair; padding repeats the last page.
      shape: (B, K, G), unpadded.
    """

    q_NGH: jax.Array
    k: jax.Array
    v: jax.Array
    scales: tuple[jax.Array | None, jax.Array | None]
    length_N: jax.Array
    table_NP: jax.Array
    shape: tuple[int, int, int]

    def partial(self, top_NG: jax.Array, total_NG: jax.Array, mixed_NGH: jax.Array):
        """The kernel's results, rearranged by row and query head."""
        B, K, G = self.shape
        return PartialAttention(
            top_NG[:, :G].reshape(B, K * G),
            total_NG[:, :G].reshape(B, K * G),
            mixed_NGH[:, :G].reshape(B, K * G, -1),
        )


def _pages(
    q_BQH: jax.Array,
    cache: PagedSlots,
    layer: jax.Array | int,
    length_B: jax.Array,
    first_head: jax.Array | int,
    num_heads: int,
    *,
    largest_page: int,
    multiple: int,
    pad_queries_to: int,
) -> _Pages:
    B, Q, H = q_BQH.shape
    pool, table_BT = cache.pool, cache.table
    _, num_pages, held, tokens, _ = pool.v.shape
    K, page = num_heads or held, math.gcd(tokens, largest_page)
    G, P = Q // K, tokens // page
    # The kernels do not scale scores. Scale queries in float32: at H = 128 the scale is not a power of two.
    q_NGH = (q_BQH.astype(jnp.float32) * H**-0.5).reshape(B * K, G, H)
    q_NGH = jnp.pad(q_NGH, ((0, 0), (0, -G % pad_queries_to), (0, 0)))
    head_K1 = first_head + jnp.arange(K)[:, None]
    pair_BKT = (layer * num_pages + table_BT[:, None]) * held + head_K1[None]
    part_11P = jnp.arange(P)[None, None]
    table_NP = (pair_BKT[..., None] * P + part_11P[None]).reshape(B * K, -1)
    # The kernel may read whole blocks, so padding has to name pages that exist.
    table_NP = jnp.pad(table_NP, ((0, 0), (0, -table_NP.shape[1] % multiple)), mode="edge")
    k, v = (x.reshape(-1, page, H) for x in (pool.k, pool.v))
    k_scale, v_scale = (
        None if x is None else x.reshape(-1, page) for x in (pool.k_scale, pool.v_scale)
    )
    return _Pages(
        q_NGH,
        k,
        v,
        (k_scale, v_scale),
        jnp.repeat(length_B, K),
        table_NP.astype(jnp.int32),
        (B, K, G),
    )


def _paged(cache: KVCache | PagedSlots, rows: int) -> PagedSlots:
    """The cache as pages; row b of a contiguous cache is the only page of its table."""
    if isinstance(cache, PagedSlots):
        return cache
    return PagedSlots(cache, jnp.arange(rows)[:, None], jnp.zeros(rows, jnp.int32))


def paged_attention_tpu(
    q_BQH: jax.Array,
    cache: KVCache | PagedSlots,
    layer: jax.Array | int,
    length_B: jax.Array,
    *,
    first_head: jax.Array | int = 0,
    num_heads: int = 0,
    interpret: bool = False,
) -> PartialAttention:
    """Attention of one new token per sequence to its cached past, on a TPU.

    The compiler cannot partition it: on a mesh call it under `shard_map`.

    Args:
      q_BQH: rotated queries.
      cache: cache of all layers, keys and values [L, B, K, C, H] in bfloat16, or pages of C tokens; H is a
        multiple of 128, C of 16.
      layer: number of the layer.
      length_B: int32, number of valid cached tokens; blocks of 512 beyond them are not read.
      first_head, num_heads: range of kv heads that these queries use; num_heads 0 for all heads of the cache.
      interpret: emulate the kernel in XLA, on any device; for tests.
    """
    cache = _paged(cache, len(q_BQH))
    # The kernel's pages are the largest that divide both those of the pool and its blocks.
    page = math.gcd(cache.pool.capacity, _TPU_BLOCK)
    block = min(_TPU_BLOCK, cache.pool.capacity * cache.table.shape[1]) // page
    pages = _pages(
        q_BQH,
        cache,
        layer,
        length_B,
        first_head,
        num_heads,
        largest_page=_TPU_BLOCK,
        multiple=block,
        pad_queries_to=_TPU_QUERIES,
    )
    call = _tpu_call(pages, page, block, interpret)
    first_buffer, is_first = jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.int32)
    # The kernel multiplies float32 queries by bfloat16 keys.
    with jax.numpy_dtype_promotion("standard"):
        out_NGH, top_NG1, total_NG1 = call(
            pages.length_N,
            pages.table_NP.reshape(-1),
            first_buffer,
            is_first,
            pages.q_NGH,
            pages.k[None],
            None,
            pages.v[None],
            None,
        )
    # The kernel has divided by the sum; `PartialAttention` wants the undivided one, which can be merged.
    return pages.partial(top_NG1[..., 0], total_NG1[..., 0], out_NGH * total_NG1)


def _tpu_call(pages: _Pages, page: int, block: int, interpret: bool) -> Callable[..., Any]:
    """The kernel, with one pair per grid step and two buffers of `block` pages each for keys and values."""
    N, G, H = pages.q_NGH.shape
    kernel = functools.partial(
        tpu.paged_flash_attention_kernel_inline_seq_dim,
        batch_size=N,
        pages_per_compute_block=block,
        pages_per_sequence=pages.table_NP.shape[1],
        mask_value=tpu.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        megacore_mode=None,
    )
    own = lambda *size: pl.BlockSpec((None, G, *size), lambda core, n, head, *_: (n, 0, 0))  # noqa: E731
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    two_blocks = pltpu.VMEM((2, block, page, H), pages.v.dtype)
    two_copies = pltpu.SemaphoreType.DMA((2,))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            in_specs=[own(H), in_memory, None, in_memory, None],
            out_specs=[own(H), own(1), own(1)],
            grid=(1, N, 1),
            scratch_shapes=(two_blocks, None, two_blocks, None, two_copies, two_copies),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        out_shape=[jax.ShapeDtypeStruct((N, G, size), jnp.float32) for size in (H, 1, 1)],
        interpret=interpret,
        name="paged_attention",
    )


def paged_attention_gpu(
    q_BQH: jax.Array,
    cache: KVCache | PagedSlots,
    layer: jax.Array | int,
    length_B: jax.Array,
    *,
    first_head: jax.Array | int = 0,
    num_heads: int = 0,
    interpret: bool = False,
) -> PartialAttention:
    """`paged_attention_tpu` for a GPU.

    Args:
      q_BQH, layer, length_B, first_head, num_heads, interpret: as for `paged_attention_tpu`; blocks have 64
        tokens.
      cache: cache of the type of the queries or int8; H is a power of two, at least 16.
    """
    cache = _paged(cache, len(q_BQH))
    keys = cache.pool.k
    if 2**31 < keys.size <= 2**32 // keys.dtype.itemsize:
        # Triton uses 64-bit offsets only for arrays above 4 GiB, but signed 32-bit offsets overflow at 2^31
        # int8 entries. In between pass a single layer.
        one = lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0)  # noqa: E731
        cache, layer = dataclasses.replace(cache, pool=jax.tree.map(one, cache.pool)), 0
    capacity = cache.pool.capacity * cache.table.shape[1]
    block = _GPU_BLOCK // math.gcd(cache.pool.capacity, _GPU_BLOCK)
    pairs = len(q_BQH) * (num_heads or cache.pool.v.shape[2])
    splits = min(_GPU_SPLITS, -(-capacity // _GPU_BLOCK), max(1, _GPU_PARTS // pairs))
    pages = _pages(
        q_BQH,
        cache,
        layer,
        length_B,
        first_head,
        num_heads,
        largest_page=_GPU_BLOCK,
        multiple=splits * block,
        pad_queries_to=_GPU_QUERIES,
    )
    table = pages.table_NP.reshape(len(pages.table_NP), splits, -1)
    k_scale, v_scale = pages.scales
    # The matmul needs one type: the kernel converts int8 keys to the type of the queries.
    q_NGH = pages.q_NGH.astype(q_BQH.dtype if k_scale is not None else keys.dtype)
    mixed_SNGH, total_SNG, top_SNG = _gpu_call(pages, table, block, interpret)(
        q_NGH, pages.k, k_scale, pages.v, v_scale, table, pages.length_N[:, None]
    )
    # Each part of a row has a softmax of its own: relative to the largest maximum they add up.
    top_NG = top_SNG.max(0)
    keep_SNG = jnp.exp(top_SNG - top_NG[None])
    mixed_NGH = (mixed_SNGH * keep_SNG[..., None]).sum(0)
    return pages.partial(top_NG, (total_SNG * keep_SNG).sum(0), mixed_NGH)


def _gpu_call(
    pages: _Pages, table_NSP: jax.Array, block: int, interpret: bool
) -> Callable[..., Any]:
    """The kernel, with one grid step per pair, tile of queries and part of the row's pages."""
    N, G, H = pages.q_NGH.shape
    _, splits, pages_per_split = table_NSP.shape
    whole = lambda x: None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)  # noqa: E731
    return pl.pallas_call(
        functools.partial(
            gpu.paged_attention_kernel,
            num_heads=G,
            pages_per_compute_block=block,
            mask_value=gpu.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
        ),
        grid=(N, G // _GPU_QUERIES, splits),
        in_specs=[
            pl.BlockSpec((None, _GPU_QUERIES, H), lambda n, i, s: (n, i, 0)),
            whole(pages.k),
            whole(pages.scales[0]),
            whole(pages.v),
            whole(pages.scales[1]),
            pl.BlockSpec((None, None, pages_per_split), lambda n, i, s: (n, s, 0)),
            pl.BlockSpec((None, 1), lambda n, i, s: (n, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, _GPU_QUERIES, H), lambda n, i, s: (s, n, i, 0)),
            pl.BlockSpec((None, None, _GPU_QUERIES), lambda n, i, s: (s, n, i)),
            pl.BlockSpec((None, None, _GPU_QUERIES), lambda n, i, s: (s, n, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, N, G, *size), jnp.float32) for size in ((H,), (), ())
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )


KERNELS = {"paged_tpu": paged_attention_tpu, "paged_gpu": paged_attention_gpu}
IMPLEMENTATIONS = ("xla", *KERNELS)


def pick_decode_implementation(
    platform: str | None,
    dtype: Any,
    kv_dtype: Any,
    head_dim: int,
    requested: str = "auto",
    *,
    plain: bool = True,
) -> str:
    """The implementation of attention to a long cache: "xla" (`cached_attention`) or a key of `KERNELS`.

    Args:
      platform: platform of the devices, as in `jax.Device.platform`; None if only shapes are computed.
      dtype: type of queries.
      kv_dtype: type of the cache.
      head_dim: H.
      requested: one of `IMPLEMENTATIONS`, or "auto": the platform's kernel if it can run, else "xla".
      plain: True if no layer has a sliding window, capped scores or latents.

    Raises:
      UserError: `requested` is unknown or cannot run there.
    """
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    power_of_two = head_dim & (head_dim - 1) == 0
    runs = {
        "paged_tpu": plain
        and platform == "tpu"
        and kv_dtype == jnp.bfloat16
        and head_dim % 128 == 0,
        "paged_gpu": plain
        and platform in ("gpu", "cuda")
        and dtype in (jnp.bfloat16, jnp.float16)
        and kv_dtype in (dtype, jnp.int8)
        and head_dim >= 16
        and power_of_two,
        "xla": True,
    }
    rules = {
        "paged_tpu": "TPUs, a bfloat16 cache and head sizes that are a multiple of 128",
        "paged_gpu": "GPUs, activations in 16 bits, a cache of the same type or int8, and head sizes "
        "that are a power of two from 16 on",
    }
    without = (
        ""
        if plain
        else " with sliding windows, capped scores or latents, which the kernel does not have"
    )
    what = f"{dtype.name} activations, a {kv_dtype.name} cache and head size {head_dim}{without}"
    return picked("decode attention", requested, platform, runs, rules, f"for {what}")
