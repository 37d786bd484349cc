"""Correction of a batch: weights and rejections, in the direction the settings say."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import SHAPES, packed, sequences

from jaxrl.algos.moments import add_moments
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.roles.losses import (
    REJECTIONS,
    CorrectionConfig,
    correct,
    corrected,
    correction_metrics,
    norm_factor,
)

ROWS = sequences()


def ratios() -> list[np.ndarray]:
    """pi_train / pi_rollout of every sequence's response tokens."""
    return [
        np.exp(row["old_logprob"] - row["rollout_logprob"])[row["loss_mask"] > 0] for row in ROWS
    ]


def run(shape="packed", **settings):
    """(weight, mask) of every sequence's response tokens, and metrics."""
    packing, batch = packed(ROWS, SHAPES[shape])
    out, metrics = corrected(CorrectionConfig(**settings), batch)

    def responses(field):
        unpacked = packing.unpack(np.asarray(field))
        return [x[row["loss_mask"] > 0] for x, row in zip(unpacked, ROWS, strict=True)]

    return responses(out.weight), responses(out.loss_mask), metrics


def test_without_settings_the_gap_is_measured_and_nothing_changes():
    weight, mask, metrics = run()
    assert all((w == 1).all() for w in weight) and all((m == 1).all() for m in mask)
    rho = np.log(np.concatenate(ratios()))
    assert float(metrics["rollout_corr/kl"]) == pytest.approx(-rho.mean(), rel=1e-5)
    assert float(metrics["training/rollout_probs_diff_valid"]) == 1
    assert not any("rollout_rs" in name or "rollout_is" in name for name in metrics)


@pytest.mark.parametrize("shape", SHAPES)
def test_token_weights_are_cut_from_above(shape):
    weight, _, metrics = run(shape, weights="token", bounds=(0.0, 1.5))
    for ours, ratio in zip(weight, ratios(), strict=True):
        np.testing.assert_allclose(ours, np.minimum(ratio, 1.5), rtol=1e-5)
    # Statistics are of the weights that are used, shares beyond the bound of those before.
    whole = np.concatenate(ratios())
    used = np.minimum(whole, 1.5)
    expected = {
        "rollout_is_mean": used.mean(),
        "rollout_is_max": used.max(),
        "rollout_is_std": used.std(),
        "rollout_is_ratio_fraction_high": (whole > 1.5).mean(),
        "rollout_is_ratio_fraction_low": (whole < 1 / 1.5).mean(),
    }
    for name, value in expected.items():
        assert float(metrics[f"rollout_corr/{name}"]) == pytest.approx(value, rel=1e-5), name
    # A share outside a band is there only if there is one, and a factor only if something is divided.
    assert "rollout_corr/rollout_is_oob_ratio" not in metrics
    assert "rollout_corr/rollout_is_batch_norm_factor" not in metrics


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_factor_that_is_told_is_the_one_that_divides(level):
    plain, _, _ = run(weights=level, bounds=(0.0, 1.5))
    weight, _, metrics = run(weights=level, bounds=(0.0, 1.5), normalize=True)
    # By hand: the mean over tokens, or over sequences, of the weights that are used.
    by_level = np.concatenate(plain) if level == "token" else np.array([w[0] for w in plain])
    factor = float(metrics["rollout_corr/rollout_is_batch_norm_factor"])
    assert factor == pytest.approx(by_level.mean(), rel=1e-5)
    for ours, before in zip(weight, plain, strict=True):
        np.testing.assert_allclose(ours, before / factor, rtol=1e-5)


def test_a_huge_ratio_that_is_cut_does_not_show_in_the_factor():
    """exp(15.5) = 5.4e6 is the mean of the raw ratios, and .975 that of the weights that are used."""
    where = jnp.ones((1, 4)), jnp.ones((1, 4), jnp.int32)
    rollout = jnp.full((1, 4), -17.0)
    train = rollout + jnp.log(jnp.array([[0.9, 0.5, 0.5, 0.0]])).at[0, 3].set(16.9)
    config = CorrectionConfig(weights="token", bounds=(0.0, 2.0), normalize=True)
    weight, _, moments = correct(config, train, rollout, *where)
    np.testing.assert_allclose(weight, [[0.9, 0.5, 0.5, 2.0]], rtol=1e-5)
    assert float(norm_factor(config, moments)) == pytest.approx(3.9 / 4, rel=1e-5)


