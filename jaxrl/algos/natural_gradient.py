"""The step of a trust region: TRPO (Schulman et al. 2015, arXiv 1502.05477), appendix C.

    minimise g . s subject to s^T F s / 2 <= max_kl        its solution is s = -sqrt(2 max_kl / x^T F x) x
                                                            with F x = g

g is the gradient of the loss (the paper's surrogate, with the sign of a loss). F is the Fisher matrix, the
Hessian of the KL between the policies before and after the step. It is known by its products with vectors
only. A vector is a pytree of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Vector = Any


def inner(x: Vector, y: Vector) -> jax.Array:
    """The inner product of two vectors."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), x, y))


def combined(x: Vector, factor: jax.Array | float, y: Vector) -> Vector:
    """x + factor * y."""
    return jax.tree.map(lambda a, b: a + factor * b, x, y)


def conjugate_gradients(
    product: Callable[[Vector], Vector], target: Vector, *, iterations: int
) -> tuple[Vector, Vector]:
    """Solves F x = target for a symmetric positive definite F, as well as `iterations` products allow.

    Nocedal and Wright, "Numerical Optimization", algorithm 5.2, from x = 0.

    Args:
      product: function that multiplies a vector by F.
      target: right-hand side.
      iterations: number of products.

    Returns:
      (x, F x). F x is the target less the residual, which needs no product of its own. Iterations after the
      exact solution, or in a direction without positive curvature, change nothing.
    """

    def iterate(_, state: tuple[Vector, Vector, Vector, jax.Array]):
        x, residual, direction, size = state
        multiplied = product(direction)
        curvature = inner(direction, multiplied)
        # 0 after the exact solution, and rounding may make it negative. Neither gives a length.
        goes_on = curvature > 0
        length = jnp.where(goes_on, size / jnp.where(goes_on, curvature, 1.0), 0.0)
        x = combined(x, length, direction)
        residual = combined(residual, -length, multiplied)
        new_size = inner(residual, residual)
        turned = combined(residual, new_size / jnp.where(goes_on, size, 1.0), direction)
        return x, residual, turned, new_size

    # From x = 0 the first residual, and the first direction, is the target itself: no product is needed to
    # begin.
    start = (jax.tree.map(jnp.zeros_like, target), target, target, inner(target, target))
    x, residual, *_ = jax.lax.fori_loop(0, iterations, iterate, start)
    return x, combined(target, -1.0, residual)


def step_length(x: Vector, product_x: Vector, *, max_kl: float) -> jax.Array:
    """The length at which the quadratic model of the KL reaches its bound: sqrt(2 max_kl / x^T F x).

    Appendix C, with x^T F x from `product_x`. 0 if that is not positive, such as for x = 0.
    """
    curvature = inner(x, product_x)
    # `where` twice: the branch that is not chosen is computed too, and 0 must not divide there.
    return jnp.where(
        curvature > 0, jnp.sqrt(2.0 * max_kl / jnp.where(curvature > 0, curvature, 1.0)), 0.0
    )


class Found(NamedTuple):
    """The result of a line search, scalars.

    Attributes:
      fraction: accepted fraction of the step; 0 if none was.
      loss, kl: loss and KL after the accepted step; without one, the old loss and 0.
      tried: number of fractions that were measured.
    """

    fraction: jax.Array
    loss: jax.Array
    kl: jax.Array
    tried: jax.Array


def line_search(
    measure: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    loss: jax.Array,
    *,
    max_kl: float,
    tries: int,
) -> Found:
    """Halves a step until the loss falls and the KL keeps its bound (appendix C).

    Args:
      measure: function from a fraction of the step to (loss, KL) after it.
      loss: loss before the step.
      max_kl: bound on the KL.
      tries: number of fractions to try: 1, 1/2, 1/4, ..
    """

    def halve(found: Found) -> Found:
        fraction = 0.5 ** found.tried.astype(jnp.float32)
        new_loss, kl = measure(fraction)
        # NaN fails both comparisons.
        accepted = (new_loss < loss) & (kl <= max_kl)
        fraction, new_loss, kl = (
            jnp.where(accepted, new, old)
            for new, old in ((fraction, jnp.float32(0)), (new_loss, loss), (kl, jnp.float32(0)))
        )
        return Found(fraction, new_loss, kl, found.tried + 1)

    return jax.lax.while_loop(
        lambda found: (found.fraction == 0) & (found.tried < tries),
        halve,
        Found(jnp.float32(0), loss, jnp.float32(0), jnp.int32(0)),
    )
