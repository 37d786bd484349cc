"""Attention by cuDNN's fused kernel, on NVIDIA GPUs, in bfloat16 or float16.

    B sequences   T tokens   Q query heads   K kv heads   H head size

Not covered: linear memory, capped scores. The kernel computes scores tile by tile, but `jax.nn` can pass it
segments only as a mask. The mask becomes a bias of 2 bytes per query and key, and the backward pass writes a
gradient of the same size. If every layer has a sliding window, the kernel gets the window and skips tiles
before it. If only some layers have one, the window is part of the mask.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.models.attention_kind import AttentionKind


def cudnn_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    kind: AttentionKind,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`attention` by `jax.nn.dot_product_attention`; "xla" computes the same on any device, for tests.

    The mask costs 2 T² bytes per sequence in the forward pass and 4 T² in the backward pass, for any number
    of heads: 0.8 and 1.7 GB at 20,480 tokens.
    """
    assert not kind.softcap, "pick_implementation leaves capped scores to others"
    # The gradient needs an even number of tokens.
    odd = q_BTQH.shape[1] % 2
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (q_BTQH, k_BTKH, v_BTKH)
    )
    ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, odd)))
    # One mask for all heads. Causality is not part of it but a flag, with which the kernel skips half the
    # tiles.
    mask_B1TT = (ids_BT[:, :, None] == ids_BT[:, None, :])[:, None]
    window = None
    if isinstance(kind.reach, int):
        # The kernel counts the keys before a token without the token itself.
        window = (kind.reach - 1, 0)
    elif kind.reach is not None:
        position_T = jnp.arange(query.shape[1])
        seen_TT = position_T[:, None] - position_T[None, :] < kind.reach
        mask_B1TT &= seen_TT[None, None]
    out_BTQH = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask_B1TT,
        is_causal=True,
        local_window_size=window,
        implementation=implementation,
    )
    return out_BTQH[:, : q_BTQH.shape[1]]
