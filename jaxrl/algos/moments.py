"""Statistics of numbers that are split into parts: microbatches, shards, minibatches.

    B rows   T tokens of a row

Means and deviations of parts do not add up to those of the whole, but `Moments` do. So a statistic is the
same for any split:

    whole = Moments.of(x_BT, mask_BT)  ==  Moments.of(first half) + Moments.of(second half)
    whole.mean, whole.std, whole.max

Each part stores its mean and the sum of squares about that mean, following T. Chan et al., "Updating formulae
and a pairwise algorithm for computing sample variances", 1979. The textbook difference, mean of squares less
squared mean, loses all digits if the deviation is small.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.segments import masked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Summary of a set of numbers x, which `+` merges. All fields of the empty set are 0.

    Attributes:
      count: number of x, float.
      mean: mean of x.
      squares: sum of (x - mean)^2.
      min, max: extremes of x.
    """

    count: jax.Array
    mean: jax.Array
    squares: jax.Array
    min: jax.Array
    max: jax.Array

    @staticmethod
    def of(x: jax.Array, mask: jax.Array) -> Moments:
        """The moments of the numbers inside the mask, an array of the same shape. No gradient passes."""
        x = jax.lax.stop_gradient(x)
        inside = mask.astype(bool)
        count = inside.sum().astype(x.dtype)
        mean = masked(x, inside).sum() / jnp.maximum(count, 1.0)
        return Moments(
            count=count,
            mean=mean,
            squares=(masked(x - mean, inside) ** 2).sum(),
            # The extremes of an empty set are infinite; as 0 they do no harm in sums and metrics.
            min=masked(jnp.min(jnp.where(inside, x, jnp.inf)), count),
            max=masked(jnp.max(jnp.where(inside, x, -jnp.inf)), count),
        )

    def merged(self) -> Moments:
        """The moments of all parts together; parts lie along the first axis of every field."""
        count = self.count.sum(0)
        mean = (self.count * self.mean).sum(0) / jnp.maximum(count, 1.0)
        # The extremes of an empty part are 0 and must not win.
        some = self.count > 0
        return Moments(
            count=count,
            mean=mean,
            # Chan et al.: squares about the part's mean, and that mean's own distance from the mean of all.
            squares=(self.squares + self.count * (self.mean - mean) ** 2).sum(0),
            min=masked(jnp.min(jnp.where(some, self.min, jnp.inf), 0), count),
            max=masked(jnp.max(jnp.where(some, self.max, -jnp.inf), 0), count),
        )

    def __add__(self, other: Moments) -> Moments:
        return jax.tree.map(lambda x, y: jnp.stack([x, y]), self, other).merged()

    @property
    def mean_square(self) -> jax.Array:
        return self.variance + self.mean**2

    @property
    def std(self) -> jax.Array:
        """Population standard deviation: squares divided by the count."""
        return jnp.sqrt(self.variance)

    @property
    def sample_std(self) -> jax.Array:
        """Sample standard deviation: squares divided by the count less 1 (Bessel). 0 for a single number."""
        return jnp.sqrt(self.squares / jnp.maximum(self.count - 1.0, 1.0))

    @property
    def variance(self) -> jax.Array:
        return self.squares / jnp.maximum(self.count, 1.0)


# Moments by name, at any depth of dicts.
RunningMoments = dict[str, Any]


def add_moments(one: RunningMoments, other: RunningMoments) -> RunningMoments:
    """Adds the moments of two parts, name by name."""
    return jax.tree.map(operator.add, one, other, is_leaf=lambda x: isinstance(x, Moments))


def merge_moments(moments: RunningMoments) -> RunningMoments:
    """Merges the parts along the first axis, name by name."""
    return jax.tree.map(Moments.merged, moments, is_leaf=lambda x: isinstance(x, Moments))


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
