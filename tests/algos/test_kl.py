import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, differences

from jaxrl.algos import controllers, kl
from jaxrl.algos.kl import KL_ESTIMATES

few = settings(max_examples=20)
log_ratios = st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5)

VALUES = {
    "k1": lambda d: d,
    "abs": np.abs,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.minimum(np.exp(-d) + d - 1, 10),
}
VALUES |= {f"{name}+": value for name, value in VALUES.items()}


def slope(name):
    return jax.jit(jax.grad(lambda p, q: KL_ESTIMATES[name](p, q).sum()))


SLOPES = {name: slope(name) for name in KL_ESTIMATES}
compiled = {name: jax.jit(estimate) for name, estimate in KL_ESTIMATES.items()}


def test_every_estimate_is_tested():
    assert set(VALUES) == set(KL_ESTIMATES)


@few
@given(log_ratios)
@pytest.mark.parametrize("name", KL_ESTIMATES)
def test_value_and_gradient_equal_the_formula(name, d):
    d = np.array(d, np.float32)
    p, q = -1.5 + d, np.full(5, -1.5, np.float32)
    d = (p - q).astype(np.float64)
    # float32 subtracts numbers near 3, whose last digit is 2e-7.
    np.testing.assert_allclose(compiled[name](p, q), VALUES[name](d), rtol=2e-5, atol=1e-6)
    away = (np.abs(d) > 1e-4) & (np.abs(VALUES["k3"](d) - 10) > 1e-3)
    expected = d if name.endswith("+") else differences(lambda x: VALUES[name](x).sum(), d)
    np.testing.assert_allclose(SLOPES[name](p, q)[away], expected[away], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_expectations_are_as_the_table_says(name):
    # Exactly, by summing over the vocabulary: of the value, and of value x score + gradient's part.
    rng = np.random.default_rng(0)
    logits, ref = jnp.asarray(rng.normal(size=(2, 6)), jnp.float32)
    ref_logprob = jax.nn.log_softmax(ref)
    p = jax.nn.softmax(logits)

    def of_tokens(logits):
        return jnp.sum(p * KL_ESTIMATES[name](jax.nn.log_softmax(logits), ref_logprob))

    def forward(logits):
        return over_vocabulary(logits, ref)

    def reverse(logits):
        return jnp.sum(jax.nn.softmax(ref) * (ref_logprob - jax.nn.log_softmax(logits)))

    if name != "k2":
        values = jax.jit(lambda x: (of_tokens(x), forward(x)))(logits)
        np.testing.assert_allclose(*values, rtol=1e-5)
    gradient = {"k1": lambda x: 0.0 * x.sum(), "k3": reverse}.get(name, forward)
    found, wanted = jax.jit(lambda x: (jax.grad(of_tokens)(x), jax.grad(gradient)(x)))(logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_far_tokens_stay_finite():
    p, q = jnp.array([-1e4, -0.1, -1e30]), jnp.array([-0.1, -1e4, -0.1])
    for name in KL_ESTIMATES:
        assert np.all(np.isfinite(SLOPES[name](p, q))) or name == "k2"
        if "k3" in name:
            np.testing.assert_allclose(KL_ESTIMATES[name](p, q), 10)


def over_vocabulary(logits, ref_logits):
    return kl.over_vocabulary(jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits))


def test_the_kl_over_the_vocabulary_equals_its_twin_and_its_gradient_the_differences():
    rng = np.random.default_rng(1)
    logits, ref = rng.normal(size=(2, 2, 3, 4))
    weight = rng.normal(size=(2, 3))

    def twin(logits):
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, ref))
        return (p * np.log(p / q)).sum(-1)

    with jax.enable_x64(True):
        np.testing.assert_allclose(over_vocabulary(logits, ref), twin(logits), rtol=1e-9)
        gradient = jax.grad(lambda x: jnp.sum(weight * over_vocabulary(x, ref)))(
            jnp.asarray(logits)
        )
        expected = differences(lambda x: np.sum(weight * twin(x)), logits)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9)


def test_the_kl_over_the_vocabulary_bears_tokens_of_probability_0():
    logits, ref = jnp.array([0.0, -jnp.inf, 1.0]), jnp.array([0.5, -jnp.inf, 0.5])
    value, gradient = jax.value_and_grad(over_vocabulary)(logits, ref)
    np.testing.assert_allclose(value, over_vocabulary(logits[::2], ref[::2]), rtol=1e-6)
    assert np.all(np.isfinite(gradient))


@few
@given(st.integers(0, 10_000))
def test_the_penalty_and_the_mean_equal_their_twins(seed):
    ragged = Ragged.sample(seed)
    reward, price = ragged.values(), ragged.values()
    penalized = kl.penalized_reward(
        ragged.spoiled(reward), ragged.spoiled(price), ragged.mask, coef=0.1
    )
    rows = ragged.trained(reward, price)
    ragged.assert_equal(penalized, [r - 0.1 * k for r, k in rows])
    total, number = mean_by_sequence(ragged.spoiled(price), *ragged.where)
    means = [k.mean() for _, k in rows if len(k)]
    assert number == len(means)
    np.testing.assert_allclose(total, sum(means), rtol=2e-5, atol=2e-6)


mean_by_sequence = jax.jit(kl.mean_by_sequence)


# Controllers


def test_the_adaptive_controller_moves_by_a_fifth_of_the_share_of_the_horizon_at_most():
    def after(mean_kl):
        return controllers.adaptive(
            jnp.float32(0.5), jnp.float32(mean_kl), num_sequences=100, target=0.1, horizon=1000
        )

    np.testing.assert_allclose(after(0.1), 0.5)
    np.testing.assert_allclose(after(0.11), 0.5 * 1.01, rtol=1e-6)
    np.testing.assert_allclose(after(9.0), 0.5 * 1.02, rtol=1e-6)
    np.testing.assert_allclose(after(-9.0), 0.5 * 0.98, rtol=1e-6)


def test_the_entropy_bonus_rises_to_the_target_and_stays_between_0_and_1():
    def after(coef, entropy):
        found = controllers.entropy_coef(jnp.float32(coef), jnp.float32(entropy), target=0.2)
        return float(found)

    assert after(0.01, 0.1) == after(0.01, 0.2) == pytest.approx(0.015)
    assert after(0.01, 0.21) == pytest.approx(0.005)
    assert after(0.002, 0.9) == 0 and after(0.999, 0.0) == 1


def test_the_multiplier_rises_over_the_limit_and_stays_positive():
    def after(excess):
        return controllers.raised_multiplier(
            jnp.float32(2.0), jnp.float32(excess), learning_rate=0.1
        )

    np.testing.assert_allclose(after(1.0), 2 * np.exp(0.2), rtol=1e-6)
    assert after(0.0) == 2 and 0 < after(-5.0) < 2


def test_the_constrained_advantage_by_hand():
    advantage = controllers.constrained_advantage(
        jnp.array([1.0, -1.0]), jnp.array([2.0, 0.0]), jnp.float32(3.0)
    )
    np.testing.assert_allclose(advantage, [-5 / 4, -1 / 4])
