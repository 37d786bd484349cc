import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algos import group_advantages
from jaxrl.algos.moments import whiten

B, GROUPS = 9, 6
few = settings(max_examples=25)

# Eighths are exact in float32, and so are their sums; scores repeat often.
scores = st.lists(st.integers(-4, 4).map(lambda n: n / 8), min_size=B, max_size=B)
# Scattered groups, groups of one, groups nobody is in, absent sequences.
members = st.lists(st.integers(-1, GROUPS - 1), min_size=B, max_size=B)
lengths = st.lists(st.sampled_from([0, 1, 2, 7]), min_size=B, max_size=B)


# Twins: one group's scores and lengths -> advantages, before what concerns the batch


def mean_twin(s, n):
    return s - s.mean() if len(s) > 1 else s


def deviation(s):
    return np.sqrt(((s - s.mean()) ** 2).sum() / (len(s) - 1)) if len(s) > 1 else 1.0


def grpo_twin(s, n):
    return mean_twin(s, n) / (deviation(s) + 1e-6)


def passk_twin(s, n):
    if len(s) == 1:
        return s
    first, second = np.sort(s)[::-1][:2]
    return np.where(s == first, first - second, 0.0)


def passk_normalised_twin(s, n):
    return passk_twin(s, n) / (deviation(s) + 1e-6)


def rloo_twin(s, n):
    return np.array([s[i] - (np.delete(s, i).mean() if len(s) > 1 else 0) for i in range(len(s))])


def opo_twin(s, n):
    if n.sum() == 0:
        return 0 * s
    return s - (n * s).sum() / n.sum() if len(s) > 1 else s


def whiten_twin(x, weight):
    """By repeating each entry as often as it counts."""
    repeated = np.repeat(x, weight)
    if len(repeated) <= 1:
        return 0 * x
    mean, variance = repeated.mean(), repeated.var(ddof=1)
    return np.where(weight > 0, (x - mean) / np.sqrt(variance + 1e-8), 0)


def by_group(twin, score, group, length):
    advantage = np.zeros(B)
    for g in range(GROUPS):
        rows = group == g
        if rows.any():
            advantage[rows] = twin(score[rows], length[rows])
    return advantage


def gpg_twin(score, group, length):
    taught = [
        (group == g).sum() if np.any(by_group(mean_twin, score, group, length)[group == g]) else 0
        for g in range(GROUPS)
    ]
    alpha = (group >= 0).sum() / max(1, sum(taught))
    return alpha * by_group(mean_twin, score, group, length)


def whitened_twin(score, group, length):
    return whiten_twin(by_group(mean_twin, score, group, length), np.where(group < 0, 0, length))


TWINS = {
    "grpo": functools.partial(by_group, grpo_twin),
    "dr_grpo": functools.partial(by_group, mean_twin),
    "grpo_passk": functools.partial(by_group, passk_normalised_twin),
    "passk": functools.partial(by_group, passk_twin),
    "rloo": functools.partial(by_group, rloo_twin),
    "opo": functools.partial(by_group, opo_twin),
    "gpg": gpg_twin,
    "reinforce_plus_plus_baseline": whitened_twin,
}


def ours(name):
    match name:
        case "dr_grpo":
            function = functools.partial(group_advantages.grpo, normalize_std=False)
        case "passk":
            function = functools.partial(group_advantages.grpo_passk, normalize_std=False)
        case _:
            function = getattr(group_advantages, name)
    if name in ("opo", "reinforce_plus_plus_baseline"):
        return jax.jit(lambda s, g, n: function(s, g, n, num_groups=GROUPS))
    return jax.jit(lambda s, g, n: function(s, g, num_groups=GROUPS))


ESTIMATORS = {name: ours(name) for name in TWINS}


def arrays(score, group, length):
    return np.array(score, np.float32), np.array(group, np.int32), np.array(length, np.int32)


@few
@given(scores, members, lengths)
@pytest.mark.parametrize("name", TWINS)
def test_equals_its_twin(name, score, group, length):
    score, group, length = arrays(score, group, length)
    advantage = ESTIMATORS[name](np.where(group < 0, np.nan, score), group, length)
    assert advantage.dtype == jnp.float32
    expected = TWINS[name](score.astype(np.float64), group, length)
    np.testing.assert_allclose(advantage, expected, rtol=2e-5, atol=2e-6)


