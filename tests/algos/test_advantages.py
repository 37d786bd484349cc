import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl.algos import advantages

# Compiled once for each shape: the examples are many.
group_relative = jax.jit(advantages.group_relative, static_argnames="normalize_std")

# Eighths are exact in float32, and so are their sums: what should be equal is equal to the last bit.
eighths = st.integers(-16, 16).map(lambda n: n / 8)
SHAPES = st.tuples(st.just(2), st.integers(1, 5))
rewards_NG = hnp.arrays(np.float32, SHAPES, elements=eighths)


def twin(reward_NG, *, normalize_std=True, epsilon=1e-6):
    """verl's grpo, one number at a time."""
    rows = []
    for group in reward_NG.astype(np.float64):
        mean, deviation = 0.0, 1.0
        if len(group) > 1:
            mean = sum(group) / len(group)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        scale = deviation + epsilon if normalize_std else 1.0
        rows.append([(r - mean) / scale for r in group])
    return np.array(rows)


def test_by_hand():
    # One right of four: mean -.5, deviations 1.5 -.5 -.5 -.5, their squares sum to 3, and 3 / (4 - 1) = 1.
    reward_NG = jnp.array([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0]])
    expected = [[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]]
    np.testing.assert_allclose(group_relative(reward_NG), expected, rtol=5e-6)


def test_the_deviation_is_the_unbiased_one():
    # Of 1 and -1 the biased deviation is 1, the unbiased one the root of 2.
    advantage_NG = group_relative(jnp.array([[1.0, -1.0]]), epsilon=0.0)
    np.testing.assert_allclose(advantage_NG, [[math.sqrt(0.5), -math.sqrt(0.5)]], rtol=1e-6)


@given(rewards_NG, st.booleans(), st.sampled_from([1e-6, 0.5]))
def test_equals_its_numpy_twin(reward_NG, normalize_std, epsilon):
    ours = group_relative(jnp.asarray(reward_NG), normalize_std=normalize_std, epsilon=epsilon)
    expected = twin(reward_NG, normalize_std=normalize_std, epsilon=epsilon)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@given(hnp.arrays(np.float32, (3, 4), elements=eighths), eighths, st.booleans())
def test_a_constant_added_to_a_groups_rewards_changes_nothing(reward_NG, shift, normalize_std):
    shifted_NG = reward_NG.copy()
    shifted_NG[1] += np.float32(shift)
    np.testing.assert_array_equal(
        group_relative(jnp.asarray(shifted_NG), normalize_std=normalize_std),
        group_relative(jnp.asarray(reward_NG), normalize_std=normalize_std),
    )


@given(st.floats(-1000, 1000, width=32), st.sampled_from([2, 3, 7, 8]), st.booleans())
@example(-1.3, 8, True)  # whose float32 mean is another number, by one unit in the last place
def test_equal_rewards_give_exactly_nothing(reward, num_samples, normalize_std):
    group = jnp.full((1, num_samples), reward, jnp.float32)
    advantage_NG = group_relative(group, normalize_std=normalize_std)
    np.testing.assert_array_equal(advantage_NG, np.zeros((1, num_samples)))


@given(hnp.arrays(np.float32, (2, 5), elements=eighths), st.booleans())
def test_a_groups_advantages_sum_to_nothing(reward_NG, normalize_std):
    advantage_NG = group_relative(jnp.asarray(reward_NG), normalize_std=normalize_std)
    np.testing.assert_allclose(advantage_NG.sum(axis=1), [0, 0], atol=1e-5)


@given(hnp.arrays(np.float32, (2, 5), elements=eighths), st.permutations(range(5)))
def test_order_within_a_group_does_not_matter_and_better_answers_stay_better(reward_NG, order):
    advantage_NG = np.asarray(group_relative(jnp.asarray(reward_NG)))
    permuted_NG = group_relative(jnp.asarray(reward_NG[:, order]))
    np.testing.assert_allclose(permuted_NG, advantage_NG[:, order], rtol=1e-5, atol=1e-6)
    for rewards, ours in zip(reward_NG, advantage_NG, strict=True):
        assert np.all(np.diff(ours[np.argsort(rewards, kind="stable")]) >= 0)


@given(
    hnp.arrays(np.float32, (2, 4), elements=eighths), hnp.arrays(np.float32, 4, elements=eighths)
)
def test_groups_do_not_see_each_other(reward_NG, others):
    changed_NG = np.stack([reward_NG[0], others])
    np.testing.assert_array_equal(
        group_relative(jnp.asarray(changed_NG))[0], group_relative(jnp.asarray(reward_NG))[0]
    )


@pytest.mark.parametrize(("normalize_std", "scale"), [(True, 1.5), (False, 1.0)])
def test_a_group_of_one_keeps_its_reward(normalize_std, scale):
    reward_NG = jnp.array([[3.0], [-0.75]])
    advantage_NG = group_relative(reward_NG, normalize_std=normalize_std, epsilon=0.5)
    np.testing.assert_allclose(advantage_NG, reward_NG / scale, rtol=1e-6)


def test_without_normalisation_the_scale_of_rewards_stays():
    reward_NG = jnp.array([[1.0, -1.0, -1.0, -1.0]])
    np.testing.assert_array_equal(
        group_relative(10 * reward_NG, normalize_std=False), [[15.0, -5.0, -5.0, -5.0]]
    )
    np.testing.assert_allclose(group_relative(10 * reward_NG), group_relative(reward_NG), rtol=5e-6)
