"""Attention by splash, the Pallas kernel for TPUs that ships with JAX.

    B sequences   T tokens   Q query heads   K kv heads   H head size

Tiles in the future and tiles before a sliding window are skipped. Tiles without a common segment are computed
and masked. The compiler cannot partition the kernel: on a mesh call it under `shard_map`, where it sees the
shapes of one device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

from jaxrl.errors import UserError
from jaxrl.models.attention_kind import FULL, AttentionKind

_LANES = 128


def splash_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    kind: AttentionKind = FULL,
    *,
    block_tokens: int,
    interpret: bool = False,
) -> jax.Array:
    """`attention` by the splash kernel, in tiles of `block_tokens` x `block_tokens`.

    Args:
      q_BTQH, k_BTKH, v_BTKH, segment_ids_BT, kind: as for `attention`. If only some layers slide, two kernels
        are compiled and each layer runs one.
      block_tokens: a multiple of 128. Tiles of 1024 fit into a TPU v5p's vector memory, 2048 do not.
      interpret: run the kernel in Python, on any device; for tests.

    Raises:
      UserError: `block_tokens` is not a multiple of 128.
    """
    if block_tokens % _LANES:
        raise UserError(
            f"splash attention in blocks of {block_tokens} tokens: a block is a multiple of "
            f"{_LANES}; use {_round_up(block_tokens, _LANES)}"
        )
    T, Q, H = q_BTQH.shape[1:]
    block = min(block_tokens, _round_up(T, _LANES))
    pad = _round_up(T, block) - T
    # The kernel does not scale scores. Scale queries in float32: at H = 128 the scale is not a power of two,
    # and a bfloat16 product would round twice.
    q_BTQH = (q_BTQH.astype(jnp.float32) * H**-0.5).astype(q_BTQH.dtype)
    q_BQTH, k_BKTH, v_BKTH = (
        jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).swapaxes(1, 2)
        for x in (q_BTQH, k_BTKH, v_BTKH)
    )
    segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, pad)))

    # Separate backward kernels for queries and for keys and values. The fused kernel stores a gradient of the
    # queries for each block of keys: memory quadratic in the length.
    tiles = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), block)
    tiles |= dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), block)

    def masked_by(mask: splash.Mask) -> Any:
        # One shard: under `shard_map` it sees the heads and rows of one device.
        kernel = splash.make_splash_mha(
            MultiHeadMask([mask] * Q),
            block_sizes=splash.BlockSizes(**tiles),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=kind.softcap or None,
            residual_checkpoint_name="attended",
            interpret=interpret,
        )

        return jax.vmap(lambda q, k, v, ids_T: kernel(q, k, v, splash.SegmentIds(ids_T, ids_T)))

    square = (T + pad, T + pad)
    attend = masked_by(splash.CausalMask(square))
    if kind.window:
        whole, attend = attend, masked_by(splash.LocalMask(square, (kind.window - 1, 0), 0))
        if kind.slides is not None:
            attend = functools.partial(jax.lax.cond, kind.slides, attend, whole)
    return attend(q_BQTH, k_BKTH, v_BKTH, segment_ids_BT).swapaxes(1, 2)[:, :T]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
