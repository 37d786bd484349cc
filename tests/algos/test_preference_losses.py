import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import differences

from jaxrl.algos import preference_losses
from jaxrl.algos.preference_losses import (
    POLICY_INPUTS,
    PREFERENCE_LOSSES,
    SCORE_INPUTS,
    on_pairs,
    preference_accuracy,
)
from jaxrl.algos.registry import array_names, inputs_of

few = settings(max_examples=15)
SETTINGS = {
    "bradley_terry": {"center_coef": 0.03},
    "cost_preference": {},
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.3},
}
P = 6

# Twins: the papers' formulas for one pair, in Python floats.


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def above(x: float, y: float) -> float:
    return 0.5 if x == y else float(x > y)


def bradley_terry(w, l, m, *, center_coef):  # noqa: E741
    return -log_sigmoid(w - l - m) + center_coef * (w + l) ** 2, {
        "accuracy": above(w, l),
        "chosen_score": w,
        "rejected_score": l,
        "score_margin": w - l,
    }


def cost_preference(w, l, sw, sl):  # noqa: E741
    judged = [(s, c) for s, c in ((sw, w), (sl, l)) if s]
    loss = -log_sigmoid(l - w) - sum(log_sigmoid(s * c) for s, c in judged)
    right = [above(c, 0) if s > 0 else above(0, c) for s, c in judged]
    return loss, {
        "accuracy": above(l, w),
        "sign_accuracy": sum(right) / len(right) if right else 0.5,
        "chosen_cost": w,
        "rejected_cost": l,
    }


def implied(w, l, ref_w, ref_l, beta):  # noqa: E741
    chosen, rejected = beta * (w - ref_w), beta * (l - ref_l)
    return {
        "accuracy": above(chosen, rejected),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
    }


def dpo(w, l, ref_w, ref_l, *, beta, label_smoothing):  # noqa: E741
    z = beta * ((w - ref_w) - (l - ref_l))
    loss = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    return loss, implied(w, l, ref_w, ref_l, beta)


def ipo(w, l, ref_w, ref_l, *, beta):  # noqa: E741
    return ((w - l) - (ref_w - ref_l) - 1 / (2 * beta)) ** 2, implied(w, l, ref_w, ref_l, beta)


TWINS = {"bradley_terry": bradley_terry, "cost_preference": cost_preference, "dpo": dpo, "ipo": ipo}
NAMES = sorted(PREFERENCE_LOSSES)


def sample(name: str, seed: int) -> list[np.ndarray]:
    """Inputs of a loss for P pairs, float64; the first two are what a model says."""
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-4, 4, P) for _ in inputs_of(PREFERENCE_LOSSES[name])]
    if name == "bradley_terry":
        arrays[2] = rng.choice([0.0, 0.5, 2.0], P)
    if name == "cost_preference":
        arrays[2:] = [rng.choice([-1.0, 0.0, 1.0], P) for _ in range(2)]
    return arrays


def loss_of(name: str, arrays, mask):
    """The loss of pairs whose arrays are in the order in which the function takes them."""
    function = PREFERENCE_LOSSES[name]
    by_name = dict(zip(array_names(function), arrays, strict=True))
    return on_pairs(function, by_name, mask, **SETTINGS[name])


@functools.cache
def compiled(name: str):
    """(arrays, mask) -> loss, stats, gradient of the loss's sum by what the model says; compiled once."""

    def total(model, given, mask):
        values, stats = loss_of(name, [*model, *given], mask)
        return values.sum(), (values, stats)

    @jax.jit
    def run(arrays, mask):
        gradient, outputs = jax.grad(total, has_aux=True)(arrays[:2], arrays[2:], mask)
        return *outputs, gradient

    return run


def test_every_loss_is_tested():
    assert set(NAMES) == set(TWINS) == set(SETTINGS)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=st.integers(0, 10_000))
