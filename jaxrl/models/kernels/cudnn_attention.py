"""Attention by cuDNN's fused kernel, on NVIDIA GPUs, in bfloat16 or float16.

    B sequences   T tokens   Q query heads   K kv heads   H head size   M segments of a row, at most

The kernel gets the segments of a row in one of two ways.

* **Offsets**, on Hopper and newer without windows: where each segment begins, and its length. Tiles between
  segments are skipped, and memory is linear in the length. `jax.nn` does not offer it, so JAX's own function
  is called, which has it right for grouped queries from `_OFFSETS_SINCE` on.
* **A mask**, elsewhere: a bias of 2 bytes per query and key, and the backward pass writes a gradient of the
  same size. If every layer has a sliding window, the kernel gets the window and skips tiles before it. If
  only some layers have one, the window is part of the mask.

Not covered: capped scores.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.xla_attention import xla_attention
from jaxrl.private import cudnn_attention as fused

# The first version of JAX known to count the offsets of keys by key-value heads (jax pull request 39521).
_OFFSETS_SINCE = (0, 11, 2)
# For each of M segments the kernel starts blocks for all tiles of a row, also if the row has fewer: at 8,192
# tokens 16 take 0.89 ms, 64 take 1.36 and 256 3.36 (H200, benchmarks/results/2026-11-26-h200.md). So there
# are two kernels, for the fewest and for the most, and rows take the smaller one if they fit.
_TOKENS_OF_A_SEGMENT, _FEWEST_SEGMENTS, _MOST_SEGMENTS = 128, 16, 64
# Sums of the softmax are kept for M segments of each head and row: no more than for 64 of 32,768 tokens.
_MOST_SUMS = 64 * 32_768
# Tiles of the attention for rows with more segments.
_BLOCK_TOKENS = 512


def takes_offsets(device: Any, *, windows: bool) -> bool:
    """Whether the kernel takes offsets of segments on a device; None is an unknown one.

    Args:
      device: one of the devices.
      windows: whether any layer has a sliding window.
    """
    capability = getattr(device, "compute_capability", "")
    is_hopper = capability[:1].isdigit() and float(capability) >= 9
    return is_hopper and not windows and jax.__version_info__ >= _OFFSETS_SINCE


def cudnn_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    kind: AttentionKind,
    *,
    device: Any = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`attention`; with `implementation` "xla" the way with a mask on any device, for tests.

    With offsets the tokens of a segment are neighbours. A mask costs 2 T² bytes per sequence in the forward
    pass and 4 T² in the backward pass, for any number of heads: 0.8 and 1.7 GB at 20,480 tokens.
    """
    assert not kind.softcap, "pick_implementation leaves capped scores to others"
    # The gradient needs an even number of tokens.
    odd = q_BTQH.shape[1] % 2
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (q_BTQH, k_BTKH, v_BTKH)
    )
    ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, odd)))
    if takes_offsets(device, windows=bool(kind.window)):
        out_BTQH = _by_offsets(query, key, value, ids_BT)
    else:
        out_BTQH = _by_mask(query, key, value, ids_BT, kind, implementation)
    return out_BTQH[:, : q_BTQH.shape[1]]


def _by_mask(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    kind: AttentionKind,
    implementation: Any,
) -> jax.Array:
    # One mask for all heads. Causality is not part of it but a flag, with which the kernel skips half the
    # tiles.
    mask_B1TT = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    window = None
    if isinstance(kind.reach, int):
        # The kernel counts the keys before a token without the token itself.
        window = (kind.reach - 1, 0)
    elif kind.reach is not None:
        position_T = jnp.arange(q_BTQH.shape[1])
        seen_TT = position_T[:, None] - position_T[None, :] < kind.reach
        mask_B1TT &= seen_TT[None, None]
    return jax.nn.dot_product_attention(
        q_BTQH,
        k_BTKH,
        v_BTKH,
        mask=mask_B1TT,
        is_causal=True,
        local_window_size=window,
        implementation=implementation,
    )


def _by_offsets(
    q_BTQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    tokens = segment_ids_BT.shape[1]
    most = min(tokens // _TOKENS_OF_A_SEGMENT, _MOST_SEGMENTS, _MOST_SUMS // tokens)
    sizes = sorted({_FEWEST_SEGMENTS, max(most, _FEWEST_SEGMENTS)})

    def kernel(most: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        lengths_BM, offsets_BN = segment_offsets(segment_ids_BT, most)
        return fused.dot_product_attention(
            *(q, k, v),
            q_seqlen=lengths_BM,
            kv_seqlen=lengths_BM,
            q_offsets=offsets_BN,
            kv_offsets=offsets_BN,
            scale=q.shape[-1] ** -0.5,
            mask_type=fused.MaskType.PADDING_CAUSAL,
        )

    slower = functools.partial(
        xla_attention, segments=segment_ids_BT, kind=FULL, block_tokens=_BLOCK_TOKENS
    )
    # The smallest size in which the segments of every row fit.
    index = (_starts(segment_ids_BT).sum(axis=1).max() > jnp.array(sizes)).sum()
    ways = [*(functools.partial(kernel, size) for size in sizes), slower]
    return jax.lax.switch(index, ways, q_BTQH, k_BTKH, v_BTKH)


def _starts(segment_ids_BT: jax.Array) -> jax.Array:
    """Whether a token begins a segment, bool [B, T]. Padding is a segment like others."""
    new_BT = segment_ids_BT != jnp.roll(segment_ids_BT, 1, axis=1)
    return new_BT.at[:, 0].set(True)


def segment_offsets(segment_ids_BT: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Where segments begin, as the kernel wants it.

    Args:
      segment_ids_BT: int32; neighbours with the same id are a segment.
      most: M.

    Returns:
      (lengths, int32 [B, M]; places of the first tokens, int32 [B, M + 1]), with -1 behind the last segment
      of a row. Those that do not fit are dropped.
    """
    B, T = segment_ids_BT.shape
    new_BT = _starts(segment_ids_BT)
    number_BT = jnp.where(new_BT, jnp.cumsum(new_BT, axis=1) - 1, T)
    rows_B1 = jnp.arange(B)[:, None]
    begin_BN = jnp.full((B, most + 1), -1, jnp.int32)
    begin_BN = begin_BN.at[rows_B1, number_BT].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
    next_BM = jnp.where(begin_BN[:, 1:] < 0, T, begin_BN[:, 1:])
    lengths_BM = jnp.where(begin_BN[:, :-1] < 0, -1, next_BM - begin_BN[:, :-1])
    return lengths_BM, begin_BN
