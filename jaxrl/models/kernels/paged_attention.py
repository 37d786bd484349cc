"""Attention of one new token to a cache, the buffer of a dispatch and itself, as one kernel for TPUs.

    B sequences   Q query heads   K kv heads   H head size   G = Q / K   L layers   C capacity   W tokens of
    the buffer   R rows of a grid step   S tokens of a block   U tokens of a copy

One softmax over all three. A grid step has some rows and all their heads; it copies the pages of a row to the
vector memory block by block, the next block, or the first of the next row, while one is used:

    row r, block j  -->  copies of block j + 1 start  -->  those of block j have arrived  -->  scores, values

Only pages below the length of a row, and not before its window, are copied. The kernel gets the stacks of all
layers, because a kernel cannot be fused with a slice: that would copy the layer. Queries, keys, values and
results have the rows next to last, [Q, B, H], as matmuls write and read them: no copy is needed for that.

The kernel does not write the new token: copies to a 16-bit array have at least 8 rows of it, so it would
write as many tokens. XLA writes it from the matmul of the values, and the rotation of the keys.

Masked entries get weight 0, so values must be finite: zeros, or entries of an earlier row. Not covered: int8;
latents; layers whose caches differ in size; head sizes that are no multiple of 128. GPUs:
`decode_attention.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.models.attention_kind import FULL, AttentionKind, picked
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots
from jaxrl.models.kernels.decode_attention import decode_attention

# Most tokens of a block; most bytes of the two blocks that are in the vector memory, and of the rows there.
_BLOCK, _BLOCK_BYTES, _ROW_BYTES = 512, 4 * 2**20, 6 * 2**20
# Rows of a tile, and most rows of a grid step: its first block is waited for.
_TILE, _MOST_ROWS = 8, 32
_LANES, _MASKED = 128, -1e30


def paged_attention_tpu(
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
) -> jax.Array:
    """Attention of one new token per sequence, [B, Q, H].

    The arguments are those of `decode_attention`, but the buffer is that of all layers, [L, B, K, W, H], and
    is not written. H is a multiple of 128, and no number has 8 bits.
    """
    B, Q, H = q_BQH.shape
    pool: Any = cache
    tables: tuple[jax.Array, ...] = ()
    if isinstance(cache, PagedSlots):
        pool, tables = cache.pool, (cache.table,)
    held, W = buffer.v.shape[2:4]
    K, of_buffer = num_heads or held, layer
    if held > K:
        own = lambda axis, x: jax.lax.dynamic_slice_in_dim(x, first_head, K, axis)  # noqa: E731
        k_BKH, v_BKH = own(1, k_BKH), own(1, v_BKH)
        one = lambda x: own(2, jax.lax.dynamic_index_in_dim(x, layer, 0))  # noqa: E731
        buffer, of_buffer = jax.tree.map(one, buffer), 0
    number = lambda x: jnp.asarray(x, jnp.int32).reshape(1)  # noqa: E731
    numbers = [*map(number, (layer, of_buffer, first_head)), length_B, number(used_B[0]), *tables]
    if kind.reach is not None:
        numbers.append(number(kind.reach))
    # A copy has the largest part of a page that divides a block.
    values = K * H * pool.v.dtype.itemsize
    most = min(_BLOCK, 2 ** (_BLOCK_BYTES // (4 * values)).bit_length() // 2)
    U, pages = math.gcd(pool.capacity, most), tables[0].shape[1] if tables else 1
    S = min(most, pool.capacity * pages // U * U)
    wide = q_BQH.dtype.itemsize
    row_bytes = (Q + 2 * K) * H * (4 + 2 * wide) + 2 * Q * H * wide
    row_bytes += 4 * K * W * H * buffer.v.dtype.itemsize
    # Two cores of a chip share the grid steps.
    R = min(_MOST_ROWS, _ROW_BYTES // row_bytes, -(-B // 2)) // _TILE * _TILE
    R = min(max(R, _TILE), B)
    rows = lambda N: pl.BlockSpec((N, R, H), lambda i, *_: (0, i, 0))  # noqa: E731
    newest = pl.BlockSpec((None, R, K, W, H), lambda i, _, layer, *__: (layer[0], i, 0, 0, 0))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    specs = [rows(Q), rows(K), rows(K), newest, newest, in_memory, in_memory]
    given = [x.astype(q_BQH.dtype).swapaxes(0, 1) for x in (q_BQH, k_BKH, v_BKH)]
    given += [buffer.k, buffer.v, pool.k, pool.v]
    if kind.sinks is not None:
        specs.append(pl.BlockSpec((Q, _LANES), lambda i, *_: (0, 0)))
        sinks_Q1 = kind.sinks.astype(jnp.float32)[:, None]
        given.append(jnp.broadcast_to(sinks_Q1, (Q, _LANES)))
    optional = [bool(tables), kind.reach is not None, kind.sinks is not None]
    block, lanes = pltpu.VMEM((2, K, S, H), pool.v.dtype), min(H, _LANES)
    new_NL = [pltpu.VMEM(((Q + 2 * K) * R, lanes), jnp.float32)] * (H // lanes)
    out_QBH = pl.pallas_call(
        functools.partial(_kernel, B, U, kind.softcap, optional),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            in_specs=specs,
            out_specs=rows(Q),
            grid=(pl.cdiv(B, R),),
            scratch_shapes=(block, block, pltpu.SemaphoreType.DMA((2,)), *new_NL),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=(_BLOCK_BYTES + max(_ROW_BYTES, R * row_bytes)) * 3 // 2,
        ),
        out_shape=jax.ShapeDtypeStruct((Q, B, H), q_BQH.dtype),
        interpret=interpret,
        name="paged_attention",
    )(*numbers, *given)
    return out_QBH.swapaxes(0, 1)


def _attended(
    carry: Any, q_GH: jax.Array, kv_SH: Any, seen_1S: jax.Array, softcap: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(Largest scores, sums of weights, mixed values) with `S` more tokens."""
    contract = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    k_SH, v_SH = (x.astype(q_GH.dtype) for x in kv_SH)
    scores_GS = contract(q_GH, k_SH, (((1,), (1,)), ((), ()))) * q_GH.shape[1] ** -0.5
    scores_GS = jnp.where(seen_1S, AttentionKind(softcap=softcap).capped(scores_GS), _MASKED)
    top_G1, total_G1, mixed_GH = carry
    new_G1 = jnp.maximum(top_G1, scores_GS.max(-1, keepdims=True))
    keep_G1, weight_GS = jnp.exp(top_G1 - new_G1), jnp.exp(scores_GS - new_G1)
    total_G1 = total_G1 * keep_G1 + weight_GS.sum(-1, keepdims=True)
    more_GH = contract(weight_GS.astype(q_GH.dtype), v_SH, (((1,), (0,)), ((), ())))
    return new_G1, total_G1, mixed_GH * keep_G1 + more_GH


