"""Functions with a kink, whose slope at the kink is the one that their definition means.

An on-policy run stands on kinks: in the first update of a step the ratio is exactly 1, so its logarithm is
exactly 0; the policy is the reference in the first step; a value is still the old value; and a bound may lie
right there. jax.grad takes |x| to have slope 1 at 0 and halves every tie of `maximum`, `minimum` and `clip`.
The losses of this package are made of the two functions here instead, or say with `where` which branch counts
at a tie.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def absolute(x: jax.Array) -> jax.Array:
    """|x|, whose slope is sign(x): 0 at 0."""
    return x * jnp.sign(jax.lax.stop_gradient(x))


def clip(
    x: jax.Array, lowest: float | jax.Array = -jnp.inf, highest: float | jax.Array = jnp.inf
) -> jax.Array:
    """x within its bounds, which are constants to the gradient: slope 1 up to and on them, 0 beyond."""
    beyond = (x < lowest) | (x > highest)
    return jnp.where(beyond, jax.lax.stop_gradient(jnp.clip(x, lowest, highest)), x)
