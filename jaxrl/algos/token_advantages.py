"""Advantages of single tokens, from rewards per token.

    B rows   T tokens of a row; mask and segments as in `segments`

The reward of a whole sequence sits on its last trained token (`segments.last_tokens`). Rewards outside the
mask are ignored. Each estimator returns (advantage_BT, return_BT). Both are 0 outside the mask (unlike verl's
`gae`) and do not depend on other sequences of the row.

Not covered: bootstrapping at truncation. A truncated sequence is treated as if it had ended.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl.algos.moments import whiten
from jaxrl.algos.segments import masked, next_values, running_sum, segment_scan, windowed_scan
from jaxrl.checks import between, coefficient, token_count


def gae(
    reward_BT: jax.Array,
    value_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    gamma: Annotated[float, between(0, 1)] = 1.0,
    lam: Annotated[float, between(0, 1)] = 1.0,
    steps: Annotated[int, token_count(1)] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation: A_t = sum over k of (gamma lam)^k delta_{t+k}.

    arXiv 1506.02438 eq. 16, with delta_t = r_t + gamma V_{t+1} - V_t (eq. 9) and V = 0 after the end. t
    counts trained tokens: a hole in the mask neither discounts nor has a value. Special cases:

        Monte Carlo      lam = 1                sum of future rewards, less V_t
        TD(0)            lam = 0                delta_t
        n-step TD        lam = 1, steps = n     n rewards and the value after them, less V_t

    The advantages are not whitened; PPO whitens them with `moments.whiten`.

    Args:
      reward_BT, value_BT: float; the value of a token is that of the state before it.
      mask_BT, segment_ids_BT: as in `segments`.
      gamma: discount per trained token.
      lam: 1 relies on rewards alone, 0 on values.
      steps: maximum number of deltas to sum, at least 1; None for all.

    Returns:
      (advantage, return) [B, T]; return = advantage + value is the critic's target.
    """
    reward_BT, value_BT = masked(reward_BT, mask_BT), masked(value_BT, mask_BT)
    # `next_values` skips holes, so the text of a tool between two turns is not a step in time.
    delta_BT = reward_BT + gamma * next_values(value_BT, mask_BT, segment_ids_BT) - value_BT
    where = (delta_BT, mask_BT, segment_ids_BT)
    if steps is None:
        advantage_BT = segment_scan(*where, decay=gamma * lam)
    else:
        advantage_BT = windowed_scan(*where, decay=gamma * lam, steps=steps)
    return advantage_BT, advantage_BT + value_BT


