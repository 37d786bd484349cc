"""Policy losses: per-token values, to be summed over a mask and divided once by a global count.

All arrays have one shape, [...] tokens in any arrangement.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Bounds the log-ratio before exp: e^20 is finite in float32 and bfloat16, and far outside any clip range.
MAX_LOG_RATIO = 20.0


def clipped(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped surrogate with separate bounds: -min(r A, clip(r, 1-low, 1+high) A).

    DAPO eq. 8 (clip-higher: low .2, high .28). Where A < 0 the loss is also bounded by -dual_clip * A
    (dual-clip PPO), so that one token with a huge ratio cannot own the gradient.

    Args:
      logprob: log-probability under the policy being trained.
      old_logprob: the same at the start of the step.
      advantage: how good the token was.
      clip_low, clip_high: how far the ratio may fall or rise before its gradient stops.
      dual_clip: bound on the ratio for negative advantages, above 1.

    Returns:
      (loss, stats); stats are per-token: `pg_clipfrac` 1 where a clip is active, its two halves
      `pg_clipfrac_high` (A > 0, ratio above) and `pg_clipfrac_low` (A < 0, ratio below),
      `pg_clipfrac_lower` 1 where the dual clip is (verl's name), `ppo_kl` old minus new log-probability.
    """
    log_ratio = jnp.clip(logprob - old_logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    plain = -advantage * ratio
    bounded = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    surrogate = jnp.maximum(plain, bounded)
    dual = -advantage * dual_clip
    negative = advantage < 0
    loss = jnp.where(negative, jnp.minimum(surrogate, dual), surrogate)
    active = bounded > plain
    stats = {
        "pg_clipfrac": active,
        "pg_clipfrac_high": active & ~negative,
        "pg_clipfrac_low": active & negative,
        "pg_clipfrac_lower": negative & (surrogate > dual),
        "ppo_kl": -log_ratio,
    }
    return loss, {name: value.astype(loss.dtype) for name, value in stats.items()}
