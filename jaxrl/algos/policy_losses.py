"""Policy losses: values per token, which `aggregation` weighs, sums and divides once by a global count.

    B rows   T tokens of a row   r = exp(logprob - old_logprob)   A advantage   sg stop gradient

The positional arguments of a loss are arrays, named as in `INPUTS`. Most losses treat each token alone: they
accept arrays of any shape and can be checked with three numbers. Losses over sequences (`gspo`, `gspo_token`,
`geo_mean`, `vespo`, `sequence_masked`) also take the mask and the segments of packed rows. `on_packed_rows`
calls both kinds, and any function of the same form:

    loss_BT, stats = on_packed_rows(POLICY_LOSSES[name], arrays, **settings)

It replaces tokens outside the mask by 0 before the loss sees them, and the result is 0 there. Even a NaN
outside the mask has neither value nor gradient. No loss looks at another microbatch, so any split gives the
same sum. `stats` are per token too and are summed over the mask: a mean of means would depend on the split.

Weights of an off-policy correction (`rollout_correction`) multiply the result. With two policies (bypass) the
sampler's log-probability is passed as the old one, and only losses of `RATIO_FREE` are multiplied.

Not covered: the entropy of the policy, which `algos.logprobs` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl.algos import covariance, kinks
from jaxrl.algos.ratio import MAX_LOG_RATIO, ClipWidth, Loss, bounded_log_ratio, flag, surrogate
from jaxrl.algos.registry import array_names
from jaxrl.algos.segments import masked, segment_mean, segment_sum
from jaxrl.checks import MAX_COEFFICIENT, between, coefficient, positive_coefficient

# Upper bound of a sequence's mean log-ratio (GSPO). A lower bound is not needed: exp underflows to 0.
MAX_SEQUENCE_LOG_RATIO = 10.0


def clipped(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    clip_low: ClipWidth,
    clip_high: ClipWidth,
    dual_clip: Annotated[float, between(1, MAX_COEFFICIENT, has_low=False, or_inf=True)],
) -> Loss:
    """The clipped surrogate with separate bounds: -min(r A, clip(r, 1-low, 1+high) A).

    PPO, arXiv 1707.06347 eq. 7; DAPO eq. 8 (clip-higher: low .2, high .28). Where A < 0 the loss is also
    bounded by -dual_clip * A (dual-clip PPO, arXiv 1912.09729 eq. 5), so that one token with a huge ratio
    cannot dominate the gradient.

    Args:
      logprob: log-probability under the policy being trained.
      old_logprob: the same at the start of the step.
      advantage: advantage of the token.
      clip_low, clip_high: distance that the ratio may fall below or rise above 1 before its gradient stops.
      dual_clip: bound on the ratio for negative advantages, above 1; infinity for none.

    Returns:
      (loss, stats), per token. `pg_clipfrac` is 1 where a clip is active; `pg_clipfrac_high` (A > 0, ratio
      above) and `pg_clipfrac_low` (A < 0, ratio below) are its two halves. `pg_clipfrac_lower` is 1 where the
      dual clip is active (verl's name). `ppo_kl` is the old minus the new log-probability.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    loss, stats = surrogate(jnp.exp(log_ratio), advantage, clip_low=clip_low, clip_high=clip_high)
    # Not -A * dual_clip: with an infinite bound and an advantage of 0 that is inf * 0 = NaN.
    negative = advantage < 0
    dual = dual_clip * jnp.where(negative, -advantage, jnp.ones_like(advantage))
    bounded = negative & (loss > dual)
    stats["pg_clipfrac_lower"] = flag(bounded, loss)
    loss = jnp.where(bounded, dual, loss)
    return loss, stats | {"ppo_kl": -log_ratio}


def policy_gradient(logprob: jax.Array, old_logprob: jax.Array, advantage: jax.Array) -> Loss:
    """Plain policy gradient, no ratio: -A logprob.

    REINFORCE (Williams 1992); GPG, arXiv 2504.02546. The old log-probability is used for `ppo_kl` only.
    """
    return -advantage * logprob, {"ppo_kl": -bounded_log_ratio(logprob, old_logprob)}


def trpo(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    kl_coef: Annotated[float, coefficient()],
) -> Loss:
    """The unclipped surrogate with a penalty on the step's KL: -r A + kl_coef * (r - 1 - log r).

    arXiv 1707.06347 eq. 8, the penalty form of TRPO. The second term estimates KL(old || new) from tokens of
    the old policy; it is unbiased and never negative.

    Args:
      logprob, old_logprob, advantage: as for `clipped`.
      kl_coef: coefficient of the KL penalty, 0 or more.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    ratio = jnp.exp(log_ratio)
    # Near a ratio of 1 the difference ratio - 1 has no digits left.
    penalty = jnp.expm1(log_ratio) - log_ratio
    return -ratio * advantage + kl_coef * penalty, {"ppo_kl": -log_ratio, "kl_penalty": penalty}


def cispo(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    clip_low: ClipWidth,
    clip_high: ClipWidth,
) -> Loss:
    """Policy gradient weighted by the clipped ratio: -sg(clip(r, 1-low, 1+high)) A logprob.

    MiniMax-M1, arXiv 2506.13585 eq. 4 and 5: a clipped token keeps its gradient. The paper bounds the weight
    from above only; a clip_low of 1 or more does the same.

    Args and stats as for `clipped`, but a clip is active wherever the ratio is out of bounds, for any sign
    of A.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    ratio = jnp.exp(log_ratio)
    # `jnp.clip`, not `kinks.clip`: the weight has no gradient, so ties do not matter.
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    stats = {
        "pg_clipfrac": flag(weight != ratio, ratio),
        "pg_clipfrac_high": flag(ratio > weight, ratio),
        "pg_clipfrac_low": flag(ratio < weight, ratio),
        "ppo_kl": -log_ratio,
    }
    return -jax.lax.stop_gradient(weight) * advantage * logprob, stats


def sapo(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    tau_positive: Annotated[float, positive_coefficient()] = 1.0,
    tau_negative: Annotated[float, positive_coefficient()] = 1.05,
) -> Loss:
    """A soft gate instead of the clip: -A * 4 / tau * sigmoid(tau * (r - 1)).

    SAPO, arXiv 2511.20347. At r = 1 its gradient is that of -r A. It fades on both sides of 1, faster for a
    larger tau. The paper averages by sequence ("seq-mean-token-mean").

    Args:
      logprob, old_logprob, advantage: as for `clipped`.
      tau_positive, tau_negative: steepness of the gate for A > 0 and for A <= 0, above 0.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    tau = jnp.where(advantage > 0, tau_positive, tau_negative).astype(logprob.dtype)
    # The slope of a sigmoid at 0 is 1/4, so that of the gate at r = 1 is 1.
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0))
    return -advantage * gate, {"ppo_kl": -log_ratio}


def dro(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    beta: Annotated[float, positive_coefficient()],
) -> Loss:
    """Policy gradient with a quadratic penalty towards the old policy: -(A logprob - beta / 2 * (log r)^2).

    DRO, arXiv 2405.19107, by token. The log-ratio is bounded as for the other losses (verl does not).

    Args:
      logprob, old_logprob, advantage: as for `clipped`.
      beta: coefficient of the penalty, above 0.
    """
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    return -(advantage * logprob - beta / 2.0 * log_ratio**2), {"ppo_kl": -log_ratio}


def dppo_tv(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    limit_low: Annotated[float, between(0, 1)],
    limit_high: Annotated[float, between(0, 1)],
    max_ratio: Annotated[float, positive_coefficient(or_inf=True)],
) -> Loss:
    """Policy gradient that stops once the probability of a token has moved beyond a limit.

    DPPO with binary total variation, arXiv 2602.04879: -A sg(min(r, max_ratio)) sg(keep) logprob, where a
    token with A > 0 is kept while p - p_old <= limit_high, and any other token while p - p_old >= -limit_low.

    Args:
      logprob, old_logprob, advantage: as for `clipped`.
      limit_low, limit_high: distance that the probability may fall or rise, 0 to 1.
      max_ratio: bound on the weight; infinity for none.

    Returns:
      (loss, stats): `pg_clipfrac` 1 where a token is not kept, `ppo_kl`.
    """
    moved = jnp.exp(logprob) - jnp.exp(old_logprob)
    keep = jnp.where(advantage > 0, moved <= limit_high, moved >= -limit_low)
    return _kept(logprob, old_logprob, advantage, keep, max_ratio)


def dppo_kl(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    *,
    limit_low: Annotated[float, coefficient()],
    limit_high: Annotated[float, coefficient()],
    max_ratio: Annotated[float, positive_coefficient(or_inf=True)],
) -> Loss:
    """`dppo_tv` with a binary KL ("this token" against "any other") instead of the difference.

    arXiv 2602.04879: a token is kept while p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) is
    at most limit_high (A > 0) or limit_low (otherwise), or while p moved against its advantage.

    Args and returns as for `dppo_tv`; the limits are in nats.
    """
    p, old_p = jnp.exp(logprob), jnp.exp(old_logprob)

    def part(old: jax.Array, new: jax.Array) -> jax.Array:
        # Keeps the logarithm finite where a probability is 0.
        return old * (jnp.log(old + 1e-8) - jnp.log(new + 1e-8))

    kl = part(old_p, p) + part(1.0 - old_p, 1.0 - p)
    keep = jnp.where(
        advantage > 0, (kl <= limit_high) | (p <= old_p), (kl <= limit_low) | (p >= old_p)
    )
    return _kept(logprob, old_logprob, advantage, keep, max_ratio)


def gspo(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    clip_low: ClipWidth = 3e-4,
    clip_high: ClipWidth = 4e-4,
) -> Loss:
    """The clipped surrogate of a sequence ratio, the geometric mean of its token ratios.

    GSPO, arXiv 2507.18071 eq. 5 and 7: s = exp(mean of log r over the sequence), -min(s A, clip(s) A). Every
    trained token holds the value of its sequence, so "seq-mean-token-mean" gives the paper's mean over
    sequences.

    Args:
      logprob_BT, old_logprob_BT, advantage_BT: as for `clipped`; the paper has one advantage per sequence.
      mask_BT, segment_ids_BT: as in `segments`.
      clip_low, clip_high: distance that s may fall below or rise above 1; a few 1e-4, since s hardly moves
        (section 5.1).

    Returns:
      (loss, stats) [B, T], 0 outside the mask; stats as for `clipped`, without the dual clip.
    """
    # Not bounded by token as elsewhere: only the mean over the sequence goes through exp.
    log_ratio_BT = masked(logprob_BT, mask_BT) - masked(old_logprob_BT, mask_BT)
    mean_BT = segment_mean(log_ratio_BT, mask_BT, segment_ids_BT)
    return _sequence_surrogate(
        mean_BT, log_ratio_BT, advantage_BT, mask_BT, clip_low=clip_low, clip_high=clip_high
    )


def gspo_token(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    clip_low: ClipWidth = 3e-4,
    clip_high: ClipWidth = 4e-4,
) -> Loss:
    """`gspo` with an advantage per token, which scales that token's gradient: s_t = sg(s) * r_t / sg(r_t).

    arXiv 2507.18071 eq. 13 and 14. With one advantage per sequence it equals `gspo` in value and gradient
    (verl's `gspo` is this form).

    Args and returns as for `gspo`.
    """
    logprob_BT, old_logprob_BT = masked(logprob_BT, mask_BT), masked(old_logprob_BT, mask_BT)
    log_ratio_BT = logprob_BT - old_logprob_BT
    mean_BT = segment_mean(log_ratio_BT, mask_BT, segment_ids_BT)
    # 0 in value; its gradient is that of the token's own log-probability.
    own_BT = logprob_BT - jax.lax.stop_gradient(logprob_BT)
    return _sequence_surrogate(
        jax.lax.stop_gradient(mean_BT) + own_BT,
        log_ratio_BT,
        advantage_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def geo_mean(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    clip_low: ClipWidth = 0.4,
    clip_high: ClipWidth = 0.4,
) -> Loss:
    """The geometric mean of a sequence's clipped ratios: -A exp(mean of clipped log r).

    GMPO, arXiv 2507.20673 eq. 4: a token's log-ratio is bounded by clip_high where A > 0 and by -clip_low
    where A < 0, *in log space*. A is the mean of the sequence's advantages. Every trained token holds the
    value of its sequence, so "seq-mean-token-mean" gives the paper's mean over sequences. Sequences without a
    trained token are not counted (verl counts them, and ignores the aggregation setting).

    Args:
      logprob_BT, old_logprob_BT, advantage_BT: as for `clipped`.
      mask_BT, segment_ids_BT: as in `segments`.
      clip_low, clip_high: bounds on the log-ratio, above 0.

    Returns:
      (loss, stats) [B, T], 0 outside the mask; stats as for `clipped`, without the dual clip.
    """
    log_ratio_BT = masked(logprob_BT, mask_BT) - masked(old_logprob_BT, mask_BT)
    advantage_BT = masked(advantage_BT, mask_BT)
    bounded_BT = jnp.where(
        advantage_BT < 0,
        kinks.clip(log_ratio_BT, lowest=-clip_low),
        jnp.where(advantage_BT > 0, kinks.clip(log_ratio_BT, highest=clip_high), 0.0),
    )
    mean_BT = segment_mean(bounded_BT, mask_BT, segment_ids_BT)
    ratio_BT = jnp.exp(kinks.clip(mean_BT, highest=MAX_LOG_RATIO))
    loss_BT = -segment_mean(advantage_BT, mask_BT, segment_ids_BT) * ratio_BT
    high_BT = (advantage_BT > 0) & (log_ratio_BT > clip_high)
    low_BT = (advantage_BT < 0) & (log_ratio_BT < -clip_low)
    stats = {
        "pg_clipfrac": flag(high_BT | low_BT, loss_BT),
        "pg_clipfrac_high": flag(high_BT, loss_BT),
        "pg_clipfrac_low": flag(low_BT, loss_BT),
        "ppo_kl": -log_ratio_BT,
    }
    return masked(loss_BT, mask_BT), stats


def vespo(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    k_positive: Annotated[float, coefficient()] = 2.0,
    lambda_positive: Annotated[float, coefficient()] = 3.0,
    k_negative: Annotated[float, coefficient()] = 3.0,
    lambda_negative: Annotated[float, coefficient()] = 2.0,
) -> Loss:
    """Policy gradient with a soft gate on the sequence's ratio W: -sg(W^k exp(l (1 - W))) A logprob.

    VESPO, arXiv 2602.10693: W is the product of the sequence's token ratios, not their mean. The gate is 1 at
    W = 1 and fades on both sides; it is largest at W = k / l.

    Args:
      logprob_BT, old_logprob_BT, advantage_BT: as for `clipped`.
      mask_BT, segment_ids_BT: as in `segments`.
      k_positive, k_negative: exponent k, for A >= 0 and for A < 0; larger fades faster below 1.
      lambda_positive, lambda_negative: decay l for the same; larger fades faster above 1.

    Returns:
      (loss, stats) [B, T], 0 outside the mask: `gate`, `ppo_kl`.
    """
    advantage_BT = masked(advantage_BT, mask_BT)
    log_ratio_BT = bounded_log_ratio(masked(logprob_BT, mask_BT), masked(old_logprob_BT, mask_BT))
    log_w_BT = segment_sum(log_ratio_BT, mask_BT, segment_ids_BT)
    log_w_BT = jnp.clip(log_w_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    positive_BT = advantage_BT >= 0
    k_BT = jnp.where(positive_BT, k_positive, k_negative).astype(log_w_BT.dtype)
    lambda_BT = jnp.where(positive_BT, lambda_positive, lambda_negative).astype(log_w_BT.dtype)
    # In logarithms, since W^k alone may overflow; expm1(log W) is W - 1 with all its digits near W = 1.
    gate_BT = jax.lax.stop_gradient(jnp.exp(k_BT * log_w_BT - lambda_BT * jnp.expm1(log_w_BT)))
    loss_BT = -gate_BT * advantage_BT * masked(logprob_BT, mask_BT)
    return masked(loss_BT, mask_BT), {"gate": gate_BT, "ppo_kl": -log_ratio_BT}


def sequence_masked(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    rollout_logprob_BT: jax.Array,
    *,
    clip_low: ClipWidth,
    clip_high: ClipWidth,
    dual_clip: Annotated[float, between(1, MAX_COEFFICIENT, has_low=False, or_inf=True)],
    threshold: Annotated[float, positive_coefficient()],
) -> Loss:
    """`clipped`, without the sequences that are worse than expected and far from the sampler's policy.

    Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556 eq. 9: a token with A < 0 has loss 0 if the
    mean over its sequence of log pi_rollout - log pi is above the threshold. It stays in the divisor.

    Args:
      logprob_BT, old_logprob_BT, advantage_BT, clip_low, clip_high, dual_clip: as for `clipped`.
      mask_BT, segment_ids_BT: as in `segments`.
      rollout_logprob_BT: log-probability under the sampler's policy.
      threshold: in nats per token.

    Returns:
      (loss, stats) [B, T], 0 outside the mask; stats as for `clipped`, and `sequence_masked`, 1 on the tokens
      that are left out.
    """
    logprob_BT, old_logprob_BT, advantage_BT, rollout_logprob_BT = (
        masked(x_BT, mask_BT)
        for x_BT in (logprob_BT, old_logprob_BT, advantage_BT, rollout_logprob_BT)
    )
    gap_BT = segment_mean(rollout_logprob_BT - logprob_BT, mask_BT, segment_ids_BT)
    # An advantage of 0 removes loss and gradient, and leaves the token in the divisor.
    left_out_BT = (advantage_BT < 0) & (gap_BT > threshold)
    loss_BT, stats = clipped(
        logprob_BT,
        old_logprob_BT,
        masked(advantage_BT, ~left_out_BT),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return loss_BT, stats | {"sequence_masked": flag(left_out_BT, loss_BT)}


def entropy_bonus(entropy: jax.Array, *, coef: float | jax.Array) -> jax.Array:
    """The term of a per-token loss that rewards entropy: -coef * entropy (arXiv 1707.06347 eq. 9)."""
    return -coef * entropy


INPUTS = (
    "logprob",
    "old_logprob",
    "advantage",
    "mask",
    "segment_ids",
    "rollout_logprob",
    "ref_logprob",
    "entropy",
)
"""Names that the positional arguments of a loss may have; all are arrays of one shape."""


def on_packed_rows(loss: Callable[..., Loss], arrays: Mapping[str, jax.Array], **settings) -> Loss:
    """Computes a policy loss on packed rows; the result is 0 outside the mask.

    Args:
      loss: an entry of `POLICY_LOSSES`, or a function of the same form. If it does not take the mask, it
        treats each token alone, and its inputs are set to 0 outside the mask.
      arrays: arrays [B, T], by the names of `INPUTS`.
      settings: keyword-only arguments of the loss.
    """
    names, mask_BT = array_names(loss), arrays["mask"]
    given = [arrays[name] for name in names]
    # Before the loss too: 0 after it would still let a NaN into the gradient, as 0 * NaN. A loss that takes
    # the mask replaces by itself what is outside of it.
    if "mask" not in names:
        given = [masked(x_BT, mask_BT) for x_BT in given]
    return jax.tree.map(lambda x_BT: masked(x_BT, mask_BT), loss(*given, **settings))


POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "cispo": cispo,
    "clip_cov": covariance.clip_cov,
    "clipped": clipped,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dro": dro,
    "geo_mean": geo_mean,
    # The paper's loss is the plain gradient; what is new in GPG is its advantage.
    "gpg": policy_gradient,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "kl_cov": covariance.kl_cov,
    "policy_gradient": policy_gradient,
    "sapo": sapo,
    "sequence_masked": sequence_masked,
    "trpo": trpo,
    "vespo": vespo,
}

# Losses without a ratio to the old policy. Only importance weights can correct them for off-policy samples.
RATIO_FREE = frozenset({"gpg", "policy_gradient"})

# Losses whose ratio is that of a whole sequence.
SEQUENCE_LOSSES = frozenset({"geo_mean", "gspo", "gspo_token", "vespo"})


def _sequence_surrogate(
    log_s_BT: jax.Array,
    log_ratio_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    s_BT = jnp.exp(kinks.clip(log_s_BT, highest=MAX_SEQUENCE_LOG_RATIO))
    loss_BT, stats = surrogate(
        s_BT, masked(advantage_BT, mask_BT), clip_low=clip_low, clip_high=clip_high
    )
    stats["ppo_kl"] = -log_ratio_BT
    return jax.tree.map(lambda x_BT: masked(x_BT, mask_BT), (loss_BT, stats))


def _kept(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    keep: jax.Array,
    max_ratio: float,
) -> Loss:
    log_ratio = bounded_log_ratio(logprob, old_logprob)
    weight = masked(jnp.minimum(jnp.exp(log_ratio), max_ratio), keep)
    loss = -advantage * jax.lax.stop_gradient(weight) * logprob
    return loss, {"pg_clipfrac": flag(~keep, loss), "ppo_kl": -log_ratio}


# Losses with a gradient where the advantage is 0.
HAVE_OTHER_TERMS = frozenset({"dro", "kl_cov", "trpo"})
