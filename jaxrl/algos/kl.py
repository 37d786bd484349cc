"""The KL penalty: estimates of KL(policy || reference), in the loss or in the reward.

    B rows   T tokens of a row   V vocabulary   d = logprob - ref_logprob of the sampled token

Estimates from the sampled token alone (k1, k2, k3: J. Schulman, "Approximating KL divergence", 2020). They
take arrays of equal shape:

    name    value              gradient      as a value       as a loss on the policy's own tokens
    k1      d                  1             unbiased         useless: its gradient has expectation 0
    abs     |d|                sign(d)       biased           biased
    k2      d^2 / 2            d             biased           unbiased
    k3      e^-d - 1 + d       1 - e^-d      unbiased, >= 0   that of KL(reference || policy)
    name+   of name            d             as name          unbiased (straight-through: gradient of k2)

`over_vocabulary` ("full" in a config) sums over the vocabulary; its value and gradient are exact. In the
reward (`penalized_reward`) only the value matters, in the loss only the gradient.

Not covered: divergences other than KL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.algos import kinks
from jaxrl.algos.ratio import bounded_log_ratio
from jaxrl.algos.segments import last_tokens, masked, segment_mean

Estimate = Callable[[jax.Array, jax.Array], jax.Array]

# The bound on the value of k3, as in verl; `bounded_log_ratio` bounds the log-ratio before exp. Beyond either
# bound the gradient is 0. A token more than 2.6 nats *below* the reference (e^2.6 - 1 - 2.6 = 9.9) is no
# longer pulled back; "k3+" has a gradient everywhere.
MAX_K3 = 10.0


def k1(logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
    """The log-ratio itself, d."""
    return logprob - ref_logprob


def absolute(logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
    """|d|, whose gradient is 0 where the policies agree."""
    return kinks.absolute(logprob - ref_logprob)


def k2(logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
    """d^2 / 2."""
    return 0.5 * (logprob - ref_logprob) ** 2


def k3(logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
    """e^-d - 1 + d, GRPO's choice (arXiv 2402.03300 eq. 4), bounded by MAX_K3."""
    d = bounded_log_ratio(logprob, ref_logprob)
    # expm1 keeps the digits that 1 would swallow near d = 0.
    return kinks.clip(jnp.expm1(-d) + d, highest=MAX_K3)


def straight_through(estimate: Estimate) -> Estimate:
    """Gives `estimate` the gradient of k2, an unbiased estimate of the gradient of the KL."""

    @functools.wraps(estimate)
    def through(logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
        slope = k2(logprob, ref_logprob)
        value = estimate(logprob, ref_logprob)
        # finite - sg(finite) is exactly 0, so the value is that of `estimate`. k2 may overflow where the
        # value is bounded, and inf - inf would be NaN.
        finite = masked(slope, jnp.isfinite(slope))
        return finite - jax.lax.stop_gradient(finite) + jax.lax.stop_gradient(value)

    return through


# The name of `over_vocabulary` in a config. It is not in `KL_ESTIMATES`, as it needs whole distributions.
FULL = "full"

KL_ESTIMATES: dict[str, Estimate] = {
    "abs": absolute,
    "abs+": straight_through(absolute),
    "k1": k1,
    "k1+": straight_through(k1),
    "k2": k2,
    "k2+": straight_through(k2),
    "k3": k3,
    "k3+": straight_through(k3),
}


def over_vocabulary(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """The exact KL: sum over the vocabulary of p (log p - log q).

    A token of probability 0 under p adds nothing. A token of probability 0 under q alone makes the KL
    infinite.

    Args:
      logprobs: log p over the vocabulary, temperature applied, [..., V].
      ref_logprobs: log q of the reference, [..., V].

    Returns:
      [...], in nats.
    """
    # 0 times -inf is NaN, so impossible tokens are taken out before the product.
    possible = logprobs > -jnp.inf
    log_ratio = masked(logprobs, possible) - masked(ref_logprobs, possible)
    return jnp.sum(jnp.exp(logprobs) * log_ratio, axis=-1)


def penalized_reward(
    reward_BT: jax.Array, kl_BT: jax.Array, mask_BT: jax.Array, *, coef: float | jax.Array
) -> jax.Array:
    """Reward less the KL penalty: r_t - coef * KL_t (InstructGPT, arXiv 2203.02155 eq. 2).

    Args:
      reward_BT: float, reward of each token; the score of a sequence sits on its last trained token.
      kl_BT: KL estimate of each token; no gradient passes through it.
      mask_BT: 1 on trained tokens.
      coef: coefficient of the KL penalty.

    Returns:
      [B, T], 0 outside the mask.
    """
    penalty_BT = coef * jax.lax.stop_gradient(masked(kl_BT, mask_BT))
    return masked(masked(reward_BT, mask_BT) - penalty_BT, mask_BT)


def mean_by_sequence(
    kl_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The input of the adaptive controller: the mean over sequences of the mean KL of each.

    Returns:
      (sum of the sequence means, number of sequences with a trained token). Both can be added over parts of
      a batch.
    """
    # Every token of a sequence holds its mean, and one of them is to count.
    last_BT = last_tokens(mask_BT, segment_ids_BT)
    mean_BT = segment_mean(kl_BT, mask_BT, segment_ids_BT)
    return masked(mean_BT, last_BT).sum(), last_BT.sum()