def test_several_rejections_must_all_let_pass_and_each_sees_the_original_mask():
    reject = dict(token_ratio=(0.5, math.inf), seq_mean_k3=0.5, veto=0.3)
    _, mask, metrics = run(reject=reject)
    expected, lost = [], []
    for ratio in ratios():
        by_token = ratio < 0.5
        by_mean = np.full(len(ratio), (ratio - 1 - np.log(ratio)).mean() > 0.5)
        vetoed = np.full(len(ratio), ratio.min() < 0.3)
        expected.append(~(by_token | by_mean | vetoed))
        lost.append((by_token, by_mean, vetoed))
    for ours, kept in zip(mask, expected, strict=True):
        np.testing.assert_array_equal(ours > 0, kept)
    for i, name in enumerate(("token_k1", "seq_mean_k3", "veto")):
        share = np.concatenate([row[i] for row in lost]).mean()
        told = float(metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"])
        assert told == pytest.approx(share, rel=1e-5) and 0 < share < 1
        hit = np.mean([row[i].any() for row in lost])
        told = float(metrics[f"rollout_corr/rollout_rs_{name}_seq_masked_fraction"])
        assert told == pytest.approx(hit, rel=1e-5)
    whole = 1 - np.concatenate(expected).mean()
    told = float(metrics["rollout_corr/rollout_rs_masked_fraction"])
    assert told == pytest.approx(whole, rel=1e-5)


def test_statistics_of_parts_are_those_of_the_whole():
    """As microbatches take them inside the loss."""
    config = CorrectionConfig(
        weights="token", bounds=(0.5, 2.0), reject=dict(seq_max_k2=0.5, veto=0.1)
    )
    _, rows = packed(ROWS, SHAPES["one each"])
    arrays = [
        x.reshape(8, -1)
        for x in (rows.old_logprob, rows.rollout_logprob, rows.loss_mask, rows.segment_ids)
    ]
    moments_of = jax.jit(lambda *arrays: correct(config, *arrays).moments)

    def metrics_of(moments):
        return jax.jit(lambda t: correction_metrics(config, jax.tree.map(lambda x: x[None], t)))(
            moments
        )

    # The part without any row has nothing to tell.
    parts = [moments_of(*(x * (np.arange(8) < 3)[:, None] for x in arrays))]
    parts += [moments_of(*(x * (np.arange(8) >= 3)[:, None] for x in arrays))]
    parts += [moments_of(*(x * 0 for x in arrays))]
    ours = metrics_of(functools.reduce(add_moments, parts))
    for name, value in metrics_of(moments_of(*arrays)).items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bounds": (3.0, 2.0)}, "write the lower one first"),
        ({"reject": {"veto": 1.0}}, "veto = 1.0: must be above 0 and below 1"),
        ({"reject": {"token_ratio": (0.0, 2.0)}}, "token_ratio.* = 0.0: must be above 0"),
        ({"reject": {"token_ratio": 0.5}}, "token_ratio = 0.5: "),
        ({"reject": {"token_k2": (0.5, 2.0)}}, r"token_k2 = \(0.5, 2.0\): "),
        ({"reject": {"seq_mean_ratio": (2.0, 1.0)}}, "lowest ratio above its highest"),
        ({"reject": {"seq_sum_ratio": (math.nan, 1.0)}}, "seq_sum_ratio.* = nan: must be"),
        ({"reject": {"token_k3": 0.0}}, "token_k3 = 0.0: must be above 0"),
        ({"reject": {"seq_max_k2": math.inf}}, "seq_max_k2 = inf: must be"),
        (
            {"reject": {"seq_mean_k4": 0.5}},
            "reject.seq_mean_k4 is not a rejection.*near: seq_mean_k",
        ),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**settings)


def test_every_rule_is_told_by_the_command_line():
    """As verl's comma list, a rule at a time; `none` takes one of the recipe away."""
    where = "algorithm.correction.reject."
    limits = {name: "0.5,2" if name.endswith("ratio") else "0.01" for name in REJECTIONS}

    def told(**limits: str):
        named = {where + name: text for name, text in limits.items()}
        return load_config(Config, "configs/grpo_tiny.py", named).algorithm.correction

    names = [rule.name for rule in told(**limits).rejections]
    assert names == [name.replace("ratio", "k1") for name in REJECTIONS]
    assert told(token_ratio="0.5,2", seq_mean_k3="1", token_k2="none").reject == {
        "token_ratio": (0.5, 2.0),
        "seq_mean_k3": 1.0,
    }
    with pytest.raises(UserError, match=r"algorithm.correction: reject.token_ratio \(2.0, 1.0\)"):
        told(token_ratio="2.0,1.0")
    with pytest.raises(UserError, match=r"reject.tokn_k2 is not a rejection rule; near: token_k"):
        told(tokn_k2="0.1")
