"""Losses of preference pairs: one value per pair; their sum is divided once by the number of pairs.

    w the chosen and l the rejected answer to one prompt, in this order everywhere
    r score of a reward model   C score of a cost model   p, p_ref log-probability of a whole answer

All are elementwise functions of arrays of equal shape, so each can be checked with a few numbers. Positional
arguments are arrays, named as in `SCORE_INPUTS` or `POLICY_INPUTS`. With a mask:

    loss, stats = on_pairs(PREFERENCE_LOSSES[name], arrays, mask, **settings)

`on_pairs` replaces entries outside the mask by 0 before the loss sees them, and the result is 0 there. Even a
NaN outside the mask has neither value nor gradient. `stats` are per pair too and share the mask.

Every log-sigmoid is computed as a softplus. Its value grows linearly and its slope lies between 0 and 1, so
scores far apart neither overflow nor lose their gradient.

Not covered: rankings of more than two answers, and losses without a pair (KTO).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl.algos.ratio import Loss
from jaxrl.algos.registry import array_names
from jaxrl.algos.segments import masked
from jaxrl.checks import between, coefficient, positive_coefficient


def preference_accuracy(better: jax.Array, worse: jax.Array) -> jax.Array:
    """1 where `better` is above `worse`, 0 where it is below, 0.5 where they tie; arrays of equal shape.

    A model whose head is still 0 ties everywhere and gets an accuracy of 0.5, that of a coin toss. Swapping
    the answers always turns a into 1 - a.
    """
    return (jnp.sign(better - worse) + 1.0) / 2.0


def bradley_terry(
    chosen_score: jax.Array,
    rejected_score: jax.Array,
    margin: jax.Array | float = 0.0,
    *,
    center_coef: Annotated[float, coefficient()] = 0.0,
) -> Loss:
    """Reward model: -log sigmoid(r_w - r_l - m) + center_coef * (r_w + r_l)^2.

    Bradley and Terry 1952; the margin is that of arXiv 2307.09288 eq. 2. Preferences determine scores only up
    to a constant per prompt. The second term (arXiv 2312.09244 eq. 2, with .01) centres them at 0.

    Args:
      chosen_score, rejected_score: r_w and r_l.
      margin: m, the annotated strength of the preference, 0 or more.
      center_coef: coefficient of the centring term; 0 turns it off.

    Returns:
      (loss, stats): `accuracy` (see `preference_accuracy`), `chosen_score`, `rejected_score`, and their
      difference `score_margin`.
    """
    difference = chosen_score - rejected_score
    loss = jax.nn.softplus(margin - difference)
    loss = loss + center_coef * (chosen_score + rejected_score) ** 2
    return loss, {
        "accuracy": preference_accuracy(chosen_score, rejected_score),
        "chosen_score": chosen_score,
        "rejected_score": rejected_score,
        "score_margin": difference,
    }


def cost_preference(
    chosen_cost: jax.Array,
    rejected_cost: jax.Array,
    chosen_harm: jax.Array,
    rejected_harm: jax.Array,
) -> Loss:
    """Cost model of Safe RLHF: the rejected answer gets the higher cost, and harmful answers a positive one.

    arXiv 2310.12773 eq. 6: -log sigmoid(C_l - C_w) - log sigmoid(s_w C_w) - log sigmoid(s_l C_l). In the
    paper w is the more harmful answer; here w is the chosen one, the safer of the two, as everywhere in this
    file. The last two terms put the boundary between harmless and harmful at 0. Limits on the mean cost
    refer to it.

    Args:
      chosen_cost, rejected_cost: C_w and C_l.
      chosen_harm, rejected_harm: s_w and s_l: 1 for a harmful answer, -1 for a harmless one, 0 without a
        label, which drops the answer's sign term.

    Returns:
      (loss, stats): `accuracy` of the order; `sign_accuracy`, the share of labelled answers whose cost has
      the right sign (0.5 without labels); `chosen_cost`, `rejected_cost`.
    """
    loss = jax.nn.softplus(chosen_cost - rejected_cost)
    rights, judged = jnp.zeros_like(loss), jnp.zeros_like(loss)
    for cost, harm in ((chosen_cost, chosen_harm), (rejected_cost, rejected_harm)):
        # An answer without a label (0) has no sign to learn.
        loss = loss + masked(jax.nn.softplus(-harm * cost), harm)
        rights = rights + masked(preference_accuracy(harm * cost, jnp.zeros_like(cost)), harm)
        judged = judged + masked(jnp.ones_like(cost), harm)
    return loss, {
        "accuracy": preference_accuracy(rejected_cost, chosen_cost),
        "sign_accuracy": jnp.where(judged > 0, rights / jnp.maximum(judged, 1.0), 0.5),
        "chosen_cost": chosen_cost,
        "rejected_cost": rejected_cost,
    }


def dpo(
    chosen_logprob: jax.Array,
    rejected_logprob: jax.Array,
    chosen_ref_logprob: jax.Array,
    rejected_ref_logprob: jax.Array,
    *,
    beta: Annotated[float, positive_coefficient()],
    label_smoothing: Annotated[float, between(0, 0.5, has_high=False)] = 0.0,
) -> Loss:
    """Direct preference optimisation: -(1 - e) log sigmoid(z) - e log sigmoid(-z), z = beta * (h_w - h_l).

    arXiv 2305.18290 eq. 7 is the case e = 0, with h = p - p_ref. The second term (Mitchell 2023,
    "conservative DPO") assumes that a share e of the labels is wrong; it gives z a finite optimum.

    Args:
      chosen_logprob, rejected_logprob: p, summed over the tokens of each answer.
      chosen_ref_logprob, rejected_ref_logprob: p_ref, the same sums under the frozen policy.
      beta: coefficient of the KL penalty, above 0.
      label_smoothing: e, assumed share of wrong labels, from 0 to below 0.5.

    Returns:
      (loss, stats): `chosen_reward` and `rejected_reward`, the implied rewards beta * h; `accuracy` of their
      order, and `reward_margin`, their difference z.
    """
    stats = _implied_rewards(
        chosen_logprob, rejected_logprob, chosen_ref_logprob, rejected_ref_logprob, beta=beta
    )
    z = stats["reward_margin"]
    # softplus(z) = softplus(-z) + z, so one softplus serves both terms.
    return jax.nn.softplus(-z) + label_smoothing * z, stats


def ipo(
    chosen_logprob: jax.Array,
    rejected_logprob: jax.Array,
    chosen_ref_logprob: jax.Array,
    rejected_ref_logprob: jax.Array,
    *,
    beta: Annotated[float, positive_coefficient()],
) -> Loss:
    """Identity preference optimisation: (h_w - h_l - 1 / (2 beta))^2.

    arXiv 2310.12036 eq. 17. DPO pushes the answers of a pair apart without bound; IPO stops at a finite
    distance. h sums over tokens, as in the paper. Some libraries take means, which need another beta.

    Args and stats as for `dpo`.
    """
    stats = _implied_rewards(
        chosen_logprob, rejected_logprob, chosen_ref_logprob, rejected_ref_logprob, beta=beta
    )
    # The margin is beta times the difference of the paper.
    return (stats["reward_margin"] / beta - 1.0 / (2.0 * beta)) ** 2, stats


SCORE_INPUTS = (
    "chosen_score",
    "rejected_score",
    "chosen_cost",
    "rejected_cost",
    "chosen_harm",
    "rejected_harm",
    "margin",
)
"""Names that the positional arguments of a score loss may have; costs are the scores of a cost model."""

POLICY_INPUTS = ("chosen_logprob", "rejected_logprob", "chosen_ref_logprob", "rejected_ref_logprob")
"""Names that the positional arguments of a policy loss may have; sums over the tokens of an answer."""


def on_pairs(
    loss: Callable[..., Loss], arrays: Mapping[str, jax.Array], mask: jax.Array, **settings
) -> Loss:
    """Computes a preference loss where the mask is 1. Elsewhere the result is 0, even for NaN inputs.

    Args:
      loss: an entry of `PREFERENCE_LOSSES`, or a function of the same form.
      arrays: arrays by name, all of one shape.
      mask: array of that shape, 1 on pairs.
      settings: keyword-only arguments of the loss.
    """
    # Before the loss too: 0 after it would still let a NaN into the gradient, as 0 * NaN.
    inside = (masked(arrays[name], mask) for name in array_names(loss))
    return jax.tree.map(lambda x: masked(x, mask), loss(*inside, **settings))


PREFERENCE_LOSSES: dict[str, Callable[..., Loss]] = {
    "bradley_terry": bradley_terry,
    "cost_preference": cost_preference,
    "dpo": dpo,
    "ipo": ipo,
}


def _implied_rewards(
    chosen_logprob: jax.Array,
    rejected_logprob: jax.Array,
    chosen_ref_logprob: jax.Array,
    rejected_ref_logprob: jax.Array,
    *,
    beta: float,
) -> dict[str, jax.Array]:
    """The implied rewards beta * (p - p_ref), under which the policy would be optimal."""
    # Each answer against its own reference first. These differences are small, but the sums of thousands of
    # log-probabilities are large and would lose digits.
    chosen = beta * (chosen_logprob - chosen_ref_logprob)
    rejected = beta * (rejected_logprob - rejected_ref_logprob)
    return {
        "accuracy": preference_accuracy(chosen, rejected),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
    }
