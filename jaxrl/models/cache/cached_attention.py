"""Keys and values kept from earlier tokens, and attention to them.

    B sequences   T new tokens   C capacity of a cache   L layers   Q query heads   K kv heads   H head size
    G = Q / K

Covered: one new token or a run of new tokens per sequence against one or more caches of any capacity, in
float32, bfloat16 or int8 with a scale per token and head. What a cache holds beyond a sequence's length is
never seen. Plain XLA, on any device; `paged_attention.py` has kernels for the long part of one token's
attention on accelerators. Not covered: paged caches, sliding windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Large and finite: a row with every key masked gives a uniform softmax, not NaN.
_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Rotated keys and values, of one layer or, with a leading L, of all.

    On CPU keys keep length last, which makes q·k a plain matrix product, 5 to 7 times faster than the other
    way; kernels want their head size last, as that of values.

    Attributes:
      k: [.., B, K, H, C] or, with `keys_last` "head_dim", [.., B, K, C, H].
      v: [.., B, K, C, H].
      k_scale, v_scale: float32 [.., B, K, C], what int8 entries are multiplied by; None in other types.
      keys_last: the last dimension of k, "length" or "head_dim".
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    keys_last: str = dataclasses.field(default="length", metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.v.shape[-2]


class PartialAttention(NamedTuple):
    """Attention to some of the keys, to be merged with attention to the others.

    Attributes:
      top: float32 [B, Q], the largest score; very negative where there is no key.
      total: float32 [B, Q], the sum of exp(score - top); 0 where there is no key.
      mixed: float32 [B, Q, H], the sum of values by these weights.
    """

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


def cache_axes(cache: KVCache) -> KVCache:
    """Logical axes of a cache of all layers, in its structure."""
    heads = ("layers", "batch", "kv_heads")
    scale: Any = None if cache.k_scale is None else (*heads, "length")
    v: Any = (*heads, "length", "head_dim")
    k: Any = v if cache.keys_last == "head_dim" else (*heads, "head_dim", "length")
    return KVCache(k, v, scale, scale, cache.keys_last)


def empty_cache(
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: Any,
    keys_last: str = "length",
) -> KVCache:
    """Zeros for all layers; `dtype` is float32, bfloat16 or int8."""
    L, B, K, H, C = num_layers, batch, num_kv_heads, head_dim, capacity
    scales: Any = [None, None]
    if jnp.dtype(dtype) == jnp.int8:
        scales = [jnp.zeros((L, B, K, C)) for _ in range(2)]
    k_shape = (L, B, K, C, H) if keys_last == "head_dim" else (L, B, K, H, C)
    return KVCache(
        jnp.zeros(k_shape, dtype), jnp.zeros((L, B, K, C, H), dtype), *scales, keys_last=keys_last
    )


def cache_of(k_TKH: jax.Array, v_TKH: jax.Array, dtype: Any, keys_last: str = "length") -> KVCache:
    """A cache that holds exactly the given keys and values, [.., T, K, H]."""
    k_KTH, v_KTH = (x.swapaxes(-3, -2) for x in (k_TKH, v_TKH))
    scales: Any = [None, None]
    if jnp.dtype(dtype) == jnp.int8:
        (k_KTH, scales[0]), (v_KTH, scales[1]) = _quantized(k_KTH), _quantized(v_KTH)
    k = k_KTH if keys_last == "head_dim" else k_KTH.swapaxes(-1, -2)
    return KVCache(k.astype(dtype), v_KTH.astype(dtype), *scales, keys_last=keys_last)


def put_token(cache: KVCache, new: KVCache, place: jax.Array) -> KVCache:
    """`cache` with a `new` one of one token written at the same place in all rows: no scatter."""

    def put(old, new, axes):
        # Counted from the end, as a layer's own cache has no "layers".
        dim = old.ndim - len(axes) + axes.index("length")
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, dim)

    return jax.tree.map(put, cache, new, cache_axes(cache))


def _quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[.., H] as int8 and a scale [..]: the largest entry becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / 127
    steps = x / jnp.where(scale > 0, scale, 1)[..., None]
    return jnp.round(steps).astype(jnp.int8), scale


def _scores(q_BKGTH: jax.Array, cache: KVCache) -> jax.Array:
    """q · k of every cached token, [B, K, G, T, C] float32, unscaled."""
    k = cache.k.astype(q_BKGTH.dtype)
    product = "bkgth,bksh->bkgts" if cache.keys_last == "head_dim" else "bkgth,bkhs->bkgts"
    scores = jnp.einsum(product, q_BKGTH, k, preferred_element_type=jnp.float32)
    return scores if cache.k_scale is None else scores * cache.k_scale[:, :, None, None]


def _mixed(weight_BKGTS: jax.Array, cache: KVCache, dtype: Any) -> jax.Array:
    """Sum of values by weight, [B, K, G, T, H] float32."""
    if cache.v_scale is not None:
        weight_BKGTS = weight_BKGTS * cache.v_scale[:, :, None, None]
    return jnp.einsum(
        "bkgts,bksh->bkgth",
        weight_BKGTS.astype(dtype),
        cache.v.astype(dtype),
        preferred_element_type=jnp.float32,
    )


def cached_attention(
    q_BQH: jax.Array,
    k_BKH: jax.Array,
    v_BKH: jax.Array,
    caches: Sequence[tuple[KVCache, jax.Array]],
    others: PartialAttention | None = None,
) -> jax.Array:
    """Attention of one new token per sequence to its cached past and to itself.

    The new token's own key and value are arguments, not yet in a cache, so caches are only read here and
    written once per step for all layers together.

    Args:
      q_BQH, k_BKH, v_BKH: the new token's rotated query and key, and its value.
      caches: one layer's caches with int32 [B], how many tokens of each are real. Their order is free: a
        key carries its position.
      others: attention to cached tokens that are not in `caches`.

    Returns:
      [B, Q, H] in the type of `q_BQH`; softmax is taken in float32.
    """
    B, Q, H = q_BQH.shape
    K = k_BKH.shape[1]
    q = q_BQH.reshape(B, K, Q // K, 1, H)
    own = jnp.einsum("bkgth,bkh->bkgt", q, k_BKH, preferred_element_type=jnp.float32) * H**-0.5
    scores, top = [], own
    if others is not None:
        others = PartialAttention(*(x.reshape(B, K, Q // K, 1, *x.shape[2:]) for x in others))
        top = jnp.maximum(top, others.top)
    for cache, length_B in caches:
        real_BS = jnp.arange(cache.capacity)[None] < length_B[:, None]
        past = jnp.where(real_BS[:, None, None, None], _scores(q, cache) * H**-0.5, _MASKED)
        scores.append(past)
        top = jnp.maximum(top, past.max(-1))
    total = jnp.exp(own - top)
    mixed = total[..., None] * v_BKH[:, :, None, None].astype(jnp.float32)
    for past, (cache, _) in zip(scores, caches, strict=True):
        weight = jnp.exp(past - top[..., None])
        total = total + weight.sum(-1)
        mixed = mixed + _mixed(weight, cache, q.dtype)
    if others is not None:
        weight = jnp.exp(others.top - top)
        total = total + weight * others.total
        mixed = mixed + weight[..., None] * others.mixed
    return (mixed / total[..., None]).reshape(B, Q, H).astype(q_BQH.dtype)


def extending_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    cache: KVCache,
    length_B: jax.Array,
    *,
    block_tokens: int = 512,
) -> jax.Array:
    """Attention of T new tokens per sequence to its cached past and, causally, to each other.

    The past is gone through block by block as far as the longest sequence reaches, so its cost follows the
    real lengths and no score outlives its block.

    Args:
      q_BTQH, k_BTKH, v_BTKH: the new tokens', as of `cached_attention`.
      cache: one layer's.
      length_B: int32, cached tokens that are real.
      block_tokens: of the past, at a time.

    Returns:
      [B, T, Q, H] in the type of `q_BTQH`.
    """
    B, T, Q, H = q_BTQH.shape
    K, C = k_BTKH.shape[2], cache.capacity
    block = min(block_tokens, C)
    q = q_BTQH.reshape(B, T, K, Q // K, H).transpose(0, 2, 3, 1, 4)
    new = cache_of(k_BTKH, v_BTKH, k_BTKH.dtype)
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    own = jnp.where(causal_TT[None, None, None], _scores(q, new) * H**-0.5, _MASKED)
    top = own.max(-1)
    weight = jnp.exp(own - top[..., None])
    start = (top, weight.sum(-1), _mixed(weight, new, q.dtype))

    def attend_to_block(i, carry):
        top, total, mixed = carry
        first = jnp.minimum(i * block, C - block)
        part = jax.tree.map(
            lambda x, axes: jax.lax.dynamic_slice_in_dim(x, first, block, axes.index("length") - 1),
            cache,
            cache_axes(cache),
        )
        position_S = first + jnp.arange(block)
        # The last block may reach back into the one before.
        real_BS = (position_S >= i * block)[None] & (position_S[None] < length_B[:, None])
        past = jnp.where(real_BS[:, None, None, None], _scores(q, part) * H**-0.5, _MASKED)
        new_top = jnp.maximum(top, past.max(-1))
        weight, keep = jnp.exp(past - new_top[..., None]), jnp.exp(top - new_top)
        total = total * keep + weight.sum(-1)
        return new_top, total, mixed * keep[..., None] + _mixed(weight, part, q.dtype)

    num_blocks = -(-length_B.max() // block)
    _, total, mixed = jax.lax.fori_loop(0, num_blocks, attend_to_block, start)
    out = (mixed / total[..., None]).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, Q, H).astype(q_BTQH.dtype)
