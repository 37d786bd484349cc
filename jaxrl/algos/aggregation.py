"""From losses per token to the loss of a batch. The result is the same for any split into microbatches.

    B rows   T tokens of a row; mask and segments as in `segments`

An aggregation gives each token a weight, and the sum over all microbatches one divisor:

    mode                       weight of a trained token          divided by
    token-mean                 1                                  tokens
    token-sum                  1                                  1
    seq-mean-token-sum         1                                  sequences
    seq-mean-token-mean        1 / its sequence's tokens          sequences
    seq-mean-token-sum-norm    1 / scale                          sequences

    aggregation = AGGREGATIONS["token-mean"]()
    counts      = count(mask_BT, segment_ids_BT)          # of the whole minibatch, all microbatches
    loss        = sum over microbatches of aggregation.total(...) / aggregation.divisor(counts)

Counts can be added over microbatches and shards. If the loss itself rejects tokens, the counts are known only
at the end: they are then summed along with the losses, and the division comes last.

Counts use the mask after rejection. A rejected token leaves both sum and divisor (in verl it stays in the
divisor), and so does a sequence that lost all its tokens. If everything is rejected, the loss and its
gradient are 0 and `tokens` is 0.
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
    """Counts that a loss may be divided by. Add those of parts with `jax.tree.map(jnp.add, ...)`.

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
      divide_by: (Counts of the whole minibatch) -> the divisor.
    """

    weigh: Callable[[jax.Array, jax.Array], jax.Array]
    divide_by: Callable[[Counts], jax.Array]

    def total(self, loss_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The weighted sum over one microbatch, undivided. NaN outside the mask is ignored."""
        weight_BT = self.weigh(mask_BT, segment_ids_BT).astype(loss_BT.dtype)
        return jnp.sum(weight_BT * masked(loss_BT, mask_BT))

    def divisor(self, counts: Counts) -> jax.Array:
        """The divisor of the summed `total`s. At least 1, so that an empty minibatch has loss 0, not NaN."""
        return jnp.maximum(self.divide_by(counts), 1.0)


def count(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> Counts:
    """Trained tokens and sequences of a microbatch, or of any larger part of a batch."""
    ones_BT = masked(jnp.ones_like(mask_BT), mask_BT)
    # The sum over last tokens counts each sequence once, wherever its tokens lie in the row.
    return Counts(ones_BT.sum(), last_tokens(mask_BT, segment_ids_BT).sum())


def token_mean() -> Aggregation:
    """Every token weighs the same: DAPO eq. 8, over the whole minibatch."""
    return Aggregation(_equally, lambda counts: counts.tokens)


def token_sum() -> Aggregation:
    """The plain sum. The learning rate must then be chosen for the batch size."""
    return Aggregation(_equally, lambda counts: jnp.ones_like(counts.tokens))


def seq_mean_token_sum() -> Aggregation:
    """Sum over each sequence, mean over sequences: the policy gradient of the expected reward."""
    return Aggregation(_equally, lambda counts: counts.sequences)


def seq_mean_token_mean() -> Aggregation:
    """Mean over each sequence, mean over sequences: GRPO, arXiv 2402.03300 eq. 3."""

    def weigh(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        length_BT = segment_count(mask_BT, segment_ids_BT)
        # Padding has length 0. Its weight is 0 already, but 0 / 0 is NaN.
        return _equally(mask_BT, segment_ids_BT) / jnp.maximum(length_BT, 1.0)

    return Aggregation(weigh, lambda counts: counts.sequences)


def seq_mean_token_sum_norm(
    *, scale: Annotated[float, positive(at_most=MAX_TOKENS)]
) -> Aggregation:
    """Sum over each sequence divided by a constant, mean over sequences.

    Dr. GRPO, arXiv 2503.20783 section 3.2.

    Args:
      scale: the constant, above 0; usually the limit of response tokens. It has no default: that of verl, the
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
