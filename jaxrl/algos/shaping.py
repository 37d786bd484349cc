"""Reward shaping by length."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def soft_overlong_penalty(
    length_B: jax.Array, *, max_response_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> jax.Array:
    """Punishes responses that enter the last `buffer_tokens` before the limit (DAPO eq. 13).

    0 up to max - buffer, then linearly down to -penalty at max. The limit counts tokens, end-of-sequence
    included.

    Args:
      length_B: response tokens of each sequence.
      max_response_tokens: the generation limit (the paper's L_max).
      buffer_tokens: width of the ramp (L_cache), at least 1.
      penalty: depth of the ramp.

    Returns:
      float32 [B], from 0 down to -penalty.
    """
    excess_B = length_B.astype(jnp.float32) - (max_response_tokens - buffer_tokens)
    # `jnp.clip`, not `kinks.clip`: a length has no gradient.
    return -penalty * jnp.clip(excess_B / buffer_tokens, 0.0, 1.0)
