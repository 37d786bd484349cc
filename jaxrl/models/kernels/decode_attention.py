"""Attention of one new token to a cache, the buffer of a dispatch and itself, as one kernel for GPUs.

    B sequences   Q query heads   K kv heads   H head size   G = Q / K   L layers   C capacity   W tokens of
    the buffer   S parts of a row

One softmax over all three. Where rows times heads fill the device a row is one part; else each part reads its
share of the blocks that the row has, and the parts are merged. A contiguous cache is one page a row. The
kernel gets the stack of all layers, because a kernel cannot be fused with a slice: that would copy the layer.

Pallas on Triton (docs/decoding.md has the reasons). Entries of a block beyond the length of a row get weight
0, so they must be finite. Not covered: latents; layers whose caches differ in size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots, cache_of, put_token

# Most tokens that are read at a time, and values of their keys. Iterations over which a read is spread: two
# blocks are on their way while one is used.
_BLOCK, _BLOCK_VALUES, _STAGES = 64, 8192, 3
# Rows of the smallest matmul.
_SMALLEST = 16
# Most parts of a row, and the number of parts of all rows that fills a device: four for each of an H200's 132
# multiprocessors, which hold three at a time.
_MOST_PARTS, _PARTS = 16, 528
_MASKED, _LOG2E = -1e30, math.log2(math.e)


def decode_attention(
    q_BQH: jax.Array,
    cache: KVCache | PagedSlots,
    layer: jax.Array | int,
    length_B: jax.Array,
    k_BKH: jax.Array,
    v_BKH: jax.Array,
    buffer: KVCache,
    used_B: jax.Array,
    kind: AttentionKind = FULL,
    *,
    first_head: jax.Array | int = 0,
    num_heads: int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, KVCache]:
    """Attention of one new token per sequence, [B, Q, H], and the buffer with the token.

    The compiler cannot partition it: on a mesh call it under `shard_map`.

    Args:
      q_BQH: rotated queries.
      cache: cache of all layers, keys and values [L, B, K, C, H], or pages of C tokens, in the type of the
        queries or int8; H is a power of two, at least 16.
      layer: number of the layer.
      length_B: int32, number of valid cached tokens; blocks of 64 beyond them are not read.
      k_BKH, v_BKH: rotated key, and value, of the new token.
      buffer: tokens of this layer after those of the cache, [B, K, W, H].
      used_B: int32, number of valid ones, the same in all rows and below W.
      kind: window, score cap and sinks of the layer.
      first_head, num_heads: range of kv heads that these queries use; num_heads 0 for all heads of the cache.
      interpret: emulate the kernel in XLA, on any device; for tests.
    """
    pool: Any = cache
    table_BT, pages = None, 1
    if isinstance(cache, PagedSlots):
        pool, table_BT, pages = cache.pool, cache.table, cache.table.shape[1]
    held, after = k_BKH.shape[1], buffer
    K = num_heads or held
    # Else the kernel lacks heads that it does not use, or numbers in 8 bits.
    writes = held == K and buffer.k_scale is None
    if not writes:
        new = cache_of(k_BKH[:, None], v_BKH[:, None], buffer.k.dtype, "head_dim")
        after = put_token(buffer, new, used_B[0])
    if held > K:
        own = lambda x: jax.lax.dynamic_slice_in_dim(x, first_head, K, 1)  # noqa: E731
        k_BKH, v_BKH, buffer = jax.tree.map(own, (k_BKH, v_BKH, buffer))
    if 2**31 < pool.k.size <= 2**32 // pool.k.dtype.itemsize:
        # Triton uses 64-bit offsets only for arrays above 4 GiB, but signed 32-bit offsets overflow at 2^31
        # int8 entries. In between pass a single layer.
        pool = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0), pool)
        layer = 0
    number = lambda x: None if x is None else jnp.asarray(x, jnp.int32).reshape(1)  # noqa: E731
    numbers = map(number, (layer, first_head, kind.reach))
    # One array, so that XLA computes biases and rotations of all three in one kernel.
    new_BNH = jnp.concatenate([x.astype(q_BQH.dtype) for x in (q_BQH, k_BKH, v_BKH)], axis=1)
    given = buffer, new_BNH, pool, table_BT, length_B, used_B, kind.sinks, *numbers
    blocks = -(-pool.capacity * pages // _BLOCK)
    S = max(1, min(_MOST_PARTS, _PARTS // (len(q_BQH) * K), blocks))
    parts = _call(given, kind.softcap, S, writes, interpret)
    if writes:
        k, v, *parts = parts
        after = dataclasses.replace(buffer, k=k, v=v)
    if S == 1:
        return parts[0], after
    # Each part of a row has a softmax of its own: relative to the largest maximum they add up. Written out,
    # and not as sums over an axis, XLA fuses it into fewer kernels.
    mixed_SBQH, top_SBQ, total_SBQ = parts
    top_BQ = functools.reduce(jnp.maximum, [top_SBQ[i] for i in range(S)])
    keep = [jnp.exp2(top_SBQ[i] - top_BQ)[..., None] for i in range(S)]
    mixed_BQH: Any = sum(mixed_SBQH[i] * keep[i] for i in range(S))
    total_BQ1 = sum(total_SBQ[i][..., None] * keep[i] for i in range(S))
    return (mixed_BQH / total_BQ1).astype(q_BQH.dtype), after


def _call(given: tuple[Any, ...], softcap: float, S: int, writes: bool, interpret: bool) -> Any:
    """The kernel, with one grid step per row, kv head and part of the row.

    Returns keys and values of the buffer if it writes them; then values, or of several parts the mixed ones,
    the largest scores as exponents of 2, and the sums.
    """
    buffer, new_BNH, *_ = given
    (B, N, H), K = new_BNH.shape, buffer.v.shape[1]
    results = [jax.ShapeDtypeStruct((B, N - 2 * K, H), new_BNH.dtype)]
    if S > 1:
        ends = ((H,), (), ())
        results = [jax.ShapeDtypeStruct((S, B, N - 2 * K, *end), jnp.float32) for end in ends]
    into = [buffer.k, buffer.v] if writes else []
    return pl.pallas_call(
        functools.partial(_kernel, softcap, len(into)),
        grid=(B, K, S),
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in into), *results],
        # The first of what is given are the buffer's keys and values.
        input_output_aliases={i: i for i in range(len(into))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=_STAGES),
        interpret=interpret,
        name="decode_attention",
    )(*given)


def _kernel(softcap: float, num_written: int, *refs: Any) -> None:
    buffer, new_BNH, pool, table_BT, length_B, used_B, sinks_Q, *numbers = refs[:10]
    (layer, first_head, reach), outs = numbers, refs[10:]
    row, head, part, S = (*(pl.program_id(i) for i in range(3)), pl.num_programs(2))
    (_, N, H), K = new_BNH.shape, buffer.v.shape[1]
    G = N // K - 2
    # Queries beyond those of the head repeat its last: they compute and write the same.
    own_G = head * G + jnp.minimum(jnp.arange(max(_SMALLEST, pl.next_power_of_2(G))), G - 1)
    q_GH = new_BNH[row, own_G, :]
    length, used = length_B[row], used_B[row]
    # The first position that the new token sees.
    first = 0 if reach is None else jnp.maximum(length + used + 1 - reach[0], 0)

    def scored(product: jax.Array) -> jax.Array:
        """Scores as exponents of 2."""
        scores = product * H**-0.5
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        return scores * _LOG2E

    def add(carry: Any, cache: Any, at: tuple[Any, ...], seen_S: jax.Array) -> Any:
        """Attention to `S` more tokens of a cache."""
        mixed_GH, top_G, total_G = carry
        k_SH, v_SH = cache.k[*at, :], cache.v[*at, :]
        product_GS = plgpu.dot(q_GH, k_SH.astype(q_GH.dtype).T)
        if cache.k_scale is not None:
            product_GS *= cache.k_scale[at][None]
        scores_GS = jnp.where(seen_S[None], scored(product_GS), _MASKED)
        new_G = jnp.maximum(top_G, scores_GS.max(-1))
        keep_G, weight_GS = jnp.exp2(top_G - new_G), jnp.exp2(scores_GS - new_G[:, None])
        total_G = total_G * keep_G + weight_GS.sum(-1)
        if cache.v_scale is not None:
            weight_GS *= cache.v_scale[at][None]
        more_GH = plgpu.dot(weight_GS.astype(q_GH.dtype), v_SH.astype(q_GH.dtype))
        return mixed_GH * keep_G[:, None] + more_GH, new_G, total_G

    # The first part begins with the token itself and the sinks, and goes on with the buffer.
    k_H, v_H = (new_BNH[row, (G + i) * K + head, :] for i in (0, 1))
    is_first = part == 0
    own = (q_GH.astype(jnp.float32) * k_H.astype(jnp.float32)[None]).sum(-1)
    top_G = jnp.where(is_first, scored(own), _MASKED)
    total_G = jnp.where(is_first, jnp.ones_like(top_G), 0.0)
    carry = (total_G[:, None] * v_H.astype(jnp.float32)[None], top_G, total_G)
    if sinks_Q is not None:
        sinks_G = sinks_Q[own_G] * _LOG2E
        top_G = jnp.where(is_first, jnp.maximum(carry[1], sinks_G), _MASKED)
        keep_G = jnp.exp2(carry[1] - top_G)
        sunk_G = jnp.where(is_first, jnp.exp2(sinks_G - top_G), 0.0)
        carry = (carry[0] * keep_G[:, None], top_G, carry[2] * keep_G + sunk_G)
    W = buffer.v.shape[2]
    most = min(_BLOCK, max(_SMALLEST, _BLOCK_VALUES // H))
    size = min(most, max(_SMALLEST, pl.next_power_of_2(W)))

    def of_buffer(j: jax.Array, carry: Any) -> Any:
        place = j * size + jnp.arange(size)
        seen = (place < used) & (place >= first - length)
        return add(carry, buffer, (row, head, jnp.minimum(place, W - 1)), seen)

    carry = jax.lax.fori_loop(0, jnp.where(is_first, pl.cdiv(used, size), 0), of_buffer, carry)
    for ref, new_H in zip(outs[:num_written], (k_H, v_H), strict=False):

        @pl.when(is_first)
        def _(ref=ref, new_H=new_H):
            ref[row, head, used, :] = new_H

    page = pool.capacity
    block = math.gcd(page, most)
    blocks = pl.cdiv(length, block)
    share = pl.cdiv(blocks - first // block, S)
    start = first // block + part * share

    def page_of(j: jax.Array) -> jax.Array:
        if table_BT is None:
            return row
        j = jnp.clip(j, 0, jnp.maximum(blocks - 1, 0))
        return table_BT[row, j * block // page]

    def of_pages(j: jax.Array, carry: Any) -> Any:
        # The table is read an iteration ahead: reads of a block that wait for it could not be on their way
        # while others are used.
        number, *carry = carry
        place = j * block + jnp.arange(block)
        at = (layer[0], number, first_head[0] + head, pl.ds(j * block % page, block))
        seen = (place < length) & (place >= first)
        return page_of(j + 1), *add(carry, pool, at, seen)

    _, *results = jax.lax.fori_loop(
        start, jnp.minimum(start + share, blocks), of_pages, (page_of(start), *carry)
    )
    outs = outs[num_written:]
    if len(outs) == 1:
        mixed_GH, _, total_G = results
        outs[0][row, own_G, :] = (mixed_GH / total_G[:, None]).astype(q_GH.dtype)
        return
    for ref, value in zip(outs, results, strict=True):
        at = (part, row, own_G)
        ref[(*at, slice(None)) if value.ndim == 2 else at] = value
