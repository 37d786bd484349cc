"""The KL penalty: estimates of KL(policy || reference), in the loss or in the reward.

    B rows   T tokens of a row   V vocabulary   d = logprob - ref_logprob of the sampled token

Estimates from the sampled token alone (k1, k2, k3: J. Schulman, "Approximating KL divergence", 2020), which
take arrays of any one shape:

    name    value              gradient      as a value       as a loss on the policy's own tokens
    k1      d                  1             unbiased         useless: its gradient has expectation 0
    abs     |d|                sign(d)       biased           biased
    k2      d^2 / 2            d             biased           unbiased
    k3      e^-d - 1 + d       1 - e^-d      unbiased, >= 0   that of KL(reference || policy)
    name+   of name            d             as name          unbiased (straight-through: gradient of k2)

`over_vocabulary` ("full" in a config) sums over the vocabulary and is exact, value and gradient. In the
reward (`penalized_reward`) the value counts, in the loss the gradient.

Not covered: divergences other than KL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.algos import kinks
from jaxrl.algos.segments import last_tokens, masked, segment_mean

Estimate = Callable[[jax.Array, jax.Array], jax.Array]

# Bounds of k3, as in verl: on the log-ratio before exp, and on the value. Beyond either the gradient is 0, so
# a token more than 2.5 nats *below* the reference is no longer pulled back; "k3+" pulls everywhere.
MAX_LOG_RATIO = 20.0
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
    d = kinks.clip(logprob - ref_logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that 1 would swallow near d = 0.
    return kinks.clip(jnp.expm1(-d) + d, highest=MAX_K3)


def straight_through(estimate: Estimate) -> Estimate:
    """The value of `estimate` with the gradient of k2, which is unbiased for that of the KL."""

    @functools.wraps(estimate)
    def through(logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
        slope = k2(logprob, ref_logprob)
        value = estimate(logprob, ref_logprob)
        # Exactly 0 plus the value; k2 may be infinite where the value is bounded.
        finite = masked(slope, jnp.isfinite(slope))
        return finite - jax.lax.stop_gradient(finite) + jax.lax.stop_gradient(value)

    return through


# The name of `over_vocabulary` in a config; no estimate from the sampled token alone.
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
    """The KL itself: sum over the vocabulary of p (log p - log q).

    A token of probability 0 under p adds nothing; one of probability 0 under q alone makes the KL infinite.

    Args:
      logprobs: log p of whole distributions, temperature applied, [..., V].
      ref_logprobs: log q, of the reference.

    Returns:
      [...], in nats.
    """
    possible = logprobs > -jnp.inf
    log_ratio = masked(logprobs, possible) - masked(ref_logprobs, possible)
    return jnp.sum(jnp.exp(logprobs) * log_ratio, axis=-1)


def penalized_reward(
    reward_BT: jax.Array, kl_BT: jax.Array, mask_BT: jax.Array, *, coef: float | jax.Array
) -> jax.Array:
    """Reward less the KL penalty: r_t - coef * KL_t (InstructGPT, arXiv 2203.02155 eq. 2).

    Args:
      reward_BT: float, rewards by token; a sequence's score sits on its last trained token.
      kl_BT: an estimate of each token's KL; no gradient is taken through it.
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
    """What the adaptive controller looks at: the mean over sequences of each one's mean KL.

    Returns:
      (sum of the sequences' means, number of sequences with a trained token), each adding up over parts.
    """
    last_BT = last_tokens(mask_BT, segment_ids_BT)
    mean_BT = segment_mean(kl_BT, mask_BT, segment_ids_BT)
    return masked(mean_BT, last_BT).sum(), last_BT.sum()
