"""Per-token losses in the form the actor's update takes them."""

from __future__ import annotations

import jax

from jaxrl.algos import policy_losses
from jaxrl.roles.actor import TokenLoss
from jaxrl.types import TrainBatch


def supervised(
    logprob: jax.Array, entropy: jax.Array, micro: TrainBatch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Negative log-likelihood of the tokens in the mask."""
    del entropy, micro
    return -logprob, {}


def clipped_policy(*, clip_low: float, clip_high: float, dual_clip: float) -> TokenLoss:
    """The clipped surrogate of `algos.policy_losses.clipped` on a batch's own advantages."""

    def loss(logprob: jax.Array, entropy: jax.Array, micro: TrainBatch):
        del entropy
        return policy_losses.clipped(
            logprob,
            micro.old_logprob,
            micro.advantage,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )

    return loss
