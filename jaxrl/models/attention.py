"""Attention of a layer, in the two situations a decoder meets.

    B sequences   T new tokens   S cached tokens   Q query heads   K kv heads   H head size   G = Q/K

Covered: causal grouped-query attention within packed segments, and one new token against a cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Large and finite: a row with every key masked gives a uniform softmax, not NaN.
_MASKED = -1e30


def segment_attention(
    q_BTQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention inside each segment of a packed row.

    Args:
      q_BTQH, k_BTKH, v_BTKH: rotated queries and keys, and values; Q is a multiple of K.
      segment_ids_BT: int32; tokens see earlier tokens (and themselves) of their own segment.

    Returns:
      [B, T, Q, H], in the type of `q_BTQH`; softmax is taken in float32.
    """
    B, T, Q, H = q_BTQH.shape
    K = k_BTKH.shape[2]
    q_BTKGH = q_BTQH.reshape(B, T, K, Q // K, H)
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32
    ) * (H**-0.5)
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    same_BTT = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    scores = jnp.where((same_BTT & causal_TT[None])[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BTKH).reshape(B, T, Q, H)


def cached_attention(
    q_BQH: jax.Array,
    k_BKH: jax.Array,
    v_BKH: jax.Array,
    cache_k_BKHS: jax.Array,
    cache_v_BKSH: jax.Array,
    length_B: jax.Array,
) -> jax.Array:
    """Attention of one new token per sequence to its cached past and to itself.

    The new token's own key and value are arguments, not yet in the cache, so the cache is only read
    here and written once per step for all layers together.

    Args:
      q_BQH, k_BKH, v_BKH: the new token's rotated query and key, and its value.
      cache_k_BKHS, cache_v_BKSH: past keys and values; keys keep length last, which makes q·k a
        plain matrix product (7 times faster on CPU than length before head size).
      length_B: int32, how many cached tokens are real.

    Returns:
      [B, Q, H] in the type of `q_BQH`.
    """
    B, Q, H = q_BQH.shape
    K, S = cache_k_BKHS.shape[1], cache_k_BKHS.shape[3]
    q_BKGH = q_BQH.reshape(B, K, Q // K, H)
    past = jnp.einsum("bkgh,bkhs->bkgs", q_BKGH, cache_k_BKHS, preferred_element_type=jnp.float32)
    own = jnp.einsum("bkgh,bkh->bkg", q_BKGH, k_BKH, preferred_element_type=jnp.float32)
    real_BS = jnp.arange(S)[None] < length_B[:, None]
    past = jnp.where(real_BS[:, None, None], past * H**-0.5, _MASKED)
    own = own * H**-0.5
    top = jnp.maximum(past.max(-1), own)
    past_weight = jnp.exp(past - top[..., None])
    own_weight = jnp.exp(own - top)
    mixed = jnp.einsum(
        "bkgs,bksh->bkgh",
        past_weight.astype(cache_v_BKSH.dtype),
        cache_v_BKSH,
        preferred_element_type=jnp.float32,
    )
    mixed = mixed + own_weight[..., None] * v_BKH[:, :, None].astype(jnp.float32)
    out = mixed / (past_weight.sum(-1) + own_weight)[..., None]
    return out.reshape(B, Q, H).astype(q_BQH.dtype)
