"""The probability ratio and its clipped surrogate, shared by the policy losses; any shape."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl.algos import kinks
from jaxrl.checks import coefficient

Stats = dict[str, jax.Array]
Loss = tuple[jax.Array, Stats]

ClipWidth = Annotated[float, coefficient()]
"""Allowed distance of the ratio from 1 on one side. A lower width of 1 or more is no bound."""

# Bounds the log-ratio before exp: e^20 is finite in float32 and bfloat16, and far outside any clip range.
MAX_LOG_RATIO = 20.0


def bounded_log_ratio(logprob: jax.Array, old_logprob: jax.Array) -> jax.Array:
    """log r = logprob - old_logprob, clipped to +-MAX_LOG_RATIO, with gradient 0 beyond."""
    return kinks.clip(logprob - old_logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def surrogate(ratio: jax.Array, advantage: jax.Array, *, clip_low: float, clip_high: float) -> Loss:
    """-min(r A, clip(r, 1-low, 1+high) A), with stats of where the clip is active and on which side.

    A token exactly on a bound is not clipped: it keeps its whole gradient.
    """
    plain = -advantage * ratio
    bounded = -advantage * kinks.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    active, negative = bounded > plain, advantage < 0
    # Not `jnp.maximum`, whose gradient at a tie is the mean of both branches. On policy every token ties.
    loss = jnp.where(active, bounded, plain)
    return loss, {
        "pg_clipfrac": flag(active, loss),
        "pg_clipfrac_high": flag(active & ~negative, loss),
        "pg_clipfrac_low": flag(active & negative, loss),
    }


def flag(condition: jax.Array, like: jax.Array) -> jax.Array:
    """1 where the condition holds, else 0, in the type of `like`: stats are summed with the loss."""
    return condition.astype(like.dtype)
