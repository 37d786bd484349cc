"""Losses of the Tinker API: per token, for explicit targets, to be summed with nothing divided.

    B rows   T tokens of a row   r = exp(logprob - logprobs)   A advantages   sg stop gradient

`logprob` is that of the target under the policy being trained. All other arrays come with the batch, under
the names that the API gives them: `logprobs` are the sampler's. Numbers such as a clip's bounds are arrays
too, one value per token, so that another number compiles nothing. Targets outside of a loss have weight or
advantage 0, and add nothing.

Not covered: custom losses, which clients compute from log-probabilities, and `stable_reinforce`, which is not
published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxrl.algos import policy_losses
from jaxrl.algos.kinks import clip
from jaxrl.algos.policy_losses import MAX_SEQUENCE_LOG_RATIO
from jaxrl.algos.ratio import bounded_log_ratio, surrogate
from jaxrl.algos.segments import masked, segment_mean


@dataclasses.dataclass(frozen=True)
class SummedLoss:
    """A loss and its arrays.

    Attributes:
      function: (logprob, segment_ids, **arrays) -> loss per token, of the shape of `logprob`.
      inputs: names of the arrays that a batch must have.
      numbers: names and defaults of the arrays that a batch may have; a default is one number for all tokens.
    """

    function: Callable[..., jax.Array]
    inputs: tuple[str, ...]
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*self.inputs, *self.numbers)


def cross_entropy(logprob: jax.Array, _: jax.Array, *, weights: jax.Array) -> jax.Array:
    """-weights logprob, for weights of any sign."""
    return -weights * logprob


def importance_sampling(
    logprob: jax.Array, _: jax.Array, *, logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    """-r A."""
    return -jnp.exp(bounded_log_ratio(logprob, logprobs)) * advantages


def ppo(
    logprob: jax.Array,
    _: jax.Array,
    *,
    logprobs: jax.Array,
    advantages: jax.Array,
    clip_low_threshold: jax.Array,
    clip_high_threshold: jax.Array,
) -> jax.Array:
    """-min(r A, clip(r, low, high) A), arXiv 1707.06347 eq. 7; the thresholds are bounds of r itself."""
    ratio = jnp.exp(bounded_log_ratio(logprob, logprobs))
    return _clipped(ratio, advantages, clip_low_threshold, clip_high_threshold)


def cispo(
    logprob: jax.Array,
    _: jax.Array,
    *,
    logprobs: jax.Array,
    advantages: jax.Array,
    clip_low_threshold: jax.Array,
    clip_high_threshold: jax.Array,
) -> jax.Array:
    """-sg(clip(r, low, high)) A logprob, arXiv 2506.13585 eq. 4."""
    ratio = jnp.exp(bounded_log_ratio(logprob, logprobs))
    # `jnp.clip`, not `kinks.clip`: the weight has no gradient, so ties do not matter.
    weight = jax.lax.stop_gradient(jnp.clip(ratio, clip_low_threshold, clip_high_threshold))
    return -weight * advantages * logprob


def dro(
    logprob: jax.Array, _: jax.Array, *, logprobs: jax.Array, advantages: jax.Array, beta: jax.Array
) -> jax.Array:
    """-(A logprob - beta / 2 (log r)^2), arXiv 2405.19107."""
    # `policy_losses.dro` takes one number for all tokens, and computes with an array as well.
    return policy_losses.dro(logprob, logprobs, advantages, beta=beta)[0]  # pyright: ignore


def gspo(
    logprob_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    logprobs: jax.Array,
    advantages: jax.Array,
    sequence_ratio_mask: jax.Array,
    clip_low_threshold: jax.Array,
    clip_high_threshold: jax.Array,
) -> jax.Array:
    """-min(s A, clip(s, low, high) A) of every masked token, arXiv 2507.18071 eq. 5 and 7.

    s is the geometric mean of r over the sequence's tokens with `sequence_ratio_mask` 1.
    """
    mask_BT = sequence_ratio_mask
    log_ratio_BT = masked(logprob_BT, mask_BT) - masked(logprobs, mask_BT)
    mean_BT = segment_mean(log_ratio_BT, mask_BT, segment_ids_BT)
    # Only the mean goes through exp, so only the mean is bounded: bounding each token would change it.
    ratio_BT = jnp.exp(clip(mean_BT, highest=MAX_SEQUENCE_LOG_RATIO))
    loss_BT = _clipped(ratio_BT, advantages, clip_low_threshold, clip_high_threshold)
    return masked(loss_BT, mask_BT)


def _clipped(
    ratio: jax.Array, advantages: jax.Array, lowest: jax.Array, highest: jax.Array
) -> jax.Array:
    # `surrogate` takes distances from 1.
    widths = {"clip_low": 1.0 - lowest, "clip_high": highest - 1.0}
    return surrogate(ratio, advantages, **widths)[0]  # pyright: ignore[reportArgumentType]


_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

SUMMED_LOSSES: dict[str, SummedLoss] = {
    "cross_entropy": SummedLoss(cross_entropy, ("weights",)),
    "importance_sampling": SummedLoss(importance_sampling, _SAMPLED),
    "ppo": SummedLoss(ppo, _SAMPLED, _CLIP),
    "cispo": SummedLoss(cispo, _SAMPLED, _CLIP),
    "dro": SummedLoss(dro, _SAMPLED, {"beta": 0.05}),
    # A sequence's ratio hardly moves: bounds of section 5.1 of the paper.
    "gspo": SummedLoss(
        gspo,
        (*_SAMPLED, "sequence_ratio_mask"),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
}
