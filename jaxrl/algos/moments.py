"""Statistics of many numbers that lie in parts: microbatches, shards, minibatches.

    B rows   T tokens of a row

Means of parts, or deviations of parts, do not add up to those of the whole. `Moments` do, so that a statistic
is the same for any split:

    whole = Moments.of(x_BT, mask_BT)  ==  Moments.of(first half) + Moments.of(second half)
    whole.mean, whole.std, whole.max

A part keeps its mean and its squares about that mean, as T. Chan et al., "Updating formulae and a pairwise
algorithm for computing sample variances", 1979: the difference of a mean of squares and a squared mean has no
digits left where a deviation is small.
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
    """What is kept of some numbers. Every statistic of none is 0, and fields of 0 alone are those of none.

    Attributes:
      count: how many there are, float.
      mean: of them.
      squares: the sum of the squares of x - mean.
      min, max: the smallest and the largest.
    """

    count: jax.Array
    mean: jax.Array
    squares: jax.Array
    min: jax.Array
    max: jax.Array

    @staticmethod
    def of(x: jax.Array, mask: jax.Array) -> Moments:
        """Of the numbers inside the mask; any one shape. No gradient goes through."""
        x = jax.lax.stop_gradient(x)
        inside = mask.astype(bool)
        count = inside.sum().astype(x.dtype)
        mean = masked(x, inside).sum() / jnp.maximum(count, 1.0)
        return Moments(
            count=count,
            mean=mean,
            squares=(masked(x - mean, inside) ** 2).sum(),
            min=masked(jnp.min(jnp.where(inside, x, jnp.inf)), count),
            max=masked(jnp.max(jnp.where(inside, x, -jnp.inf)), count),
        )

    def merged(self) -> Moments:
        """Of all parts, which lie along the first axis of every field."""
        count = self.count.sum(0)
        mean = (self.count * self.mean).sum(0) / jnp.maximum(count, 1.0)
        some = self.count > 0
        return Moments(
            count=count,
            mean=mean,
            squares=(self.squares + self.count * (self.mean - mean) ** 2).sum(0),
            min=masked(jnp.min(jnp.where(some, self.min, jnp.inf), 0), count),
            max=masked(jnp.max(jnp.where(some, self.max, -jnp.inf), 0), count),
        )

    def __add__(self, other: Moments) -> Moments:
        return jax.tree.map(lambda x, y: jnp.stack([x, y]), self, other).merged()

    @property
    def mean_square(self) -> jax.Array:
        """The mean of their squares."""
        return self._variance + self.mean**2

    @property
    def std(self) -> jax.Array:
        """Of the numbers as they are: divided by their count."""
        return jnp.sqrt(self._variance)

    @property
    def sample_std(self) -> jax.Array:
        """Of what they are a sample of: divided by one less (Bessel); 0 of a single one."""
        return jnp.sqrt(self.squares / jnp.maximum(self.count - 1.0, 1.0))

    @property
    def _variance(self) -> jax.Array:
        return self.squares / jnp.maximum(self.count, 1.0)


# Moments by name, at any depth of dicts.
RunningMoments = dict[str, Any]


def add_moments(one: RunningMoments, other: RunningMoments) -> RunningMoments:
    """The moments of each name, of both parts together."""
    return jax.tree.map(operator.add, one, other, is_leaf=_is_moments)


def merge_moments(moments: RunningMoments) -> RunningMoments:
    """The moments of each name, of all parts along the first axis."""
    return jax.tree.map(Moments.merged, moments, is_leaf=_is_moments)


def _is_moments(x: Any) -> bool:
    return isinstance(x, Moments)
