"""Advantages: from rewards to how much better than expected each token was.

N prompts   G answers per prompt
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def group_relative(
    reward_NG: jax.Array, *, normalize_std: bool = True, epsilon: float = 1e-6
) -> jax.Array:
    """Reward relative to the other answers to the same prompt: A = (R - mean) / (std + epsilon).

    DAPO eq. 9 (GRPO). The deviation is the unbiased one, as in verl. A group with equal rewards gives
    exactly 0; a group of one has mean 0 and deviation 1, as in verl, and so keeps its reward.

    Args:
      reward_NG: float, one reward per answer.
      normalize_std: divide by the group's standard deviation; False is Dr. GRPO.
      epsilon: added to the deviation.

    Returns:
      [N, G], same type.
    """
    G = reward_NG.shape[1]
    if G == 1:
        return reward_NG / (1.0 + epsilon) if normalize_std else reward_NG
    # Relative to the first answer before the mean: the float mean of equal rewards may miss them by a
    # rounding error, which a deviation of the same size would blow up to an advantage.
    shifted_NG = reward_NG - reward_NG[:, :1]
    centered_NG = shifted_NG - shifted_NG.mean(axis=1, keepdims=True)
    if not normalize_std:
        return centered_NG
    variance_N1 = jnp.sum(centered_NG**2, axis=1, keepdims=True) / (G - 1)
    return centered_NG / (jnp.sqrt(variance_N1) + epsilon)
