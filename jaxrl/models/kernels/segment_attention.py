"""Attention by tokamax's kernel for Hopper GPUs, in memory linear in the length, in bfloat16 or float16.

    B sequences   T tokens   Q query heads   K kv heads   H head size

A token sees the keys from the first of its segment, or of its window, to itself. The kernel gets that first
key of every token, not a mask, and skips the tiles before it and after the token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.attention_kind import AttentionKind
from jaxrl.models.kernels.tokamax import compiling_for

# Names of the jitted kernels; the planner counts their operations by them.
SEGMENT_ATTENTION, SEGMENT_ATTENTION_BACKWARD = "segment_attention", "segment_attention_backward"


def segment_attention(
    q_BTQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    kind: AttentionKind,
    *,
    device: Any,
) -> jax.Array:
    """`attention` for segments whose tokens are neighbours; `device` is what it is compiled for."""
    first_BT = first_keys(segment_ids_BT, kind)
    return _attention(q_BTQH, k_BTKH, v_BTKH, first_BT, kind.softcap, device)


def first_keys(segment_ids_BT: jax.Array, kind: AttentionKind) -> jax.Array:
    """The first key that each token sees, int32 [B, T]."""
    place_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    before_BT = jnp.roll(segment_ids_BT, 1, axis=1)
    # For the first token both branches are 0, whatever the roll has brought before it.
    begins_BT = jnp.where(segment_ids_BT != before_BT, place_T[None], 0)
    first_BT = jax.lax.cummax(begins_BT, axis=1)
    if kind.reach is None:
        return first_BT
    return jnp.maximum(first_BT, place_T[None] + 1 - kind.reach)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, first_BT, softcap: float, device: Any):
    return _forward(q, k, v, first_BT, softcap, device)[0]


def _forward(q, k, v, first_BT, softcap, device):
    def kernel(q, k, v, first_BT):
        with compiling_for(device):
            op, bound = _bound(q, k, v, first_BT, softcap)
            return op(*bound.args, **{**bound.kwargs, "return_residuals": True})

    kernel.__name__ = SEGMENT_ATTENTION
    out, residuals = jax.jit(kernel)(q, k, v, first_BT)
    return out, (q, k, v, first_BT, out, residuals)


def _backward(softcap, device, saved, d_out):
    def kernel(q, k, v, first_BT, out, residuals, d_out):
        with compiling_for(device):
            op, bound = _bound(q, k, v, first_BT, softcap)
            return op.vjp(residuals, out, d_out, *bound.args, **bound.kwargs)

    kernel.__name__ = SEGMENT_ATTENTION_BACKWARD
    grads = jax.jit(kernel)(*saved, d_out)
    return grads["q"], grads["k"], grads["v"], None


_attention.defvjp(_forward, _backward)


def _bound(q: jax.Array, k: jax.Array, v: jax.Array, first_BT: jax.Array, softcap: float) -> Any:
    """The kernel and its arguments."""
    from tokamax._src.ops.attention.base import Mask  # pyright: ignore
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention  # pyright: ignore

    op = PallasMosaicGpuFlashAttention()
    mask = Mask(k_start=first_BT[:, None], is_causal=True)
    return op, op.bind(q, k, v, mask=mask, logits_soft_cap=softcap or None)
