"""Clip-Cov and KL-Cov: losses that mask or penalise the few tokens that lower the entropy most.

    B rows   T tokens of a row

arXiv 2505.22617 (The Entropy Mechanism): entropy falls with the covariance of log-probability and advantage,
and a few tokens account for most of the covariance. There are two stages. The tokens are selected over the
whole minibatch, so that the choice does not depend on how it is split:

    covariance_BT = covariance(old_logprob_BT, advantage_BT, mask_BT)     # once, over the whole minibatch
    selected_BT   = select_random(key, covariance_BT, mask_BT, ...)       # Clip-Cov
    selected_BT   = select_highest(key, covariance_BT, mask_BT, ...)      # KL-Cov
    loss, stats   = clip_cov(logprob, old_logprob, advantage, selected=..., ...)     # in any microbatch

verl differs: it selects again in every microbatch, from the log-probabilities of the policy being trained and
with torch's generator. Here selection uses the log-probabilities at the start of the step (the same ones in
the first update), and the draw is a function of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jaxrl.algos import kinks
from jaxrl.algos.ratio import ClipWidth, Loss, bounded_log_ratio, flag, surrogate
from jaxrl.algos.segments import masked
from jaxrl.checks import between, coefficient, score


def covariance(old_logprob_BT: jax.Array, advantage_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Each token's share of cov(log p, A): (log p - its mean) * (A - its mean), eq. 10.

    Args:
      old_logprob_BT: log-probability at the start of the step.
      advantage_BT: the tokens' advantages.
      mask_BT: 1 on trained tokens. The means run over all of them, so pass the whole minibatch.

    Returns:
      [B, T], 0 outside the mask.
    """
    count = jnp.maximum(mask_BT.astype(bool).sum().astype(old_logprob_BT.dtype), 1.0)

    def centered(x_BT: jax.Array) -> jax.Array:
        x_BT = masked(x_BT, mask_BT)
        return masked(x_BT - x_BT.sum() / count, mask_BT)

    return centered(old_logprob_BT) * centered(advantage_BT)


def select_highest(
    key: Any,
    covariance_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    fraction: Annotated[float, between(0, 1, has_low=False)],
) -> jax.Array:
    """Selects the trained tokens of highest covariance (KL-Cov): max(1, floor(fraction * tokens)) of them.

    All tokens that tie with the last one are selected, so the order of rows does not matter. Tokens with a
    covariance of 0 or less are never selected, because they do not lower the entropy.

    Nothing is drawn, so the key is not used.

    Returns:
      bool [B, T].
    """
    del key
    able_BT = mask_BT.astype(bool) & (covariance_BT > 0)
    order_BT = jnp.where(able_BT, covariance_BT, -jnp.inf)
    # With fewer able tokens than the quota the n-th largest is -inf, which all others reach as well; hence
    # `able &`.
    return able_BT & (order_BT >= _nth_largest(order_BT, _quota(mask_BT, fraction)))


def select_random(
    key: jax.Array,
    covariance_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    fraction: Annotated[float, between(0, 1, has_low=False)],
    lowest: Annotated[float, score()],
    highest: Annotated[float, score()],
) -> jax.Array:
    """Draws trained tokens at random among those with lowest < covariance < highest (Clip-Cov).

    Draws max(1, floor(fraction * tokens)) of them, or all if there are fewer. The draw depends on positions
    in the batch: the same key and layout give the same tokens.

    Returns:
      bool [B, T].
    """
    able_BT = mask_BT.astype(bool) & (covariance_BT > lowest) & (covariance_BT < highest)
    # The highest lots win: a draw without replacement whose number of tokens may be traced.
    lot_BT = jax.random.uniform(key, covariance_BT.shape, covariance_BT.dtype)
    order_BT = jnp.where(able_BT, lot_BT, -jnp.inf)
    return able_BT & (order_BT >= _nth_largest(order_BT, _quota(mask_BT, fraction)))


def clip_cov(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    selected: jax.Array,
    clip_low: ClipWidth,
    clip_high: ClipWidth,
) -> Loss:
    """The clipped surrogate with loss and gradient 0 on the selected tokens (eq. 12).

    Selected tokens stay in the mask, so the loss is still divided by a count that includes them.

    Args:
      logprob, old_logprob, advantage, clip_low, clip_high: as for `policy_losses.clipped`.
      selected: bool, from `select_random`.

    Returns:
      (loss, stats); stats as for `clipped`, without the dual clip, and `selected`.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    # Without an advantage the surrogate is 0 for any ratio, and the token stays in the mask.
    loss, stats = surrogate(
        jnp.exp(log_ratio), masked(advantage, ~selected), clip_low=clip_low, clip_high=clip_high
    )
    return loss, stats | {"selected": flag(selected, loss), "ppo_kl": -log_ratio}


def kl_cov(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    selected: jax.Array,
    kl_coef: Annotated[float, coefficient()],
) -> Loss:
    """The plain surrogate with a KL penalty on the selected tokens: -r A + kl_coef * |log r| (eq. 14).

    The penalty has no gradient at r = 1, where the policy has not moved yet.

    Args:
      logprob, old_logprob, advantage: as for `policy_losses.clipped`.
      selected: bool, from `select_highest`.
      kl_coef: KL coefficient; the paper and verl's function take 1.

    Returns:
      (loss, stats) with `selected` and `ppo_kl`.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    penalty = kl_coef * masked(kinks.absolute(log_ratio), selected)
    loss = -advantage * jnp.exp(log_ratio) + penalty
    return loss, {"selected": flag(selected, loss), "ppo_kl": -log_ratio}


# The token selection of each loss: (key, covariance_BT, mask_BT, **settings) -> bool [B, T].
SELECTIONS: dict[str, Callable[..., jax.Array]] = {
    "clip_cov": select_random,
    "kl_cov": select_highest,
}


def _quota(mask_BT: jax.Array, fraction: float) -> jax.Array:
    tokens = mask_BT.astype(bool).sum().astype(jnp.float32)
    return jnp.maximum(jnp.floor(fraction * tokens).astype(jnp.int32), 1)


def _nth_largest(x_BT: jax.Array, n: jax.Array) -> jax.Array:
    # A full sort rather than `lax.top_k`, because n is traced: it depends on the number of trained tokens.
    ascending = jnp.sort(x_BT.reshape(-1))
    return ascending[jnp.maximum(ascending.shape[0] - n, 0)]
