"""Coefficients that follow what they control: one number in, the next number out, once a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def adaptive(
    coef: jax.Array, mean_kl: jax.Array, *, num_sequences: int, target: float, horizon: float
) -> jax.Array:
    """Raises the KL coefficient above the target and lowers it below, by at most 20% in `horizon` sequences.

    arXiv 1909.08593 eq. 4: coef * (1 + clip(KL / target - 1, -.2, .2) * sequences / horizon).

    Args:
      coef: the coefficient so far, float.
      mean_kl: `kl.mean_by_sequence` of the step, divided; an estimate, so it may be below 0.
      num_sequences: sequences of the step.
      target: the KL aimed for, above 0.
      horizon: in sequences, above 0 and not much less than a step's.
    """
    error = jnp.clip(mean_kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * (num_sequences / horizon))


def raised_multiplier(
    multiplier: jax.Array, excess_cost: jax.Array, *, learning_rate: float
) -> jax.Array:
    """Lagrange multiplier after a step: grows while the cost is over its limit, and stays above 0.

    Safe RLHF, arXiv 2310.12773: ascent in the logarithm, log m + learning_rate * m * (mean cost - limit).

    Args:
      multiplier: m so far, above 0.
      excess_cost: mean cost of the step (or its moving average) less the limit.
      learning_rate: of the logarithm.
    """
    return multiplier * jnp.exp(learning_rate * multiplier * excess_cost)


def constrained_advantage(
    reward_advantage: jax.Array, cost_advantage: jax.Array, multiplier: jax.Array
) -> jax.Array:
    """What the policy of Safe RLHF climbs: (A_reward - m A_cost) / (1 + m), arXiv 2310.12773.

    Args:
      reward_advantage, cost_advantage: any one shape.
      multiplier: m, a scalar; the division keeps the step's size when m grows.
    """
    return (reward_advantage - multiplier * cost_advantage) / (1.0 + multiplier)