@few
@given(scores, lengths, st.integers(-40, 40).map(lambda n: n / 8))
@pytest.mark.parametrize("name", TWINS)
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name, score, length, shift):
    group = [0, 1, 0, 1, 2, 2, 1, 0, 2]
    score, group, length = arrays(score, group, length)
    shifted = score + np.float32(shift) * (group == 1)
    np.testing.assert_array_equal(
        ESTIMATORS[name](shifted, group, length), ESTIMATORS[name](score, group, length)
    )


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("score", [-1.3, 0.1, 1e4, 0.0])
def test_equal_rewards_give_exactly_nothing(name, score):
    advantage = ESTIMATORS[name](
        *arrays([score] * B, [0] * 5 + [3] * 4, [3, 1, 0, 2, 7, 1, 1, 1, 4])
    )
    np.testing.assert_array_equal(advantage, np.zeros(B))


def test_by_hand():
    score, group, length = arrays(
        [1, 0, 0, 1, 0, 0, 0, 0, 0], [0] * 4 + [1] * 5, [1, 3, 2, 2] + [1] * 5
    )
    halves = [0.5, -0.5, -0.5, 0.5]
    np.testing.assert_allclose(ESTIMATORS["dr_grpo"](score, group, length), halves + [0] * 5)
    # Of the others of a 1, one of three is a 1; of the others of a 0, two.
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3]
    np.testing.assert_allclose(ESTIMATORS["rloo"](score, group, length)[:4], expected, rtol=1e-6)
    # 3 of 8 tokens belong to a 1.
    expected = [5 / 8, -3 / 8, -3 / 8, 5 / 8]
    np.testing.assert_allclose(ESTIMATORS["opo"](score, group, length)[:4], expected, rtol=1e-6)
    # Four of nine teach.
    np.testing.assert_allclose(
        ESTIMATORS["gpg"](score, group, length)[:4], np.array(halves) * 9 / 4, rtol=1e-6
    )
    # Two share the maximum.
    np.testing.assert_array_equal(ESTIMATORS["passk"](score, group, length), np.zeros(B))


def test_the_deviation_of_the_batch_is_that_of_its_scores():
    """By hand: scores 1 0 | 1 1 | 0 0 0 have mean 3/7 and variance (3 * 16 + 4 * 9) / 49 / 6 = 2/7."""
    score, group, _ = arrays([1, 0, 9, 1, 1, 0, 0, 0, 9], [0, 0, -1, 1, 1, 2, 2, 2, -1], [1] * B)
    score[group < 0] = np.nan
    advantage = group_advantages.grpo_batch_std(score, group, num_groups=GROUPS)
    expected = np.array([0.5, -0.5] + [0] * 7) / np.sqrt(2 / 7)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5)
    # Whitening what is left after the groups' means is another scale: their variance is .5 / 6.
    whitened = whiten(np.float32([0.5, -0.5, 0, 0, 0, 0, 0]), np.ones(7, np.float32))
    np.testing.assert_allclose(whitened[0], 0.5 / np.sqrt(0.5 / 6), rtol=1e-5)
    equal = group_advantages.grpo_batch_std(0 * score + 0.1, group, num_groups=GROUPS)
    np.testing.assert_array_equal(equal, np.zeros(B))


@few
@given(st.lists(scores, min_size=2, max_size=2), members, lengths)
def test_gdpo_equals_its_twin(score_K, group, length):
    score_BK = np.array(score_K, np.float32).T
    _, group, length = arrays([], group, length)
    weight_K = np.array([1.0, 0.25], np.float32)
    advantage = gdpo(np.where(group[:, None] < 0, np.nan, score_BK), group, length, weight_K)
    total = sum(
        w * by_group(grpo_twin, score_BK[:, k].astype(np.float64), group, length)
        for k, w in enumerate(weight_K)
    )
    expected = whiten_twin(total, np.where(group < 0, 0, length))
    np.testing.assert_allclose(advantage, expected, rtol=2e-4, atol=2e-5)


gdpo = jax.jit(functools.partial(group_advantages.gdpo, num_groups=GROUPS))


def test_gdpo_tells_apart_what_the_sum_of_rewards_confuses():
    # Both first answers lead by all there is in one component; by GRPO of the sum all leads are alike.
    score_BK = np.array([[1, 0], [0, 0], [1, 1], [0, 0]] + [[0, 0]] * 5, np.float32)
    group = np.array([0, 0, 1, 1] + [-1] * 5, np.int32)
    together = ESTIMATORS["grpo"](score_BK.sum(1), group, np.ones(B, np.int32))
    np.testing.assert_allclose(together[0], together[2], rtol=1e-5)
    apart = gdpo(score_BK, group, np.ones(B, np.int32), np.ones(2, np.float32))
    np.testing.assert_allclose(2 * apart[0], apart[2], rtol=1e-5)


@few
@given(scores, lengths)
def test_whitening_equals_its_twin(x, weight):
    x, weight = np.array(x, np.float32), np.array(weight, np.float32)
    ours = jax.jit(whiten)(np.where(weight > 0, x, np.nan), weight)
    expected = whiten_twin(x.astype(np.float64), weight.astype(int))
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)
