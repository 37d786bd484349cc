"""Correction of a batch: weights and rejections, in the direction the settings say."""

import numpy as np
import pytest
from packed import SHAPES, packed, sequences

from jaxrl.roles.correction import CorrectionConfig, corrected

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
    assert "rollout_corr/masked_fraction" not in metrics


@pytest.mark.parametrize("shape", SHAPES)
def test_token_weights_are_cut_from_above(shape):
    weight, _, metrics = run(shape, weights="token", highest=1.5)
    for ours, ratio in zip(weight, ratios(), strict=True):
        np.testing.assert_allclose(ours, np.minimum(ratio, 1.5), rtol=1e-5)
    # Metrics are those of the weights before they are cut.
    above = (np.concatenate(ratios()) > 1.5).mean()
    assert float(metrics["rollout_corr/rollout_is_ratio_fraction_high"]) == pytest.approx(above)


@pytest.mark.parametrize("shape", SHAPES)
def test_sequence_weights_outside_the_band_are_0(shape):
    weight, mask, _ = run(shape, weights="sequence", lowest=0.5, highest=2.0)
    for ours, ratio in zip(weight, ratios(), strict=True):
        whole = ratio.prod()
        np.testing.assert_allclose(ours, whole if 0.5 <= whole <= 2 else 0, rtol=1e-4)
    assert all((m == 1).all() for m in mask)


def test_normalised_weights_have_mean_1():
    weight, _, _ = run(weights="token", normalize=True)
    assert np.concatenate(weight).mean() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_outside_the_bounds_are_rejected(shape):
    _, mask, metrics = run(shape, reject_over="token", reject_lowest=0.5, reject_highest=1.5)
    for ours, ratio in zip(mask, ratios(), strict=True):
        np.testing.assert_array_equal(ours > 0, (ratio >= 0.5) & (ratio <= 1.5))
    share = 1 - np.concatenate(mask).mean()
    assert float(metrics["rollout_corr/masked_fraction"]) == pytest.approx(share, rel=1e-5)


def test_sequences_are_rejected_whole():
    _, mask, _ = run(reject_over="seq_mean", reject_by="k3", reject_highest=0.5)
    for ours, ratio in zip(mask, ratios(), strict=True):
        divergence = (ratio - 1 - np.log(ratio)).mean()
        assert (ours == float(divergence <= 0.5)).all()
    assert 0 < np.concatenate(mask).mean() < 1


def test_one_impossible_token_vetoes_its_sequence():
    _, mask, _ = run(veto=0.4)
    for ours, ratio in zip(mask, ratios(), strict=True):
        assert (ours == float(ratio.min() >= 0.4)).all()
    assert 0 < np.concatenate(mask).mean() < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bypass": True, "weights": "token"}, "corrects twice"),
        ({"lowest": 3.0}, "0 <= lowest < highest"),
        ({"reject_over": "seq_max"}, "set reject_by to k2 or k3"),
        ({"reject_over": "token", "reject_lowest": 0.0}, "0 < lowest <= highest"),
        ({"veto": -1.0}, "use 0 to 1"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**settings)
