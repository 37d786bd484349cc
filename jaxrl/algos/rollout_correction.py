"""Corrects for the difference between the policy that sampled and the policy that learns.

    B rows   T tokens of a row; mask and segments as in `segments`
    rho = train logprob - rollout logprob, so exp(rho) = pi_train / pi_rollout, of a sampled token

Two kinds of correction, in any combination:

    weigh      WEIGHTINGS[name].of_ratio, then truncate (TIS) or band (IcePop), then divide by .norm_factor
    reject     Rejection: bounds on k1, k2, k3, tv or kl of a token, or on their sum, mean or maximum over a
               sequence.
               Every rejection sees the *original* mask. The new mask, mask_BT * kept_1_BT * kept_2_BT, then
               applies to losses, counts and metrics

Every bound on a ratio is on pi_train / pi_rollout, for weights and rejection alike. (verl's k1 options bound
the inverse, pi_rollout / pi_train: its "lo_hi" is lowest = 1 / hi, highest = 1 / lo of `ratio_bounds`.)
Weights and masks are constants to the gradient.

Three policies (decoupled): rho = old_logprob - rollout_logprob is known before the update. The loss clips
exp(logprob - old_logprob) and is multiplied by the weights.

Two policies (bypass): the rollout's log-probability stands in for the old one, so a loss with a ratio needs
no weights. The plain policy gradient takes weights with rho = logprob - rollout_logprob, inside the loss.
Rejection then changes the mask inside the loss: see `aggregation` for the division.

Truncated importance sampling: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training", 2025. IcePop: Ring-1T, arXiv 2510.18855. Metrics that share a name with verl's (`rollout_corr/*`,
0.9.1) share its definition, with two exceptions: sequences without a trained token are not counted, and
statistics are computed once per batch, not once per microbatch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.algos.moments import Moments, RunningMoments
from jaxrl.algos.ratio import MAX_LOG_RATIO, bounded_log_ratio
from jaxrl.algos.segments import (
    each_token,
    last_tokens,
    masked,
    segment_count,
    segment_max,
    segment_mean,
    segment_sum,
)

# (x_BT, mask_BT, segment_ids_BT) -> [B, T]: the bounded quantity, on every token that the bound may reject.
Over = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

OVER: dict[str, Over] = {
    "token": each_token,
    "seq_sum": segment_sum,
    "seq_mean": segment_mean,
    "seq_max": segment_max,
}


def log_ratio(train_logprob_BT: jax.Array, rollout_logprob_BT: jax.Array, mask_BT: jax.Array):
    """rho of every trained token, clipped to +-20, and 0 elsewhere; without gradient."""
    train_BT, rollout_BT = masked(train_logprob_BT, mask_BT), masked(rollout_logprob_BT, mask_BT)
    return jax.lax.stop_gradient(bounded_log_ratio(train_BT, rollout_BT))


# Weights


def token_weights(rho_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """exp(rho) of each token, 0 outside the mask."""
    del segment_ids_BT
    # Masked twice, since exp(0) is 1.
    return jax.lax.stop_gradient(masked(jnp.exp(masked(rho_BT, mask_BT)), mask_BT))


def sequence_weights(rho_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """The ratio of the whole sequence, exp(sum of rho, clipped to +-20), on each of its trained tokens."""
    sum_BT = segment_sum(rho_BT, mask_BT, segment_ids_BT)
    # Each rho is bounded, but their sum over thousands of tokens is not.
    ratio_BT = jnp.exp(jnp.clip(sum_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jax.lax.stop_gradient(masked(ratio_BT, mask_BT))


def truncate(weight: jax.Array, *, highest: float) -> jax.Array:
    """min(weight, highest): truncated importance sampling; the usual bound is 2."""
    return jnp.minimum(weight, highest)


def band(weight: jax.Array, *, lowest: float, highest: float) -> jax.Array:
    """The weight where lowest <= weight <= highest, else 0: IcePop; its bounds are .5 and 5.

    Tokens with weight 0 stay in the mask and in the divisor of the loss. Use a `Rejection` to remove them.
    """
    return masked(weight, (weight >= lowest) & (weight <= highest))


# Rejection


def k3(rho: jax.Array) -> jax.Array:
    """exp(rho) - 1 - rho: never negative; its mean over samples is an unbiased KL(rollout || train)."""
    # expm1: rho is small where the policies agree, and exp(rho) - 1 would lose its digits there.
    return jnp.expm1(rho) - rho


def total_variation(rho: jax.Array, logprob: jax.Array) -> jax.Array:
    """|p_train - p_rollout|: the total variation of "this token" against "any other"."""
    return jnp.abs(jnp.exp(logprob) - jnp.exp(logprob - rho))


def binary_kl(rho: jax.Array, logprob: jax.Array) -> jax.Array:
    """KL(rollout || train) of "this token" against "any other", arXiv 2602.04879."""
    # The rollout's probability p follows from the trainer's q, so callers need not pass both.
    p, q = jnp.exp(logprob - rho), jnp.exp(logprob)
    # Finite where the trainer is certain of the token, or of another one.
    rest = (1.0 - p) * (jnp.log(1.0 - p + 1e-8) - jnp.log(1.0 - q + 1e-8))
    return rest - p * rho


# (rho, log-probability of the trainer) -> divergence of a token.
DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    # The mean of -rho over samples is an unbiased KL(rollout || train).
    "k1": lambda rho, _: -rho,
    "k2": lambda rho, _: 0.5 * rho**2,
    "k3": lambda rho, _: k3(rho),
    "kl": binary_kl,
    "tv": total_variation,
}


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A rule that removes tokens from the mask.

    Attributes:
      name: name of its metrics. As in verl, over "seq_mean" by "k3" is called "seq_mean_k3".
      over: a name of `OVER`: judges each token alone, or a whole sequence by the sum, mean or maximum over
        its tokens.
      by: a name of `DIVERGENCES`. k1 is signed; the others do not distinguish directions.
      lowest, highest: bounds on the statistic, both included, in nats; `ratio_bounds` for k1, and a
        difference of probabilities for tv.
    """

    name: str
    over: str
    by: str
    lowest: float
    highest: float

    def statistic(
        self,
        rho_BT: jax.Array,
        train_logprob_BT: jax.Array,
        mask_BT: jax.Array,
        segment_ids_BT: jax.Array,
    ) -> jax.Array:
        """The statistic that the bounds apply to, [B, T], on every token that the rule may reject."""
        rho_BT, logprob_BT = masked(rho_BT, mask_BT), masked(train_logprob_BT, mask_BT)
        return OVER[self.over](DIVERGENCES[self.by](rho_BT, logprob_BT), mask_BT, segment_ids_BT)

    def keep(self, statistic_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """1 on the trained tokens whose statistic is within the bounds, else 0, in the mask's type."""
        inside_BT = (statistic_BT >= self.lowest) & (statistic_BT <= self.highest)
        return masked(masked(jnp.ones_like(mask_BT), mask_BT), inside_BT)


def ratio_bounds(lowest: float, highest: float) -> tuple[float, float]:
    """Bounds on pi_train / pi_rollout, above 0, as bounds on k1, the logarithm of its inverse."""
    return -math.log(highest), -math.log(lowest)


# Metrics. `*_moments` are computed for parts of a batch and can be added; `*_metrics` turn them into numbers.
# Every metric of an empty batch is 0.


def mismatch_moments(
    train_logprob_BT: jax.Array,
    rollout_logprob_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
) -> RunningMoments:
    """The moments that `mismatch_metrics` reads."""
    where = (mask_BT, segment_ids_BT)
    last_BT = last_tokens(*where)
    rho_BT = log_ratio(train_logprob_BT, rollout_logprob_BT, mask_BT)
    train_BT = segment_mean(-train_logprob_BT, *where)
    rollout_BT = segment_mean(-rollout_logprob_BT, *where)
    gap_BT = train_BT - rollout_BT
    total_BT = jnp.clip(segment_sum(rho_BT, *where), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_token = {
        "kl": -rho_BT,
        "k3_kl": k3(rho_BT),
        # rho is at most 20, and e^40 is finite in float32.
        "chi2_token": jnp.expm1(2.0 * rho_BT),
    }
    by_sequence = {
        "training_log_ppl": train_BT,
        "training_ppl": jnp.exp(train_BT),
        "rollout_log_ppl": rollout_BT,
        "rollout_ppl": jnp.exp(rollout_BT),
        "log_ppl_diff": gap_BT,
        "log_ppl_abs_diff": jnp.abs(gap_BT),
        "ppl_ratio": jnp.exp(gap_BT),
        "chi2_seq": jnp.expm1(2.0 * total_BT),
    }
    return {name: Moments.of(x_BT, mask_BT) for name, x_BT in by_token.items()} | {
        name: Moments.of(x_BT, last_BT) for name, x_BT in by_sequence.items()
    }


def mismatch_metrics(moments: RunningMoments) -> dict[str, jax.Array]:
    """The distance between the two policies before any correction.

    Returns:
      Means over trained tokens: `kl` of -rho and `k3_kl` of k3, both estimates of KL(rollout || train), and
      `chi2_token` of exp(2 rho) - 1.

      Means over sequences: `training_log_ppl`, `rollout_log_ppl` of the log-perplexity, the mean of -logprob
      over the sequence; `training_ppl`, `rollout_ppl` of its exponential; `log_ppl_diff`,
      `log_ppl_abs_diff` of the difference training less rollout, with its extremes `log_ppl_diff_max` and
      `log_ppl_diff_min`; `ppl_ratio` of the exponential of that difference; `chi2_seq` of
      exp(2 sum of rho) - 1.
    """
    gap = moments["log_ppl_diff"]
    means = {name: x.mean for name, x in moments.items()}
    return means | {"log_ppl_diff_min": gap.min, "log_ppl_diff_max": gap.max}


def weight_moments(
    ratio_BT: jax.Array,
    weight_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    lowest: float,
    highest: float,
) -> RunningMoments:
    """The moments that the metrics and the normalisation of importance weights read.

    Args:
      ratio_BT: importance ratios, before truncation or band.
      weight_BT: bounded weights, which multiply the loss.
      mask_BT, segment_ids_BT: trained tokens and packed sequences, as in `segments`.
      lowest, highest: bounds of the reported shares below and above.
    """
    last_BT = last_tokens(mask_BT, segment_ids_BT)
    means_BT = segment_mean(ratio_BT, mask_BT, segment_ids_BT)
    return {
        "weight": Moments.of(weight_BT, mask_BT),
        "seq_weight": Moments.of(segment_mean(weight_BT, mask_BT, segment_ids_BT), last_BT),
        "seq_ratio": Moments.of(means_BT, last_BT),
        "high": _share(ratio_BT > highest, mask_BT),
        "low": _share(ratio_BT < lowest, mask_BT),
        "seq_high": _share(means_BT > highest, last_BT),
        "seq_low": _share(means_BT < lowest, last_BT),
    }


def outside_band(moments: RunningMoments) -> dict[str, jax.Array]:
    """`rollout_is_oob_ratio`, the share of tokens that the band gives weight 0."""
    return {"rollout_is_oob_ratio": moments["high"].mean + moments["low"].mean}


@dataclasses.dataclass(frozen=True)
class Weighting:
    """Importance weights of tokens, or of whole sequences.

    Attributes:
      of_ratio: (rho_BT, mask_BT, segment_ids_BT) -> unbounded weights [B, T].
      mean_of: name of the weight moments whose mean normalises the weights.
      range_of: name of the weight moments whose extremes are `rollout_is_min` and `_max`.
      judged: prefix of the shares beyond the bounds: "" for shares of tokens, "seq_" of sequences.
    """

    of_ratio: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    mean_of: str
    range_of: str
    judged: str

    def norm_factor(self, moments: RunningMoments) -> jax.Array:
        """The mean of the bounded weights, over tokens or over sequences, or 1 if all weights are 0.

        Weights divided by it have mean 1.
        """
        return _or_one(moments[self.mean_of].mean)

    def metrics(self, moments: RunningMoments) -> dict[str, jax.Array]:
        """Statistics of importance weights: how uneven they are.

        Returns:
          Of the bounded weights, before normalisation: `rollout_is_mean`, `_std` (divided by the count),
          `_min`, `_max` and `_eff_sample_size` ((mean w)^2 / mean w^2, 1 for equal weights) over trained
          tokens; `rollout_is_seq_mean`, `_seq_std` (divided by the count less 1), `_seq_min`, `_seq_max` and
          `_seq_max_deviation` (largest distance from 1) over the mean weights of sequences.

          Of the ratios before bounding: `rollout_is_ratio_fraction_high` and `_low`, the shares of tokens
          above and below the bounds; `rollout_is_seq_fraction_high` and `_low`, the shares of sequences whose
          mean ratio is above or below.

          Two exceptions for weights of sequences, taken from verl: `rollout_is_min` and `_max` describe the
          ratios before bounding, and `rollout_is_ratio_fraction_high` and `_low` are shares of sequences.
        """
        weight, sequence, ranged = (moments[n] for n in ("weight", "seq_weight", self.range_of))
        return {
            "rollout_is_mean": weight.mean,
            "rollout_is_std": weight.std,
            "rollout_is_min": ranged.min,
            "rollout_is_max": ranged.max,
            "rollout_is_eff_sample_size": weight.mean**2 / _or_one(weight.mean_square),
            "rollout_is_ratio_fraction_high": moments[f"{self.judged}high"].mean,
            "rollout_is_ratio_fraction_low": moments[f"{self.judged}low"].mean,
            "rollout_is_seq_mean": sequence.mean,
            "rollout_is_seq_std": sequence.sample_std,
            "rollout_is_seq_min": sequence.min,
            "rollout_is_seq_max": sequence.max,
            "rollout_is_seq_max_deviation": _furthest(sequence, 1.0),
            "rollout_is_seq_fraction_high": moments["seq_high"].mean,
            "rollout_is_seq_fraction_low": moments["seq_low"].mean,
        }


WEIGHTINGS: dict[str, Weighting] = {
    "token": Weighting(token_weights, "weight", "weight", ""),
    "sequence": Weighting(sequence_weights, "seq_weight", "seq_ratio", "seq_"),
}


def rejection_moments(
    rejection: Rejection,
    statistic_BT: jax.Array,
    kept_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
) -> RunningMoments:
    """The moments that `rejection_metrics` reads.

    Args:
      rejection: the rule.
      statistic_BT: result of `rejection.statistic`.
      kept_BT: result of `rejection.keep`.
      mask_BT, segment_ids_BT: the original mask and the segments.
    """
    last_BT = last_tokens(mask_BT, segment_ids_BT)
    lowest, highest = rejection.lowest, rejection.highest
    # A statistic over a sequence is on each of its tokens already.
    seq_BT = statistic_BT
    if rejection.over == "token":
        seq_BT = segment_mean(statistic_BT, mask_BT, segment_ids_BT)
    return kept_moments(kept_BT, mask_BT, segment_ids_BT) | {
        "statistic": Moments.of(statistic_BT, mask_BT),
        "bounded": Moments.of(jnp.clip(statistic_BT, lowest, highest), mask_BT),
        "high": _share(statistic_BT > highest, mask_BT),
        "low": _share(statistic_BT < lowest, mask_BT),
        "seq": Moments.of(seq_BT, last_BT),
        "seq_high": _share(seq_BT > highest, last_BT),
        "seq_low": _share(seq_BT < lowest, last_BT),
    }


def rejection_metrics(rejection: Rejection, moments: RunningMoments) -> dict[str, jax.Array]:
    """Metrics of one rejection rule; callers prefix each name with "rollout_rs_<name of the rejection>_".

    The statistic of k1 is -rho: a high value marks a token that the trainer finds *less* likely.

    Returns:
      Over trained tokens: `mean`, `min`, `max` of the statistic, and `std` of the statistic clipped to the
      bounds (divided by the count).

      Over sequences, where a rule that judges tokens counts with its mean over the sequence: `seq_mean`,
      `seq_std` (divided by the count less 1), `seq_min`, `seq_max`, `seq_max_deviation` (largest distance
      from 0), `seq_fraction_high` and `seq_fraction_low` (shares beyond the bounds).

      `fraction_high` and `fraction_low`: shares beyond the bounds, of tokens or of sequences, whichever the
      rule judges. `masked_fraction` and `seq_masked_fraction`: see `kept_metrics`.
    """
    statistic, seq = moments["statistic"], moments["seq"]
    judged = "" if rejection.over == "token" else "seq_"
    kept = kept_metrics(moments)
    return {
        "mean": statistic.mean,
        "std": moments["bounded"].std,
        "min": statistic.min,
        "max": statistic.max,
        "fraction_high": moments[f"{judged}high"].mean,
        "fraction_low": moments[f"{judged}low"].mean,
        "seq_mean": seq.mean,
        "seq_std": seq.sample_std,
        "seq_min": seq.min,
        "seq_max": seq.max,
        "seq_max_deviation": _furthest(seq, 0.0),
        "seq_fraction_high": moments["seq_high"].mean,
        "seq_fraction_low": moments["seq_low"].mean,
        **{name: kept[name] for name in ("masked_fraction", "seq_masked_fraction")},
    }


def kept_moments(
    kept_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array
) -> RunningMoments:
    """The moments that `kept_metrics` reads."""
    left_BT = segment_count(masked(mask_BT, kept_BT), segment_ids_BT)
    had_BT = segment_count(mask_BT, segment_ids_BT)
    last_BT = last_tokens(mask_BT, segment_ids_BT)
    return {
        "masked": _share(kept_BT == 0, mask_BT),
        "seq_masked": _share(left_BT < had_BT, last_BT),
        "seq_lost": _share(left_BT == 0, last_BT),
    }


def kept_metrics(moments: RunningMoments) -> dict[str, jax.Array]:
    """Shares of the batch that one rejection, or several together, remove.

    Returns:
      `masked_fraction`, the share of trained tokens that are rejected; `seq_masked_fraction`, the share of
      sequences that lose at least one token; `seq_lost_fraction`, the share that lose all.
    """
    return {f"{name}_fraction": moments[name].mean for name in ("masked", "seq_masked", "seq_lost")}


def probability_metrics(
    train_logprob_BT: jax.Array, rollout_logprob_BT: jax.Array, mask_BT: jax.Array
) -> dict[str, jax.Array]:
    """Differences between the probabilities of the sampled tokens (verl's `training/rollout_*`).

    Returns:
      `rollout_probs_diff_mean`, `_max` and `_std` (divided by the count less 1) of |p_train - p_rollout| over
      trained tokens; `rollout_actor_probs_pearson_corr`, their correlation, 0 if either has no variance;
      `rollout_probs_diff_valid`, 1 if there is a trained token.
    """
    train_BT = jnp.exp(masked(train_logprob_BT, mask_BT))
    rollout_BT = jnp.exp(masked(rollout_logprob_BT, mask_BT))
    gap = Moments.of(jnp.abs(train_BT - rollout_BT), mask_BT)
    train, rollout = Moments.of(train_BT, mask_BT), Moments.of(rollout_BT, mask_BT)
    covariance = Moments.of((train_BT - train.mean) * (rollout_BT - rollout.mean), mask_BT).mean
    metrics = {
        "rollout_probs_diff_mean": gap.mean,
        "rollout_probs_diff_max": gap.max,
        "rollout_probs_diff_std": gap.sample_std,
        "rollout_actor_probs_pearson_corr": covariance / _or_one(train.std * rollout.std),
        "rollout_probs_diff_valid": mask_BT.astype(bool).any().astype(train_BT.dtype),
    }
    return jax.tree.map(jax.lax.stop_gradient, metrics)


def _or_one(x: jax.Array) -> jax.Array:
    """x, or 1 where x is 0: a safe divisor where 0 / 0 should give 0."""
    return jnp.where(x == 0, jnp.ones_like(x), x)


def _share(condition: jax.Array, mask: jax.Array) -> Moments:
    """Moments of a 0/1 indicator; their mean is the share of masked-in tokens that meet the condition."""
    return Moments.of(condition.astype(mask.dtype), mask)


def _furthest(moments: Moments, point: float) -> jax.Array:
    """The largest distance of any number from a point; 0 without numbers."""
    distance = jnp.maximum(jnp.abs(moments.min - point), jnp.abs(moments.max - point))
    return masked(distance, moments.count)
