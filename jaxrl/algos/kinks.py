"""Functions with a kink, and a well-defined gradient at the kink.

On-policy training sits exactly on kinks. In the first update of a step the ratio is exactly 1 and its
logarithm 0. In the first step the policy equals the reference. A value equals the old value, and a clipping
bound may lie there too. At such points jax.grad gives |x| the slope 1, and halves the gradient at every tie
of `maximum`, `minimum` and `clip`. The losses here use these two functions instead, or choose a branch with
`where`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def absolute(x: jax.Array) -> jax.Array:
    """|x| with slope sign(x), which is 0 at 0."""
    return x * jnp.sign(jax.lax.stop_gradient(x))


def clip(
    x: jax.Array, lowest: float | jax.Array = -jnp.inf, highest: float | jax.Array = jnp.inf
) -> jax.Array:
    """x clipped to bounds. The slope is 1 between and on the bounds and 0 beyond; bounds get no gradient."""
    # Strict comparisons: a value on a bound takes the second branch and keeps its whole gradient.
    beyond = (x < lowest) | (x > highest)
    # stop_gradient, since a bound may be an array with a gradient of its own.
    return jnp.where(beyond, jax.lax.stop_gradient(jnp.clip(x, lowest, highest)), x)