def _kernel(B: int, U: int, softcap: float, optional: list[bool], *refs: Any) -> None:
    left = iter(refs)
    layer, _, first_head, length_B, used_1 = (next(left) for _ in range(5))
    table_BT, reach = (next(left) if given else None for given in optional[:2])
    q_QRH, k_KRH, v_KRH, k_RKWH, v_RKWH, k_pool, v_pool = (next(left) for _ in range(7))
    sinks_QL = next(left) if optional[2] else None
    out_QRH, k_block, v_block, arrived, *news_NL = left
    (Q, R, H), (_, K, S, _), W = q_QRH.shape, k_block.shape, k_RKWH.shape[2]
    G, page, dtype, used = Q // K, k_pool.shape[3], q_QRH.dtype, used_1[0]
    start = pl.program_id(0) * R
    rows = jnp.minimum(R, B - start)

    def span(r: jax.Array) -> tuple[jax.Array, ...]:
        """Length of a row, first position that its token sees, and the range of its blocks."""
        length = length_B[start + jnp.minimum(r, rows - 1)]
        first = jnp.int32(0) if reach is None else jnp.maximum(length + used + 1 - reach[0], 0)
        # `//` would ask which chip it is for.
        return length, first, jax.lax.div(first, S), jax.lax.div(length + S - 1, S)

    def start_from(r: jax.Array, slot: jax.Array) -> None:
        """Starts the copies of the first block of the next row, from `r` on, that has some."""
        has_none = lambda r: (r < rows) & (span(r)[2] >= span(r)[3])  # noqa: E731
        r = jax.lax.while_loop(has_none, lambda r: r + 1, r)
        pl.when(r < rows)(lambda: copies("start", r, span(r)[2], slot))

    def copies(do: str, r: jax.Array, j: jax.Array, slot: jax.Array) -> None:
        length, first = span(r)[:2]
        for u in range(0, S, U):
            place = j * S + u

            @pl.when((place < length) & (place + U > first))
            def _(u=u, place=place):
                entry, within = start + r, jax.lax.rem(place, page)
                entry = entry if table_BT is None else table_BT[entry, jax.lax.div(place, page)]
                at = layer[0], entry, pl.ds(first_head[0], K), pl.ds(pl.multiple_of(within, U), U)
                for pool, block in ((k_pool, k_block), (v_pool, v_block)):
                    to = block.at[slot, :, pl.ds(u, U)]
                    getattr(pltpu.make_async_copy(pool.at[at], to, arrived.at[slot]), do)()

    # In 32 bits, and 128 lanes at a time, rows of one sequence can be read and written one by one.
    parts = [(new_NL, pl.ds(p * _LANES, min(H, _LANES))) for p, new_NL in enumerate(news_NL)]
    heads = [(ref, n) for ref in (q_QRH, k_KRH, v_KRH) for n in range(len(ref))]
    for n, (ref, head) in enumerate(heads):
        for new_NL, lanes in parts:
            new_NL[n * R : (n + 1) * R] = ref[head, :, lanes].astype(jnp.float32)
    # What no copy writes has weight 0, and must be finite.
    v_block[...] = jnp.zeros_like(v_block)
    place_W1, place_1W, place_1S = (
        jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        for axis, shape in ((0, (W, 1)), (1, (1, W)), (1, (1, S)))
    )
    new = lambda at: jnp.concatenate([new_NL[at] for new_NL in news_NL], axis=-1)  # noqa: E731

    def of_row(r: jax.Array, slot: jax.Array) -> jax.Array:
        length, first, begin, end = span(r)
        own_G = [pl.ds(h * G * R + r, G, stride=R) for h in range(K)]
        q_GH, carries = [new(own).astype(dtype) for own in own_G], []
        for h in range(K):
            kv = []
            for n, ref in ((Q + h, k_RKWH), (Q + K + h, v_RKWH)):
                # The new token is one more of the buffer.
                old_WH = ref[r, h].astype(jnp.float32)
                kv.append(jnp.where(place_W1 == used, new(pl.ds(n * R + r, 1)), old_WH))
            none = jnp.full((G, 1), _MASKED), jnp.zeros((G, 1)), jnp.zeros((G, H))
            if sinks_QL is not None:
                none = sinks_QL[h * G : (h + 1) * G, :1], jnp.ones((G, 1)), none[2]
            seen_1W = (place_1W <= used) & (place_1W >= first - length)
            carries.append(_attended(none, q_GH[h], kv, seen_1W, softcap))

        def of_block(j: jax.Array, carry: Any) -> Any:
            slot, carries = carry
            pl.when(j + 1 < end)(lambda: copies("start", r, j + 1, 1 - slot))
            pl.when(j + 1 == end)(lambda: start_from(r + 1, 1 - slot))
            copies("wait", r, j, slot)
            seen_1S = (j * S + place_1S < length) & (j * S + place_1S >= first)
            for h, old in enumerate(carries):
                kv = k_block[slot, h], v_block[slot, h]
                carries[h] = _attended(old, q_GH[h], kv, seen_1S, softcap)
            return 1 - slot, carries

        slot, carries = jax.lax.fori_loop(begin, end, of_block, (slot, carries))
        for own, (_, total_G1, mixed_GH) in zip(own_G, carries, strict=True):
            for p, new_NL in enumerate(news_NL):
                new_NL[own] = mixed_GH[:, p * _LANES : (p + 1) * _LANES] / total_G1
        return slot

    start_from(jnp.int32(0), jnp.int32(0))
    jax.lax.fori_loop(0, rows, of_row, jnp.int32(0))
    for n in range(Q):
        for new_NL, lanes in parts:
            out_QRH[n, :, lanes] = new_NL[n * R : (n + 1) * R].astype(dtype)


