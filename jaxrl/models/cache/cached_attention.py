"""Attention of new tokens to a cache of earlier ones, in plain XLA, on any device.

    B sequences   T new tokens   C capacity of a cache   Q query heads   K kv heads   H head size   G = Q / K

Covered: one or several new tokens per sequence against one or more caches of any capacity and type, with full
attention or a sliding window. Cache entries beyond the length of a sequence are never seen.
`kernels/paged_attention.py` has kernels for attention of one token to a long cache on accelerators.

Not covered: caches that drop tokens which no window reaches any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.cache.kv_cache import KVCache, cache_axes, cache_of

# Large and finite: a query with every key masked gives a uniform softmax, not NaN.
_MASKED = -1e30


def _over_total(
    top_BKGT: jax.Array, total_BKGT: jax.Array, mixed_BKGTH: jax.Array, kind: AttentionKind
) -> jax.Array:
    """The mixed values over the sum of weights, to which the sinks are added last: [B, K, G, T, H]."""
    if kind.sinks is not None:
        sinks = kind.sinks.reshape(1, *top_BKGT.shape[1:3], 1)
        # A sink may be the largest score, and its exp must not overflow.
        new_top = jnp.maximum(top_BKGT, sinks)
        keep = jnp.exp(top_BKGT - new_top)
        total_BKGT = total_BKGT * keep + jnp.exp(sinks - new_top)
        mixed_BKGTH = mixed_BKGTH * keep[..., None]
    return mixed_BKGTH / total_BKGT[..., None]


def _scores(q_BKGTH: jax.Array, cache: KVCache) -> jax.Array:
    """q · k of every cached token, [B, K, G, T, C] float32, unscaled."""
    # int8 is exact in bfloat16. Its scale is the same for all of H, so the scores are scaled, which are
    # fewer.
    k = cache.k.astype(q_BKGTH.dtype)
    product = "bkgth,bksh->bkgts" if cache.keys_last == "head_dim" else "bkgth,bkhs->bkgts"
    scores = jnp.einsum(product, q_BKGTH, k, preferred_element_type=jnp.float32)
    return scores if cache.k_scale is None else scores * cache.k_scale[:, :, None, None]


def _mixed(weight_BKGTS: jax.Array, cache: KVCache, dtype: Any) -> jax.Array:
    """The weighted sum of values, [B, K, G, T, H] float32."""
    v, scale, product = cache.v, cache.v_scale, "bkgts,bksh->bkgth"
    if v is None:
        v, scale = cache.k, cache.k_scale
        product = product if cache.keys_last == "head_dim" else "bkgts,bkhs->bkgth"
    if scale is not None:
        # The scale of a token, and the weight of its value.
        weight_BKGTS = weight_BKGTS * scale[:, :, None, None]
    return jnp.einsum(
        product, weight_BKGTS.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32
    )


def cached_attention(
    q_BQH: jax.Array,
    k_BKH: jax.Array,
    v_BKH: jax.Array,
    caches: Sequence[tuple[KVCache, jax.Array]],
    *,
    kind: AttentionKind = FULL,
) -> jax.Array:
    """Attention of one new token per sequence to its cached past and to itself.

    Key and value of the new token are arguments and not yet in a cache: caches are only read here.

    Args:
      q_BQH, k_BKH, v_BKH: rotated query and key, and value, of the new token.
      caches: caches of one layer with int32 [B], their numbers of valid tokens; in the order of the sequence.
      kind: window and score cap of the layer.

    Returns:
      [B, Q, H] in the type of `q_BQH`; softmax is taken in float32.
    """
    B, Q, H = q_BQH.shape
    K = k_BKH.shape[1]
    q = q_BQH.reshape(B, K, Q // K, 1, H)
    own = jnp.einsum("bkgth,bkh->bkgt", q, k_BKH, preferred_element_type=jnp.float32) * H**-0.5
    own = kind.capped(own)
    # The token sees itself, so the maximum is that of a real key and the sum of weights is never 0.
    scores, top = [], own
    for (cache, length_B), first_B in zip(caches, _first_seen(caches, kind.reach), strict=True):
        place_S = jnp.arange(cache.capacity)
        real_BS = place_S[None] < length_B[:, None]
        if first_B is not None:
            real_BS &= place_S[None] >= first_B[:, None]
        # Capped before it is masked: a cap would make a small score of the mask.
        past = kind.capped(_scores(q, cache) * H**-0.5)
        past = jnp.where(real_BS[:, None, None, None], past, _MASKED)
        scores.append(past)
        top = jnp.maximum(top, past.max(-1))
    total = jnp.exp(own - top)
    mixed = total[..., None] * v_BKH[:, :, None, None].astype(jnp.float32)
    for past, (cache, _) in zip(scores, caches, strict=True):
        weight = jnp.exp(past - top[..., None])
        total = total + weight.sum(-1)
        mixed = mixed + _mixed(weight, cache, q.dtype)
    return _over_total(top, total, mixed, kind).reshape(B, Q, H).astype(q_BQH.dtype)


def _first_seen(
    caches: Sequence[tuple[KVCache, jax.Array]], reach: jax.Array | int | None
) -> list[jax.Array | None]:
    """The first position of each cache that the new token sees, int32 [B]; None for full attention."""
    if reach is None:
        return [None] * len(caches)
    # The window counts the new token itself.
    firsts, behind_B = [], 1
    for _, length_B in reversed(caches):
        behind_B = behind_B + length_B
        firsts.append(behind_B - reach)
    return firsts[::-1]


def extending_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    cache: KVCache,
    length_B: jax.Array,
    *,
    kind: AttentionKind = FULL,
    block_tokens: int = 512,
) -> jax.Array:
    """Attention of T new tokens per sequence to its cached past and, causally, to each other.

    The past is processed block by block, from the first block that any window reaches to the end of the
    longest sequence.

    Args:
      q_BTQH, k_BTKH, v_BTKH: rotated queries and keys, and values, of the new tokens.
      cache: cache of one layer.
      length_B: int32, number of valid cached tokens.
      kind: window and score cap of the layer.
      block_tokens: cached tokens processed at a time.

    Returns:
      [B, T, Q, H] in the type of `q_BTQH`.
    """
    B, T, Q, H = q_BTQH.shape
    K, C = k_BTKH.shape[2], cache.capacity
    block = min(block_tokens, C)
    q = q_BTQH.reshape(B, T, K, Q // K, H).transpose(0, 2, 3, 1, 4)
    # In their own type: the tokens of a pass see each other before they are rounded to that of the cache.
    new = cache_of(k_BTKH, v_BTKH, k_BTKH.dtype)
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    reach, offset_T = kind.reach, jnp.arange(T)
    if reach is not None:
        causal_TT &= offset_T[:, None] - offset_T[None] < reach
    # Begins with the new tokens: each sees itself, so no maximum is that of masked keys.
    own = kind.capped(_scores(q, new) * H**-0.5)
    own = jnp.where(causal_TT[None, None, None], own, _MASKED)
    top = own.max(-1)
    weight = jnp.exp(own - top[..., None])
    start = (top, weight.sum(-1), _mixed(weight, new, q.dtype))

    def attend_to_block(i, carry):
        top, total, mixed = carry
        first = jnp.minimum(i * block, C - block)
        part = jax.tree.map(
            lambda x, axes: jax.lax.dynamic_slice_in_dim(x, first, block, axes.index("length")),
            cache,
            cache_axes(cache),
        )
        position_S = first + jnp.arange(block)
        # `first` is clamped to the capacity, so the last block may overlap the one before. Mask the overlap.
        real_BS = (position_S >= i * block)[None] & (position_S[None] < length_B[:, None])
        real_BTS = real_BS[:, None]
        if reach is not None:
            position_BT = length_B[:, None] + offset_T[None]
            real_BTS &= position_BT[..., None] - position_S[None, None] < reach
        past = kind.capped(_scores(q, part) * H**-0.5)
        past = jnp.where(real_BTS[:, None, None], past, _MASKED)
        new_top = jnp.maximum(top, past.max(-1))
        weight, keep = jnp.exp(past - new_top[..., None]), jnp.exp(top - new_top)
        total = total * keep + weight.sum(-1)
        return new_top, total, mixed * keep[..., None] + _mixed(weight, part, q.dtype)

    num_blocks = -(-length_B.max() // block)
    first_block = 0
    if reach is not None:
        # The window of the shortest sequence begins first.
        first_block = jnp.maximum(length_B.min() + 1 - reach, 0) // block
    # The cost depends on actual lengths, and only the scores of one block are in memory.
    top, total, mixed = jax.lax.fori_loop(first_block, num_blocks, attend_to_block, start)
    out = _over_total(top, total, mixed, kind).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, Q, H).astype(q_BTQH.dtype)
