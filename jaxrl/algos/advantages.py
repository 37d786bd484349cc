"""The registry of advantage estimators: how much better than expected a sequence or a token was.

`group_advantages` has estimators for whole sequences (one advantage [B]), `token_advantages` for single
tokens (advantage and return [B, T]). The positional arguments of an estimator are the arrays that it needs.
`registry.inputs_of` lists them, so that a config can be checked before it runs:

    grpo, grpo_batch_std, grpo_passk,
    rloo, gpg                             score_B group_B
    opo, reinforce_plus_plus_baseline     score_B group_B length_B
    gdpo                                  score_BK group_B length_B weight_K
    gae                                   reward_BT value_BT mask_BT segment_ids_BT
    reinforce_plus_plus                   reward_BT mask_BT segment_ids_BT
    reinforce                             reward_BT average_reward mask_BT segment_ids_BT
    reverse_kl                            logprob_BT teacher_logprob_BT mask_BT
    remax                                 reward_BT baseline_BT mask_BT segment_ids_BT
    optimal_token_baseline                reward_BT logprob_BT sum_pi_squared_BT mask_BT segment_ids_BT
                                          group_BT

B sequences in the first three lines, else rows of T tokens
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.algos import group_advantages, token_advantages

ADVANTAGES: dict[str, Callable] = {
    "gae": token_advantages.gae,
    "gdpo": group_advantages.gdpo,
    "gpg": group_advantages.gpg,
    "grpo": group_advantages.grpo,
    "grpo_batch_std": group_advantages.grpo_batch_std,
    "grpo_passk": group_advantages.grpo_passk,
    "opo": group_advantages.opo,
    "optimal_token_baseline": token_advantages.optimal_token_baseline,
    "reinforce": token_advantages.reinforce,
    "reinforce_plus_plus": token_advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": group_advantages.reinforce_plus_plus_baseline,
    "remax": token_advantages.remax,
    "reverse_kl": token_advantages.reverse_kl,
    "rloo": group_advantages.rloo,
}
