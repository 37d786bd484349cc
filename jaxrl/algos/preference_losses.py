"""Losses of preference pairs: one value per pair, to be summed and divided once by the number of pairs.

    two answers to one prompt: the chosen one w and the rejected one l, in this order everywhere
    r score of a reward model   C score of a cost model   p, p_ref log-probability of a whole answer

Elementwise functions of arrays of one shape, in any arrangement, so that each can be checked with a few
numbers. Their arrays are taken by name, those of `SCORE_INPUTS` or of `POLICY_INPUTS`; with a mask:

    loss, stats = on_pairs(PREFERENCE_LOSSES[name], arrays, mask, **settings)

There, what lies outside the mask is replaced before the loss sees it and gets 0: whatever it holds, even NaN,
has neither value nor gradient. `stats` are per pair too and share the mask.

Every logarithm of a sigmoid is a softplus, whose value grows no faster than its argument and whose slope lies
between 0 and 1: scores far apart neither overflow nor lose their gradient.

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
    """1 where `better` is above `worse`, 0 where it is below, a half where they tie; any one shape.

    A model whose head still is 0 ties everywhere: with a half it counts as the coin toss it is, and swapping
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

    Bradley and Terry 1952; the margin from arXiv 2307.09288 eq. 2. A preference fixes scores up to a constant
    per prompt; the second term (arXiv 2312.09244 eq. 2 has it with .01) fixes the constant at 0.

    Args:
      chosen_score, rejected_score: r_w and r_l.
      margin: m, how much better the chosen answer was said to be, 0 or more.
      center_coef: of the pull to 0; 0 has none.

    Returns:
      (loss, stats): `accuracy` as of `preference_accuracy`, `chosen_score`, `rejected_score`, and
      `score_margin`, their difference.
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
    """Cost model of Safe RLHF: the rejected answer costs more, and a cost is above 0 if the answer does harm.

    arXiv 2310.12773 eq. 6: -log sigmoid(C_l - C_w) - log sigmoid(s_w C_w) - log sigmoid(s_l C_l). In the
    paper w is the more harmful answer; here, as everywhere, it is the chosen one, the safer of the two. The
    last two terms make 0 the line between harmless and harmful, which a limit on the mean cost refers to.

    Args:
      chosen_cost, rejected_cost: C_w and C_l.
      chosen_harm, rejected_harm: s_w and s_l, 1 for an answer that does harm, -1 for one that does not, 0 for
        one that nobody has judged, which has no such term.

    Returns:
      (loss, stats): `accuracy` of the order, `sign_accuracy` the mean over the judged answers of whether the
      cost has the right sign (a half without any), `chosen_cost`, `rejected_cost`.
    """
    loss = jax.nn.softplus(chosen_cost - rejected_cost)
    rights, judged = jnp.zeros_like(loss), jnp.zeros_like(loss)
    for cost, harm in ((chosen_cost, chosen_harm), (rejected_cost, rejected_harm)):
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

    arXiv 2305.18290 eq. 7, h = p - p_ref, with e = 0. The second term (Mitchell 2023, "conservative DPO") is
    for labels of which a share e is wrong: it gives z a finite optimum.

    Args:
      chosen_logprob, rejected_logprob: p, summed over the tokens of each answer.
      chosen_ref_logprob, rejected_ref_logprob: p_ref, likewise, of the frozen policy.
      beta: coefficient of the KL penalty, above 0.
      label_smoothing: e, from 0 to below a half.

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

    arXiv 2310.12036 eq. 17. Where DPO pushes the answers of a pair apart for ever, this stops at a distance.
    As in the paper h is of sums over tokens; some libraries take means instead, for which another beta fits.

    Args and stats as for `dpo`.
    """
    stats = _implied_rewards(
        chosen_logprob, rejected_logprob, chosen_ref_logprob, rejected_ref_logprob, beta=beta
    )
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
"""What a loss of scores may take, by the names of its positional arguments; a cost model scores costs."""

POLICY_INPUTS = (
    "chosen_logprob",
    "rejected_logprob",
    "chosen_ref_logprob",
    "rejected_ref_logprob",
)
"""What a loss of policies may take: sums over the tokens of an answer."""


def on_pairs(
    loss: Callable[..., Loss], arrays: Mapping[str, jax.Array], mask: jax.Array, **settings
) -> Loss:
    """A preference loss where the mask is 1, and 0 elsewhere, whatever the arrays hold there.

    Args:
      loss: an entry of `PREFERENCE_LOSSES`, or a function of the same form.
      arrays: by name, of one shape.
      mask: of that shape.
      settings: its keyword-only arguments.
    """
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
    """The rewards under which the policy would be optimal, up to a constant per prompt."""
    # Each answer against its own reference first: these differences are small, the sums themselves are not.
    chosen = beta * (chosen_logprob - chosen_ref_logprob)
    rejected = beta * (rejected_logprob - rejected_ref_logprob)
    return {
        "accuracy": preference_accuracy(chosen, rejected),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
    }
