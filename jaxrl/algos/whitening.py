"""Whitening over a whole batch, shared by the advantages of groups and of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.algos.segments import masked


def whiten(x: jax.Array, weight: jax.Array, *, epsilon: float = 1e-8) -> jax.Array:
    """Shifts and scales to mean 0 and variance 1: (x - mean) / sqrt(variance + epsilon).

    The variance is unbiased, as in verl. Unlike in verl, the result is 0 wherever the weight is 0, and equal
    values give exactly 0. A total weight of 1 and an empty batch give 0 too; verl refuses them.

    Args:
      x: float, any shape; the whole batch of a step, since the mean of a part would differ.
      weight: multiplicity of each entry, same shape and type as x: a mask over tokens, or the number of
        tokens of each sequence.
      epsilon: added to the variance.

    Returns:
      Same shape and type.
    """
    inside = weight.astype(bool)
    x = masked(x, inside)
    total = weight.sum()
    # Subtract the lowest value before the mean. The float mean of equal values may differ from them by a
    # rounding error, and the division by a tiny deviation would blow it up.
    x = x - jnp.min(jnp.where(inside, x, jnp.inf), initial=jnp.inf, keepdims=True)
    x = masked(x, inside)
    centered = masked(x - jnp.sum(weight * x) / jnp.maximum(total, 1.0), inside)
    variance = jnp.sum(weight * centered**2) / jnp.maximum(total - 1.0, 1.0)
    return centered * jax.lax.rsqrt(variance + epsilon)
