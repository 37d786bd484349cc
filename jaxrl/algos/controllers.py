"""Feedback controllers: once a step, the next value of a coefficient from the last one and a measurement."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def adaptive(
    coef: jax.Array, mean_kl: jax.Array, *, num_sequences: int, target: float, horizon: float
) -> jax.Array:
    """Raises the KL coefficient while the KL is above target, else lowers it, at most 20% per `horizon`.

    arXiv 1909.08593 eq. 4: coef * (1 + clip(KL / target - 1, -.2, .2) * sequences / horizon).

    Args:
      coef: current coefficient, float.
      mean_kl: mean KL of the step (`kl.mean_by_sequence`, divided). It is an estimate and may be negative.
      num_sequences: sequences of the step.
      target: desired KL, above 0.
      horizon: a number of sequences, above 0 and not much smaller than that of a step.
    """
    error = jnp.clip(mean_kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * (num_sequences / horizon))


def raised_multiplier(
    multiplier: jax.Array, excess_cost: jax.Array, *, learning_rate: float
) -> jax.Array:
    """The Lagrange multiplier after a step. It grows while the cost is over its limit, and stays positive.

    Safe RLHF, arXiv 2310.12773: gradient ascent on log m, log m + learning_rate * m * (mean cost - limit).

    Args:
      multiplier: current m, above 0.
      excess_cost: mean cost of the step (or its moving average) less the limit.
      learning_rate: learning rate of log m.
    """
    return multiplier * jnp.exp(learning_rate * multiplier * excess_cost)


def constrained_advantage(
    reward_advantage: jax.Array, cost_advantage: jax.Array, multiplier: jax.Array
) -> jax.Array:
    """The advantage that the policy of Safe RLHF maximises: (A_reward - m A_cost) / (1 + m).

    Safe RLHF, arXiv 2310.12773.

    Args:
      reward_advantage, cost_advantage: arrays of equal shape.
      multiplier: m, a scalar. Dividing by 1 + m keeps the size of the advantage when m grows.
    """
    return (reward_advantage - multiplier * cost_advantage) / (1.0 + multiplier)
