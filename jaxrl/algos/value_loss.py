"""The critic's loss: values per token, which `aggregation` sums and divides once by a global count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.algos import kinks
from jaxrl.algos.moments import Moments
from jaxrl.algos.ratio import flag


def clipped_value(
    value: jax.Array, old_value: jax.Array, returns: jax.Array, *, clip: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Squared error of the value, the larger of plain and clipped: max((v - R)^2, (v_clip - R)^2) / 2.

    The critic's counterpart of PPO's clip (arXiv 2005.12729 section 3): v_clip = clip(v, v_old - c, v_old +
    c). The gradient stops once a value has moved by c towards its return.

    Args:
      value: current prediction of the critic; any shape, the same for all three arrays.
      old_value: prediction at the start of the step.
      returns: targets.
      clip: c, in units of reward; infinity for none.

    Returns:
      (loss, stats): `vf_clipfrac` 1 where the clipped error is the larger, `vf_error` value less return.
    """
    bounded = kinks.clip(value, old_value - clip, old_value + clip)
    plain, clipped = (value - returns) ** 2, (bounded - returns) ** 2
    # Not `jnp.maximum`: in the first update every value equals its old one, both errors tie, and the gradient
    # would be the mean of two branches.
    active = clipped > plain
    loss = 0.5 * jnp.where(active, clipped, plain)
    return loss, {"vf_clipfrac": flag(active, loss), "vf_error": value - returns}


def explained_variance(value: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """The share of the returns' variance that the critic predicts: 1 - var(R - v) / var(R).

    1 is perfect, 0 is no better than a constant, and negative values are worse. If all returns are equal the
    result is 0 (verl divides by 1e-5 instead). Pass the whole batch, in arrays of equal shape.
    """
    total, left = Moments.of(returns, mask), Moments.of(returns - value, mask)
    # Not `total.variance > 0`: the variance of equal returns may be a rounding error above 0.
    spread = total.max > total.min
    return jnp.where(spread, 1.0 - left.variance / jnp.where(spread, total.variance, 1.0), 0.0)
