"""Advantages of packed batches: what comes out does not know how the step was packed."""

import numpy as np
import pytest
from packed import SHAPES, packed, sequences

from jaxrl.errors import UserError
from jaxrl.roles.advantage_estimator import BASELINE, Estimator

ROWS = sequences()
GROUP = np.arange(8, dtype=np.int32) // 4
SCORE = np.array([1, -1, 1, 1, 0.5, 0.5, 0.5, 0.5], np.float32)


def estimate(estimator: Estimator, shape, **given):
    """(advantage, return) of every sequence's response tokens, and the mean KL."""
    packing, batch = packed(ROWS, SHAPES[shape])
    if "value" in given:
        given["value"] = packing.pack([row["value"] for row in ROWS], np.float32)
    advantage, target, kl = estimator(batch, SCORE, GROUP, num_groups=2, **given)
    outside = np.asarray(batch.loss_mask) == 0
    assert (np.asarray(advantage)[outside] == 0).all()

    def responses(field):
        unpacked = packing.unpack(np.asarray(field))
        return [x[row["loss_mask"] > 0] for x, row in zip(unpacked, ROWS, strict=True)]

    return responses(advantage), responses(target), float(kl)


@pytest.mark.parametrize("shape", SHAPES)
def test_group_relative_advantages_by_hand(shape):
    advantage, _, _ = estimate(Estimator.of("grpo", {}), shape)
    deviation = SCORE[:4].std(ddof=1)
    expected = [(s - SCORE[:4].mean()) / (deviation + 1e-6) for s in SCORE[:4]] + [0] * 4
    for ours, value, row in zip(advantage, expected, ROWS, strict=True):
        np.testing.assert_allclose(ours, np.full(int(row["loss_mask"].sum()), value), rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gae_with_the_price_of_kl(shape):
    estimator = Estimator.of("gae", {"gamma": 0.9, "lam": 0.8})
    advantage, target, mean_kl = estimate(estimator, shape, value=True, kl_coef=0.3)
    kls = []
    for ours, theirs, row, score in zip(advantage, target, ROWS, SCORE, strict=True):
        inside = row["loss_mask"] > 0
        kl = (row["old_logprob"] - row["ref_logprob"])[inside]
        kls.append(kl.mean())
        value = row["value"][inside]
        reward = -0.3 * kl
        reward[-1] += score
        following, carried, expected = 0.0, 0.0, []
        for r, v in zip(reward[::-1], value[::-1], strict=True):
            carried = r + 0.9 * following - v + 0.9 * 0.8 * carried
            following = v
            expected.append(carried)
        np.testing.assert_allclose(ours, expected[::-1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(theirs, ours + value, rtol=1e-5, atol=1e-6)
    assert mean_kl == pytest.approx(np.mean(kls), rel=1e-5)


def test_the_price_of_kl_reaches_estimators_of_groups_too():
    advantage, _, _ = estimate(Estimator.of("rloo", {}), "packed", kl_coef=0.3)
    total = np.array(
        [
            score - 0.3 * (row["old_logprob"] - row["ref_logprob"])[row["loss_mask"] > 0].sum()
            for score, row in zip(SCORE, ROWS, strict=True)
        ]
    )
    for i, ours in enumerate(advantage):
        others = np.delete(total[GROUP[i] == GROUP], i % 4)
        np.testing.assert_allclose(ours, total[i] - others.mean(), rtol=1e-4, atol=1e-5)


def test_the_greedy_answer_is_the_baseline_of_remax():
    baseline = np.arange(8, dtype=np.float32)
    advantage, _, _ = estimate(Estimator.of("remax", {}), "packed", baseline_B=baseline)
    for ours, score, less in zip(advantage, SCORE, baseline, strict=True):
        np.testing.assert_allclose(ours, score - less, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_step(shape):
    advantage, _, _ = estimate(Estimator.of("gae", {}, whiten=True), shape, value=True)
    tokens = np.concatenate(advantage)
    assert tokens.mean() == pytest.approx(0, abs=1e-5)
    assert tokens.std(ddof=1) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Estimator.of("gea", {}), "advantage 'gea' is not known; use one of gae, gdpo"),
        (lambda: Estimator.of("grpo", {"std": 1}), "advantage 'grpo' has no option std; it has"),
        (lambda: Estimator.of("grpo", {"num_groups": 3}), "no option num_groups"),
        (lambda: Estimator.of("gae", {}, kl_estimate="k4"), "KL estimate 'k4' is not known"),
        (
            lambda: Estimator.of("gae", {}).check(
                "grpo", frozenset({BASELINE}), num_samples=2, bypass=False
            ),
            "advantage 'gae' needs value_BT, which dataflow 'grpo' does not compute",
        ),
        (
            lambda: Estimator.of("optimal_token_baseline", {}).check(
                "grpo", frozenset(), num_samples=2, bypass=True
            ),
            "looks at the trainer's probabilities of the whole vocabulary",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)
