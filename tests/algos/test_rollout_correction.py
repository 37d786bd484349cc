import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged

from jaxrl.algos import rollout_correction as correction
from jaxrl.algos.aggregation import AGGREGATIONS, count
from jaxrl.algos.rollout_correction import WEIGHTINGS, Rejection

seeds = st.integers(0, 10_000)
few = settings(max_examples=15)

log_ratio = jax.jit(correction.log_ratio)
token_weights = jax.jit(correction.token_weights)
sequence_weights = jax.jit(correction.sequence_weights)
mismatch_metrics = jax.jit(
    lambda *arrays: correction.mismatch_metrics(correction.mismatch_moments(*arrays))
)


def example(seed):
    """Sequences, their two log-probabilities, and rho of their trained tokens."""
    ragged = Ragged.sample(seed)
    rollout, gap = ragged.values(-3, -0.6), ragged.values(-0.5, 0.5)
    train = [r + g for r, g in zip(rollout, gap, strict=True)]
    rho = [t - r for t, r in ragged.trained(train, rollout)]
    return ragged, ragged.spoiled(train), ragged.spoiled(rollout), rho


def packed_rho(seed):
    ragged, train, rollout, rho = example(seed)
    return ragged, log_ratio(train, rollout, ragged.mask), rho


# Weights


@few
@given(seeds)
def test_weights_equal_their_twins(seed):
    ragged, ours, rho = packed_rho(seed)
    ragged.assert_equal(ours, rho)
    ragged.assert_equal(token_weights(ours, *ragged.where), [np.exp(x) for x in rho])
    whole = [np.full(len(x), np.exp(x.sum())) for x in rho]
    ragged.assert_equal(sequence_weights(ours, *ragged.where), whole)


def test_truncation_and_the_band_differ_above_the_bound():
    weight = jnp.array([0.0, 0.4, 0.5, 1.0, 2.0, 2.1])
    np.testing.assert_allclose(correction.truncate(weight, highest=2.0), [0, 0.4, 0.5, 1, 2, 2])
    banded = correction.band(weight, lowest=0.5, highest=2.0)
    np.testing.assert_allclose(banded, [0, 0, 0.5, 1, 2, 0])


def test_weights_are_constants_to_the_gradient():
    ones = jnp.ones((1, 3))
    where = (ones, ones.astype(jnp.int32))

    def total(logprob):
        rho = correction.log_ratio(logprob, ones, ones)
        return sum(f(rho, *where).sum() for f in (token_weights, sequence_weights))

    assert not jax.grad(total)(0.5 * ones).any()


# Rejection

LEVELS = {
    "token": lambda x: x,
    "seq_sum": lambda x: np.full(len(x), x.sum()),
    "seq_mean": lambda x: np.full(len(x), x.mean() if len(x) else 0),
    "seq_max": lambda x: np.full(len(x), x.max() if len(x) else 0),
}
DIVERGENCES = {"k1": lambda x: -x, "k2": lambda x: x**2 / 2, "k3": lambda x: np.exp(x) - 1 - x}


def test_gates_on_the_probabilities_themselves():
    """By hand: .5 of the trainer against .25 of the sampler, and .5 against .4."""
    train, rollout = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.4]]))
    ones = jnp.ones((1, 2))
    rho = correction.log_ratio(train, rollout, ones)
    by_hand = {
        "tv": [0.25, 0.1],
        "kl": [
            0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5),
            0.4 * math.log(0.4 / 0.5) + 0.6 * math.log(0.6 / 0.5),
        ],
    }
    for by, expected in by_hand.items():
        gate = Rejection("any", "token", by, -math.inf, 0.11)
        statistic = gate.statistic(rho, train, ones, ones.astype(jnp.int32))
        np.testing.assert_allclose(statistic, [expected], rtol=1e-5)
        np.testing.assert_array_equal(gate.keep(statistic, ones), [[0, 1]])
    # Both certain of the token: no gap, and no NaN.
    certain = Rejection("any", "token", "kl", -math.inf, 0.1)
    zero = jnp.zeros((1, 1))
    assert certain.statistic(zero, zero, ones[:, :1], jnp.ones((1, 1), jnp.int32)) == 0


@functools.cache
def rejected(over, by, lowest, highest):
    """(what is kept, metrics) by a rejection, compiled."""
    rejection = Rejection("any", over, by, lowest, highest)

    def run(rho, mask, ids):
        statistic = rejection.statistic(rho, jnp.zeros_like(rho), mask, ids)
        kept = rejection.keep(statistic, mask)
        moments = correction.rejection_moments(rejection, statistic, kept, mask, ids)
        return kept, correction.rejection_metrics(rejection, moments)

    return jax.jit(run)


