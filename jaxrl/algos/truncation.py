"""The tokens that top-k, top-p and min-p keep, and log-probabilities renormalised over them.

The sampler draws among the kept tokens, and the trainer finds the same tokens from its own logits. Example,
top-p .6 of four tokens:

    token           a     b     c     d
    probability    .4    .25   .2    .15     a and b are kept: .4 is less than .6, .65 is enough
    renormalised   .615  .385   0     0      each divided by .65

    V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Name of the threshold in a forward pass. It is stored for the backward pass: 4 bytes a token save a search.
LEAST_KEPT = "least_kept"
# The vocabulary as a matrix with this many rows. Devices that share a vocabulary have whole rows each, if it
# is a multiple of 128; with rows of 128 tokens XLA would gather the logits on every device.
_ROWS = 128
# Number of bits of a positive float below 2 that may be set.
_BITS = 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Truncation:
    """Limits on the tokens that can be drawn, with one entry per slot (or scalars for all slots).

    Attributes:
      top_k: int32, keep only this number of the most probable tokens; 0 keeps all.
      top_p: float32, of these keep the most probable ones whose probabilities sum to at least this; 1 keeps
        all.
      min_p: float32, of these keep tokens with at least this fraction of the highest probability; 0 keeps
        all.
      min_tokens: int32, number of response tokens before which no stop id can be drawn.
      repetition_penalty: float32, penalty on tokens that already occur in prompt or response: a positive
        logit is divided by it, a negative one multiplied (Keskar et al. 2019); 1 is no penalty.
      renormalized: bool, whether the sampler's log-probabilities are those of the kept tokens; else they are
        those of the whole vocabulary.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    min_tokens: jax.Array
    repetition_penalty: jax.Array
    renormalized: jax.Array

    @property
    def keeps_some(self) -> jax.Array:
        """Bool, whether top-k, top-p or min-p drops tokens."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


class Kept(NamedTuple):
    """The kept tokens of distributions over V.

    Attributes:
      least: [..., 1], probability of the least probable kept token.
      log_mass: [..., 1], log of the sum of the kept tokens' probabilities.
    """

    least: jax.Array
    log_mass: jax.Array

    def renormalized(self, logprobs: jax.Array) -> jax.Array:
        """Log-probabilities [..., any] among the kept tokens; -inf for other tokens."""
        # The last token that is kept is at `least`, and another program may round its exponential otherwise.
        outside = jnp.exp(logprobs) < self.least * (1.0 - 1e-6)
        return jnp.where(outside, -jnp.inf, logprobs - self.log_mass)


def kept_tokens(logprobs: jax.Array, truncation: Truncation) -> Kept:
    """The tokens that stay of distributions, given as log-probabilities [..., V].

    The gradient passes through the mass. Which tokens are kept counts as constant.

    Args:
      logprobs: with the temperature applied.
      truncation: `top_k`, `top_p` and `min_p` are used, as scalars or [..., 1].
    """
    p = jnp.exp(logprobs)
    least = least_kept(jax.lax.stop_gradient(p), truncation)
    least = checkpoint_name(least, LEAST_KEPT)
    return Kept(least, jnp.log(total(jnp.where(p >= least, p, 0.0))))


def least_kept(p: jax.Array, truncation: Truncation) -> jax.Array:
    """The smallest probability of a kept token, [..., 1] of probabilities [..., V].

    The order of limits follows Transformers: top-k, then top-p of the rest, then min-p. Tokens of equal
    probability are all kept or all dropped. The most probable one is kept however small top-p is.
    """
    least, mass = least_before_top_p(p, truncation)

    def by_top_p() -> jax.Array:
        found = _threshold(p, p, jnp.broadcast_to(truncation.top_p * mass, mass.shape))
        # A top-p of 0 wants no mass; the search then ends at its upper bound, above every probability.
        found = jnp.minimum(found, p.max(axis=-1, keepdims=True))
        return jnp.maximum(least, jnp.where(truncation.top_p < 1, found, 0.0))

    # `cond`, not `where`: without top-p in the batch the search is not run at all.
    return jax.lax.cond(jnp.any(truncation.top_p < 1), by_top_p, lambda: least)


def least_before_top_p(p: jax.Array, truncation: Truncation) -> tuple[jax.Array, jax.Array]:
    """Smallest probability inside top-k and min-p, and the total mass that top-p refers to, [..., 1] each."""
    none = jnp.zeros_like(p[..., :1])

    def by_top_k() -> tuple[jax.Array, jax.Array]:
        k = truncation.top_k
        wanted = jnp.broadcast_to(k, none.shape).astype(jnp.float32)
        limited = (k > 0) & (k < p.shape[-1])
        least = jnp.where(limited, _threshold(p, jnp.ones_like(p), wanted), 0.0)
        return least, total(jnp.where(p >= least, p, 0.0))

    # Without top-k the total mass is 1: all tokens count.
    least, mass = jax.lax.cond(
        jnp.any(truncation.top_k > 0), by_top_k, lambda: (none, jnp.ones_like(none))
    )
    return jnp.maximum(least, truncation.min_p * p.max(axis=-1, keepdims=True)), mass


def _threshold(p: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """The smallest x > 0 such that the weights of all p > x sum to less than `wanted`, [..., 1].

    Sorting or `top_k` takes 12 times as long on CPU (64 slots, 50 of 152k tokens), and on a mesh it gathers
    the logits of all replicas on every device, which takes 6.6 GB for 3,632 slots.
    """
    # On TPU the 7 sums of a digit are one fusion that reads p once. XLA on CPU reads it for each sum.
    return jax.lax.platform_dependent(
        *(as_rows(p, 0.0), as_rows(weight, 0.0), wanted),
        cpu=functools.partial(digit_search, digit_bits=1),
        default=functools.partial(digit_search, digit_bits=3),
    )


def digit_search(
    p: jax.Array, weight: jax.Array, wanted: jax.Array, *, digit_bits: int
) -> jax.Array:
    """`_threshold` of `as_rows`, bit by bit of x or several at a time: 2**bits - 1 sums for each digit."""

    # The bit patterns of non-negative floats have the same order as the floats.
    def digit(i: jax.Array, below: jax.Array) -> jax.Array:
        shift = _BITS - digit_bits * (i + 1)
        value = jnp.zeros_like(below)
        for candidate in range(1, 2**digit_bits):
            x = jax.lax.bitcast_convert_type(below + (candidate << shift), jnp.float32)
            enough = _total_of_rows(jnp.where(p > x[..., None], weight, 0.0)) >= wanted
            # The sum falls as x grows, so the number of candidates that still reach `wanted` is the digit
            # itself.
            value += enough.astype(jnp.int32)
        return below + (value << shift)

    # The largest x at which they still sum to `wanted`; the float after it is the smallest at which they do
    # not.
    below = jax.lax.fori_loop(0, _BITS // digit_bits, digit, jnp.zeros(wanted.shape, jnp.int32))
    return jax.lax.bitcast_convert_type(below + 1, jnp.float32)


def total(x: jax.Array) -> jax.Array:
    """Sums over the vocabulary, [..., 1] of [..., V], by columns: XLA on CPU sums a row serially."""
    return _total_of_rows(as_rows(x, 0.0))


def _total_of_rows(x: jax.Array) -> jax.Array:
    return x.sum(axis=-2).sum(axis=-1, keepdims=True)


def as_rows(x: jax.Array, padding: float) -> jax.Array:
    """The vocabulary as the rows of a matrix, [..., `_ROWS`, C]; the end of the last rows is padding."""
    *lead, V = x.shape
    x = jnp.pad(x, (*((0, 0),) * len(lead), (0, -V % _ROWS)), constant_values=padding)
    return x.reshape(*lead, _ROWS, -1)