def test_loss_stats_and_gradient_equal_the_twin(name, seed):
    arrays = sample(name, seed)
    mask = np.ones(P)
    with jax.enable_x64(True):
        loss, stats, gradient = compiled(name)(arrays, mask)
    twin = functools.partial(TWINS[name], **SETTINGS[name])
    expected = [twin(*map(float, pair)) for pair in zip(*arrays, strict=True)]
    np.testing.assert_allclose(loss, [value for value, _ in expected], rtol=1e-9, atol=1e-12)
    assert set(stats) == set(expected[0][1])
    for key, values in stats.items():
        np.testing.assert_allclose(values, [one[key] for _, one in expected], err_msg=key)

    def total(model):
        pairs = zip(*model, *arrays[2:], strict=True)
        return sum(twin(*map(float, pair))[0] for pair in pairs)

    slopes = differences(total, np.stack(arrays[:2]))
    np.testing.assert_allclose(np.stack(gradient), slopes, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_mask_leaves_out_cannot_matter(name):
    arrays = [x.astype(np.float32) for x in sample(name, 3)]
    mask = np.array([1, 0, 1, 1, 0, 1], np.float32)
    inside = mask > 0
    whole, whole_stats, whole_gradient = compiled(name)(arrays, np.ones(P, np.float32))
    for rubbish in (np.nan, np.inf, -3e38):
        spoiled = [np.where(inside, x, np.float32(rubbish)) for x in arrays]
        loss, stats, gradient = compiled(name)(spoiled, mask)
        for got, want in zip(
            jax.tree.leaves((loss, stats, gradient)),
            jax.tree.leaves((whole, whole_stats, whole_gradient)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, np.where(inside, want, 0))


@pytest.mark.parametrize("name", NAMES)
def test_extreme_scores_stay_finite_and_keep_their_gradient(name):
    far = np.array([1e4, -1e4, 1e4, -1e4, 0.0, 0.0], np.float32)
    arrays = [far, -far, *(np.ones(P, np.float32) for _ in inputs_of(PREFERENCE_LOSSES[name])[2:])]
    loss, stats, gradient = compiled(name)(arrays, np.ones(P, np.float32))
    assert np.all(np.isfinite(loss)) and np.all(np.asarray(loss) >= 0)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((stats, gradient)))
    # Wherever the pair is in the wrong order by far, there is something to learn.
    wrong = far > 0 if name == "cost_preference" else far < 0
    assert np.all(np.asarray(gradient[0])[wrong] != 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_takes_what_one_kind_of_model_gives(name):
    names = set(array_names(PREFERENCE_LOSSES[name]))
    assert names <= set(SCORE_INPUTS) or names <= set(POLICY_INPUTS)


# By hand


def test_a_margin_is_a_head_start_of_the_rejected_answer():
    three, one = jnp.float32(3), jnp.float32(1)
    with_margin, stats = preference_losses.bradley_terry(three, one, 2.0)
    assert with_margin == pytest.approx(math.log(2))
    assert (stats["accuracy"], stats["score_margin"]) == (1, 2)


def test_label_smoothing_ends_at_the_odds_of_a_right_label():
    # With a tenth of the labels wrong the loss is least at log(.9 / .1).
    def slope(z):
        zero = jnp.float32(0)
        loss = lambda p: preference_losses.dpo(p, zero, zero, zero, beta=1.0, label_smoothing=0.1)  # noqa: E731
        return float(jax.grad(lambda p: loss(p)[0])(jnp.float32(z)))

    optimum = math.log(9)
    assert abs(slope(optimum)) < 1e-6
    assert slope(optimum - 0.1) < 0 < slope(optimum + 0.1)


@given(st.integers(-3, 3), st.integers(-3, 3))
def test_swapping_the_answers_turns_accuracy_around(x, y):
    x, y = jnp.float32(x), jnp.float32(y)
    assert preference_accuracy(x, y) == 1 - preference_accuracy(y, x)