KERNELS = {"paged_tpu": paged_attention_tpu, "paged_gpu": decode_attention}
IMPLEMENTATIONS = ("xla", *KERNELS)


def pick_decode_implementation(
    platform: str | None,
    dtype: Any,
    kv_dtype: Any,
    head_dim: int,
    requested: str = "auto",
    *,
    alike: bool = True,
) -> str:
    """The implementation of attention to a long cache: "xla" (`cached_attention`) or a key of `KERNELS`.

    Args:
      platform: platform of the devices, as in `jax.Device.platform`; None if only shapes are computed.
      dtype: type of queries.
      kv_dtype: type of the cache.
      head_dim: H.
      requested: one of `IMPLEMENTATIONS`, or "auto": the platform's kernel if it can run, else "xla".
      alike: `ModelConfig.decodes_by_kernel`.

    Raises:
      UserError: `requested` is unknown or cannot run there.
    """
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    power_of_two = head_dim & (head_dim - 1) == 0
    runs = {
        "paged_tpu": alike
        and platform == "tpu"
        and kv_dtype == jnp.bfloat16
        and head_dim % 128 == 0,
        "paged_gpu": alike
        and platform in ("gpu", "cuda")
        and dtype in (jnp.bfloat16, jnp.float16)
        and kv_dtype in (dtype, jnp.int8)
        and head_dim >= 16
        and power_of_two,
        "xla": True,
    }
    rules = {
        "paged_tpu": "TPUs, a bfloat16 cache, head sizes that are a multiple of 128, and layers with keys "
        "and values of one size",
        "paged_gpu": "GPUs, activations in 16 bits, a cache of the same type or int8, head sizes that are a "
        "power of two from 16 on, and layers with keys and values of one size",
    }
    what = f"{dtype.name} activations, a {kv_dtype.name} cache and head size {head_dim}"
    return picked("decode attention", requested, platform, runs, rules, f"for {what}")
