"""Attention of one new token to a long cache on TPUs, by the paged attention kernel that ships with JAX.

    B sequences   Q query heads   K kv heads   H head size   C capacity   L layers   G = Q / K
    N = B * K pairs of a sequence and a kv head   P parts of a page

A cache is a pool [L, pages, K, page, H] with a table of the pages of each row, or contiguous rows
[L, B, K, C, H]: then row b is the only page of its table, of C tokens. Without a copy both can be viewed as
L * pages * K * P pages of the kernel, which are 1 / P of a page of the pool, and the number of one is

    part p of page g, head k and layer l   ->   ((l * pages + g) * K + k) * P + p

So each pair is a sequence of the kernel with one kv head and G query heads, and the table of the kernel is
computed on the fly. The kernel reads the pages up to the length of the row. It gets the stack of all layers,
because a kernel cannot be fused with a slice: slicing out one layer would copy it.

The kernel is called directly, as it is in jax 0.10.2. JAX's `paged_attention` does not return the maximum and
the sum of the softmax, although the kernel computes them. They are needed to merge the result with attention
to the newest tokens.

Covered: bfloat16. Not covered: int8, where the kernel needs a scale per entry instead of per token; float32,
which the kernel rounds. Entries of a block beyond the length of a row get weight 0, so they must be finite:
zeros, or entries of an earlier row. GPUs: `decode_attention.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as tpu

from jaxrl.models.attention_kind import picked
from jaxrl.models.cache.cached_attention import PartialAttention
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots
from jaxrl.models.kernels.decode_attention import decode_attention

# Rows of a float32 tile in the vector memory.
_QUERIES = 8
# Tokens that the kernel processes at a time; also the largest page.
_BLOCK = 512


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
    """Attention of one new token per sequence to its cached past.

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
    B, Q, H = q_BQH.shape
    if not isinstance(cache, PagedSlots):
        cache = PagedSlots(cache, jnp.arange(B)[:, None], jnp.zeros(B, jnp.int32))
    _, num_pages, held, tokens, _ = cache.pool.v.shape
    K = num_heads or held
    # The kernel's pages are the largest that divide both those of the pool and its blocks.
    page, G = math.gcd(tokens, _BLOCK), Q // K
    P, block = tokens // page, min(_BLOCK, tokens * cache.table.shape[1]) // page
    # The kernel does not scale scores. Scale queries in float32: at H = 128 the scale is not a power of two.
    q_NGH = (q_BQH.astype(jnp.float32) * H**-0.5).reshape(B * K, G, H)
    q_NGH = jnp.pad(q_NGH, ((0, 0), (0, -G % _QUERIES), (0, 0)))
    head_K1 = first_head + jnp.arange(K)[:, None]
    pair_BKT = (layer * num_pages + cache.table[:, None]) * held + head_K1[None]
    table_NP = (pair_BKT[..., None] * P + jnp.arange(P)[None, None, None]).reshape(B * K, -1)
    # The kernel may read whole blocks, so padding has to name pages that exist.
    table_NP = jnp.pad(table_NP, ((0, 0), (0, -table_NP.shape[1] % block)), mode="edge")
    table_NP = table_NP.astype(jnp.int32)
    k, v = (x.reshape(-1, page, H) for x in (cache.pool.k, cache.pool.v))
    first_buffer, is_first = jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.int32)
    numbers = jnp.repeat(length_B, K), table_NP.reshape(-1), first_buffer, is_first
    call = _call(q_NGH, v, block, table_NP.shape[1], interpret)
    # The kernel multiplies float32 queries by bfloat16 keys.
    with jax.numpy_dtype_promotion("standard"):
        out_NGH, top_NG1, total_NG1 = call(*numbers, q_NGH, k[None], None, v[None], None)
    # The kernel has divided by the sum; `PartialAttention` wants the undivided one, which can be merged.
    parts = top_NG1[..., 0], total_NG1[..., 0], out_NGH * total_NG1
    return PartialAttention(*(x[:, :G].reshape(B, Q, *x.shape[2:]) for x in parts))


def _call(q_NGH: jax.Array, v: jax.Array, block: int, pages: int, interpret: bool) -> Any:
    """The kernel, with one pair per grid step and two buffers of `block` pages each for keys and values."""
    N, G, H = q_NGH.shape
    kernel = functools.partial(
        tpu.paged_flash_attention_kernel_inline_seq_dim,
        batch_size=N,
        pages_per_compute_block=block,
        pages_per_sequence=pages,
        mask_value=tpu.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        megacore_mode=None,
    )
    own = lambda *size: pl.BlockSpec((None, G, *size), lambda core, n, head, *_: (n, 0, 0))  # noqa: E731
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    two_blocks = pltpu.VMEM((2, block, *v.shape[1:]), v.dtype)
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


KERNELS = {"paged_tpu": paged_attention_tpu, "paged_gpu": decode_attention}
IMPLEMENTATIONS = ("xla", *KERNELS)


def pick_decode_implementation(
    platform: str | None,
    dtype: Any,
    kv_dtype: Any,
    head_dim: int,
    requested: str = "auto",
    *,
    plain: bool = True,
    alike: bool = True,
) -> str:
    """The implementation of attention to a long cache: "xla" (`cached_attention`) or a key of `KERNELS`.

    Args:
      platform: platform of the devices, as in `jax.Device.platform`; None if only shapes are computed.
      dtype: type of queries.
      kv_dtype: type of the cache.
      head_dim: H.
      requested: one of `IMPLEMENTATIONS`, or "auto": the platform's kernel if it can run, else "xla".
      plain: True if no layer has a sliding window, capped scores or latents.
      alike: True if no layer has latents, and the caches of all are alike.

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
        "paged_gpu": (plain or alike)
        and platform in ("gpu", "cuda")
        and dtype in (jnp.bfloat16, jnp.float16)
        and kv_dtype in (dtype, jnp.int8)
        and head_dim >= 16
        and power_of_two,
        "xla": True,
    }
    rules = {
        "paged_tpu": "TPUs, a bfloat16 cache, head sizes that are a multiple of 128, and full attention "
        "without caps",
        "paged_gpu": "GPUs, activations in 16 bits, a cache of the same type or int8, head sizes that are a "
        "power of two from 16 on, and layers with keys and values of one size",
    }
    what = f"{dtype.name} activations, a {kv_dtype.name} cache and head size {head_dim}"
    return picked("decode attention", requested, platform, runs, rules, f"for {what}")
