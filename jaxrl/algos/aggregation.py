"""From losses of tokens to the loss of a batch, the same for any split of it.

    B rows   T tokens of a row; mask and segments as in `segments`

An aggregation weighs the tokens of a microbatch and says by what the sum over all microbatches is divided,
once:

    mode                       weight of a trained token          divided by
    token-mean                 1                                  tokens
    token-sum                  1                                  1
    seq-mean-token-sum         1                                  sequences
    seq-mean-token-mean        1 / its sequence's tokens          sequences
    seq-mean-token-sum-norm    1 / scale                          sequences

    aggregation = AGGREGATIONS["token-mean"]()
    counts      = count(mask_BT, segment_ids_BT)          # of the whole minibatch, all microbatches
    loss        = sum over microbatches of aggregation.total(...) / aggregation.divisor(counts)

Counts add up over microbatches and shards, so they can also be summed beside the losses and divided by at the
end, where the mask is known only then (rejection inside the loss). Both counts see the mask as it is after
rejection: a rejected token leaves numerator and denominator (in verl it stays in the latter), and so does a
sequence without a token left. If everything is rejected the loss and its gradient are 0, and `tokens` says
so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.algos.segments import last_tokens, masked, segment_count
from jaxrl.checks import MAX_TOKENS, positive


class Counts(NamedTuple):
    """What a loss is divided by; counts of parts add up with `jax.tree.map(jnp.add, ...)`.

    Attributes:
      tokens: trained tokens, float.
      sequences: sequences with at least one of them, float.
    """

    tokens: jax.Array
    sequences: jax.Array


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """One way to add up losses.

    Attributes:
      weigh: (mask_BT, segment_ids_BT) -> weight of each token, 0 outside the mask.
      divide_by: Counts of the whole minibatch -> what the sum is divided by.
    """

    weigh: Callable[[jax.Array, jax.Array], jax.Array]
    divide_by: Callable[[Counts], jax.Array]

    def total(self, loss_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The weighted sum over one microbatch, undivided; NaN outside the mask does no harm."""
        weight_BT = self.weigh(mask_BT, segment_ids_BT).astype(loss_BT.dtype)
        return jnp.sum(weight_BT * masked(loss_BT, mask_BT))

    def divisor(self, counts: Counts) -> jax.Array:
        """What the sum of `total` is divided by, at least 1: an empty minibatch has loss 0, not NaN."""
        return jnp.maximum(self.divide_by(counts), 1.0)


def count(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> Counts:
    """Counts of a microbatch or of anything larger, by mask alone."""
    ones_BT = masked(jnp.ones_like(mask_BT), mask_BT)
    return Counts(ones_BT.sum(), last_tokens(mask_BT, segment_ids_BT).sum())


def token_mean() -> Aggregation:
    """Every token weighs the same: DAPO eq. 8, over the whole minibatch."""
    return Aggregation(_equally, lambda counts: counts.tokens)


def token_sum() -> Aggregation:
    """The bare sum; the learning rate has to know the batch."""
    return Aggregation(_equally, lambda counts: jnp.ones_like(counts.tokens))


def seq_mean_token_sum() -> Aggregation:
    """Sum over each sequence, mean over sequences: policy gradient of the expected reward."""
    return Aggregation(_equally, lambda counts: counts.sequences)


def seq_mean_token_mean() -> Aggregation:
    """Mean over each sequence, mean over sequences: GRPO, arXiv 2402.03300 eq. 3."""

    def weigh(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        length_BT = segment_count(mask_BT, segment_ids_BT)
        return _equally(mask_BT, segment_ids_BT) / jnp.maximum(length_BT, 1.0)

    return Aggregation(weigh, lambda counts: counts.sequences)


def seq_mean_token_sum_norm(
    *, scale: Annotated[float, positive(at_most=MAX_TOKENS)]
) -> Aggregation:
    """Sum over each sequence by a constant, mean over sequences: Dr. GRPO, arXiv 2503.20783 section 3.2.

    Args:
      scale: the constant, above 0; usually the limit of response tokens. There is no default, since verl's,
      the
        width of the padded mask, changes with padding.
    """
    return Aggregation(
        lambda mask_BT, segment_ids_BT: _equally(mask_BT, segment_ids_BT) / scale,
        lambda counts: counts.sequences,
    )


AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "token-mean": token_mean,
    "token-sum": token_sum,
}


def _equally(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    del segment_ids_BT
    return masked(jnp.ones_like(mask_BT), mask_BT)