@few
@given(seeds)
@pytest.mark.parametrize("over", ["token", "seq_sum", "seq_mean"])
def test_the_ratio_must_lie_between_the_bounds(over, seed):
    ragged, ours, rho = packed_rho(seed)
    kept, _ = rejected(over, "k1", *correction.ratio_bounds(0.8, 1.1))(ours, *ragged.where)
    ratios = [np.exp(LEVELS[over](x)) for x in rho]
    ragged.assert_equal(kept, [(r >= 0.8) & (r <= 1.1) for r in ratios])


@few
@given(seeds)
@pytest.mark.parametrize("by", ["k2", "k3"])
@pytest.mark.parametrize("over", LEVELS)
def test_the_divergence_must_not_exceed_the_bound(over, by, seed):
    ragged, ours, rho = packed_rho(seed)
    kept, _ = rejected(over, by, -math.inf, 0.05)(ours, *ragged.where)
    levels = [LEVELS[over](DIVERGENCES[by](x)) for x in rho]
    ragged.assert_equal(kept, [x <= 0.05 for x in levels])


@few
@given(seeds)
def test_one_impossible_token_vetoes_its_sequence(seed):
    ragged, ours, rho = packed_rho(seed)
    veto = rejected("seq_max", "k1", *correction.ratio_bounds(0.7, math.inf))
    kept, _ = veto(ours, *ragged.where)
    ragged.assert_equal(kept, [np.full(len(x), np.all(np.exp(x) >= 0.7)) for x in rho])


@few
@given(seeds)
@pytest.mark.parametrize(
    ("over", "by", "lowest", "highest"),
    [
        ("token", "k1", -0.2, 0.3),
        ("token", "k3", -math.inf, 0.02),
        ("seq_sum", "k1", -0.2, 0.3),
        ("seq_mean", "k2", -math.inf, 0.02),
    ],
)
def test_metrics_of_a_rejection_equal_their_twins(over, by, lowest, highest, seed):
    ragged, ours, rho = packed_rho(seed)
    _, metrics = rejected(over, by, lowest, highest)(ours, *ragged.where)
    rows = [LEVELS[over](DIVERGENCES[by](x)) for x in rho if len(x)]
    if not rows:
        assert all(value == 0 for value in metrics.values())
        return
    x = np.concatenate(rows)
    s = np.array([row.mean() for row in rows])
    lost = [(row < lowest) | (row > highest) for row in rows]
    judged = x if over == "token" else s
    expected = {
        "mean": x.mean(),
        "std": np.clip(x, lowest, highest).std(),
        "min": x.min(),
        "max": x.max(),
        "fraction_high": (judged > highest).mean(),
        "fraction_low": (judged < lowest).mean(),
        "seq_mean": s.mean(),
        "seq_std": s.std(ddof=1) if len(s) > 1 else 0,
        "seq_min": s.min(),
        "seq_max": s.max(),
        "seq_max_deviation": abs(s).max(),
        "seq_fraction_high": (s > highest).mean(),
        "seq_fraction_low": (s < lowest).mean(),
        "masked_fraction": np.concatenate(lost).mean(),
        "seq_masked_fraction": np.mean([row.any() for row in lost]),
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=5e-5, atol=1e-5, err_msg=name)


def test_rejected_tokens_leave_numerator_and_denominator():
    mask, ids = jnp.ones((1, 4)), jnp.array([[1, 1, 2, 2]])
    rho = jnp.log(jnp.array([[1.0, 1.0, 1.0, 9.0]]))
    kept, _ = rejected("token", "k1", *correction.ratio_bounds(0.5, 2.0))(rho, mask, ids)
    mean = AGGREGATIONS["token-mean"]()
    total = mean.total(jnp.array([[1.0, 2, 3, jnp.nan]]), kept, ids)
    assert total / mean.divisor(count(kept, ids)) == 2
    metrics = kept_metrics(kept, mask, ids)
    assert metrics == {"masked_fraction": 0.25, "seq_masked_fraction": 0.5, "seq_lost_fraction": 0}


@jax.jit
def kept_metrics(kept, mask, ids):
    return correction.kept_metrics(correction.kept_moments(kept, mask, ids))


@few
@given(seeds)
def test_what_several_rejections_take_away_equals_its_twin(seed):
    ragged = Ragged.sample(seed)
    kept = [ragged.rng.random(len(m)) < 0.6 for m in ragged.masks]
    ours = kept_metrics(ragged.pack(kept), *ragged.where)
    rows = [1 - k for (k,) in ragged.trained(kept) if len(k)]
    expected = {
        "masked_fraction": np.concatenate(rows).mean() if rows else 0,
        "seq_masked_fraction": np.mean([x.any() for x in rows]) if rows else 0,
        "seq_lost_fraction": np.mean([x.all() for x in rows]) if rows else 0,
    }
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, expected)


# Metrics