def reinforce_plus_plus(
    reward_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    gamma: Annotated[float, between(0, 1)] = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Discounted future reward, whitened over all tokens of the batch.

    REINFORCE++, arXiv 2501.03262. Pass the whole batch of a step. The returns are not whitened.
    """
    return_BT = segment_scan(reward_BT, mask_BT, segment_ids_BT, decay=gamma)
    return whiten(return_BT, mask_BT.astype(return_BT.dtype)), return_BT


def reinforce(
    reward_BT: jax.Array,
    average_reward: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    gamma: Annotated[float, between(0, 1)] = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Discounted future reward, less the moving average of the rewards of earlier steps.

    REINFORCE (Williams 1992) with a baseline that the step's own samples have no part in, so that the
    gradient is unbiased.

    Args:
      reward_BT: float, reward of each token.
      average_reward: float, one number (`controllers.moving_average`).
      mask_BT, segment_ids_BT: as in `segments`.
      gamma: discount per trained token.
    """
    return_BT = segment_scan(reward_BT, mask_BT, segment_ids_BT, decay=gamma)
    return masked(return_BT - average_reward, mask_BT), return_BT


def remax(
    reward_BT: jax.Array, baseline_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Future reward, less the reward of the greedy answer to the same prompt.

    ReMax, arXiv 2310.10505 algorithm 1.

    Args:
      reward_BT: float, reward of each token.
      baseline_BT: float, total reward of the greedy answer, on every token of the sequence.
      mask_BT, segment_ids_BT: as in `segments`.
    """
    return_BT = segment_scan(reward_BT, mask_BT, segment_ids_BT)
    return masked(return_BT - masked(baseline_BT, mask_BT), mask_BT), return_BT


def optimal_token_baseline(
    reward_BT: jax.Array,
    logprob_BT: jax.Array,
    sum_pi_squared_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    group_BT: jax.Array,
    *,
    num_groups: int,
    importance_weight_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Future reward, less its weighted group mean at the same position; weights are gradient energies.

    arXiv 2602.07078 (OTB). w = 1 - 2 pi + sum pi^2 is the squared norm of a token's logit gradient, and
    W_t = w_1 + .. + w_t. The baseline at position t is sum(W_t G_t) / sum(W_t) over the sequences of the
    group that reach t. Positions count trained tokens, so holes in the mask change nothing (verl has a
    separate `tir_` form for them).

    A token without another sequence at its position keeps its return. verl does the same for the part of its
    longest row beyond the second longest. Equal returns give exactly 0. If all W are 0 the baseline is the
    lowest return: such tokens were certain, and their gradient is 0 anyway.

    Args:
      reward_BT, logprob_BT: float; log-probabilities of the policy at the start of the step.
      sum_pi_squared_BT: float, sum over the vocabulary of the squared probabilities.
      mask_BT, segment_ids_BT: as in `segments`, for the whole batch of a step.
      group_BT: int32, group of the token's sequence, negative if absent.
      num_groups: upper bound of the group numbers; static.
      importance_weight_BT: importance weights, or None. They multiply the gradient, and squared the energy.
    """
    # A group beyond the bound would share the last bucket below with absent tokens, or lie past it.
    live_BT = mask_BT.astype(bool) & (group_BT >= 0) & (group_BT < num_groups)
    T = mask_BT.shape[1]
    return_BT = segment_scan(reward_BT, mask_BT, segment_ids_BT)
    energy_BT = (
        1.0 - 2.0 * jnp.exp(masked(logprob_BT, mask_BT)) + masked(sum_pi_squared_BT, mask_BT)
    )
    if importance_weight_BT is not None:
        # The weight multiplies the gradient, and the energy is its squared norm.
        energy_BT = energy_BT * masked(importance_weight_BT, mask_BT) ** 2
    weight_BT = running_sum(energy_BT, live_BT, segment_ids_BT)
    place_BT = running_sum(live_BT.astype(jnp.int32), live_BT, segment_ids_BT) - 1
    # One bucket for each position of each group, and a last one for all absent tokens.
    bucket = jnp.where(live_BT, group_BT * T + place_BT, num_groups * T).reshape(-1)

    def over_place(reduce, x_BT: jax.Array) -> jax.Array:
        total = reduce(x_BT.reshape(-1), bucket, num_segments=num_groups * T + 1)
        return total[bucket].reshape(x_BT.shape)

    # Relative to the lowest return of the position: equal returns then give exactly 0, not a rounding error.
    above_BT = return_BT - over_place(jax.ops.segment_min, return_BT)
    total_BT = over_place(jax.ops.segment_sum, weight_BT)
    # If all weights are 0 the baseline is the lowest return.
    mean_BT = over_place(jax.ops.segment_sum, weight_BT * above_BT) / (total_BT + 1e-8)
    # Its baseline would be its own return, and its gradient always 0.
    alone_BT = over_place(jax.ops.segment_sum, live_BT.astype(jnp.int32)) == 1
    advantage_BT = jnp.where(alone_BT, return_BT, above_BT - mean_BT)
    return masked(advantage_BT, live_BT), return_BT


def reverse_kl(
    logprob_BT: jax.Array,
    teacher_logprob_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    coef: Annotated[float, coefficient()] = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """How much likelier a teacher finds a token: A_t = coef (log p_T(y_t | y_<t) - log p_S(y_t | y_<t)).

    The mean of -A_t over tokens of the student is the reverse KL of the student S to the teacher T (arXiv
    2306.08543 eq. 1, with samples of one token each), and A_t a policy gradient's advantage for lowering it.
    Later tokens and rewards do not count.

    Args:
      logprob_BT: the student's log-probability of its token, at the start of the step.
      teacher_logprob_BT: the teacher's, of the same token.
      mask_BT: 1 on trained tokens.
      coef: coefficient of the advantage; 0 if the loss has the KL over the whole vocabulary instead.

    Returns:
      (advantage, return), equal, [B, T], 0 outside the mask.
    """
    advantage_BT = coef * (masked(teacher_logprob_BT, mask_BT) - masked(logprob_BT, mask_BT))
    return advantage_BT, advantage_BT
