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


def entropy_coef(coef: jax.Array, entropy: jax.Array, *, target: float) -> jax.Array:
    """Raises the entropy bonus's coefficient by .005 while the entropy is at most the target, else lowers it.

    Skywork-OR1, arXiv 2505.22312, section 4: it stays between 0 and 1. The bonus itself counts only in steps
    whose last entropy was at most the target.

    Args:
      coef: current coefficient, float.
      entropy: mean entropy of the step's tokens, in nats.
      target: desired entropy, above 0.
    """
    return jnp.clip(coef + jnp.where(entropy <= target, 0.005, -0.005), 0.0, 1.0)


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


def moving_average(average: float | None, mean: float, *, decay: float) -> float:
    """The average b after a step, decay * b + (1 - decay) * mean; after the first step the mean itself.

    Args:
      average: b of the steps before, None before the first.
      mean: mean reward of the step.
      decay: share of the old average, from 0 (the last step alone) to below 1.
    """
    return mean if average is None else decay * average + (1.0 - decay) * mean


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