@few
@given(seeds)
def test_mismatch_metrics_equal_their_twins(seed):
    ragged, train, rollout, rho = example(seed)
    ours = mismatch_metrics(train, rollout, *ragged.where)
    live = [i for i, x in enumerate(rho) if len(x)]
    if not live:
        assert all(value == 0 for value in ours.values())
        return
    r = np.concatenate(rho)
    t_ppl, r_ppl = (
        np.array(
            [-x[m].mean() for x, m in zip(ragged.unpack(p), ragged.masks, strict=True) if m.any()]
        )
        for p in (train.astype(np.float64), rollout.astype(np.float64))
    )
    gap = t_ppl - r_ppl
    expected = {
        "kl": -r.mean(),
        "k3_kl": (np.exp(r) - 1 - r).mean(),
        "chi2_token": (np.exp(r) ** 2).mean() - 1,
        "training_log_ppl": t_ppl.mean(),
        "training_ppl": np.exp(t_ppl).mean(),
        "rollout_log_ppl": r_ppl.mean(),
        "rollout_ppl": np.exp(r_ppl).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": abs(gap).mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": np.exp(gap).mean(),
        "chi2_seq": np.mean([np.exp(2 * rho[i].sum()) - 1 for i in live]),
    }
    assert set(ours) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=5e-5, atol=5e-6, err_msg=name)


@functools.cache
def weighed(level):
    """(weights cut at 1.2, what normalises them, metrics), compiled."""
    weighting = WEIGHTINGS[level]

    def run(rho, mask, ids):
        ratio = weighting.of_ratio(rho, mask, ids)
        weight = correction.truncate(ratio, highest=1.2)
        moments = correction.weight_moments(ratio, weight, mask, ids, lowest=0.8, highest=1.2)
        metrics = weighting.metrics(moments) | correction.outside_band(moments)
        return weight, weighting.norm_factor(moments), metrics

    return jax.jit(run)


@few
@given(seeds)
@pytest.mark.parametrize("level", WEIGHTINGS)
def test_weight_metrics_equal_their_twins(level, seed):
    """Of the weights that are used, but for shares beyond the bounds, and the range of sequence weights."""
    ragged, ours, rho = packed_rho(seed)
    weight, factor, metrics = weighed(level)(ours, *ragged.where)
    ratios = [np.exp(x if level == "token" else np.full(len(x), x.sum())) for x in rho]
    ragged.assert_equal(weight, [np.minimum(x, 1.2) for x in ratios])
    ratios = [x for x in ratios if len(x)]
    if not ratios:
        assert factor == 1 and all(value == 0 for value in metrics.values())
        return
    raw, raw_s = np.concatenate(ratios), np.array([x.mean() for x in ratios])
    w, s = np.minimum(raw, 1.2), np.array([np.minimum(x, 1.2).mean() for x in ratios])
    judged, ranged = (raw, w) if level == "token" else (raw_s, raw_s)
    expected = {
        "mean": w.mean(),
        "std": w.std(),
        "min": ranged.min(),
        "max": ranged.max(),
        "eff_sample_size": w.mean() ** 2 / (w**2).mean(),
        "ratio_fraction_high": np.mean(judged > 1.2),
        "ratio_fraction_low": np.mean(judged < 0.8),
        "oob_ratio": np.mean((raw > 1.2) | (raw < 0.8)),
        "seq_mean": s.mean(),
        "seq_std": s.std(ddof=1) if len(s) > 1 else 0,
        "seq_min": s.min(),
        "seq_max": s.max(),
        "seq_max_deviation": abs(s - 1).max(),
        "seq_fraction_high": np.mean(raw_s > 1.2),
        "seq_fraction_low": np.mean(raw_s < 0.8),
    }
    assert set(metrics) == {f"rollout_is_{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(
            metrics[f"rollout_is_{name}"], value, rtol=5e-5, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(factor, w.mean() if level == "token" else s.mean(), rtol=1e-5)


@pytest.mark.parametrize("level", WEIGHTINGS)
def test_weights_of_nothing_but_0_are_divided_by_1(level):
    zeros, ones = jnp.zeros((1, 3)), jnp.ones((1, 3))
    ids = ones.astype(jnp.int32)
    moments = correction.weight_moments(ones, zeros, ones, ids, lowest=2.0, highest=3.0)
    assert WEIGHTINGS[level].norm_factor(moments) == 1


@few
@given(seeds)
def test_probability_metrics_equal_their_twins(seed):
    ragged, train, rollout, _ = example(seed)
    ours = jax.jit(correction.probability_metrics)(train, rollout, ragged.mask)
    inside = ragged.mask > 0
    p, q = np.exp(train[inside].astype(np.float64)), np.exp(rollout[inside].astype(np.float64))
    assert ours["rollout_probs_diff_valid"] == float(len(p) > 0)
    if len(p) < 3:
        return
    expected = {
        "rollout_probs_diff_mean": abs(p - q).mean(),
        "rollout_probs_diff_max": abs(p - q).max(),
        "rollout_probs_diff_std": abs(p - q).std(ddof=1),
        "rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
