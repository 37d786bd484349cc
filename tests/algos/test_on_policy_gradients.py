"""The gradient of every loss where an on-policy run stands: at its kinks.

Ratio exactly 1, the policy is the reference, the value is the old value, both answers of a pair score alike;
with usual bounds, and with bounds that lie right there.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import Ragged, packed_inputs

from jaxrl.algos import kinks, kl
from jaxrl.algos.kl import KL_ESTIMATES
from jaxrl.algos.policy_losses import (
    HAVE_OTHER_TERMS,
    POLICY_LOSSES,
    SEQUENCE_LOSSES,
    on_packed_rows,
)
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES, on_pairs
from jaxrl.algos.registry import array_names
from jaxrl.algos.value_loss import clipped_value

USUAL = {"clip_low": 0.2, "clip_high": 0.28}
# Both ends of the clip, and the lowest dual clip and weight, at a ratio of 1.
TIGHT = {"clip_low": 0.0, "clip_high": 0.0}
LIMITS = {"limit_low": 0.1, "limit_high": 0.1, "max_ratio": 2.0}
TIGHT_LIMITS = {"limit_low": 0.0, "limit_high": 0.0, "max_ratio": 1.0}

CASES = [
    ("cispo", USUAL),
    ("cispo", TIGHT),
    ("clip_cov", USUAL),
    ("clip_cov", TIGHT),
    ("clipped", USUAL | {"dual_clip": 10.0}),
    ("clipped", TIGHT | {"dual_clip": 1.0}),
    ("clipped", USUAL | {"dual_clip": math.inf}),
    ("dppo_kl", LIMITS),
    ("dppo_kl", TIGHT_LIMITS),
    ("dppo_tv", LIMITS),
    ("dppo_tv", TIGHT_LIMITS),
    ("dro", {"beta": 0.7}),
    ("geo_mean", USUAL),
    ("geo_mean", TIGHT),
    ("gpg", {}),
    ("gspo", USUAL),
    ("gspo", TIGHT),
    ("gspo_token", USUAL),
    ("gspo_token", TIGHT),
    ("kl_cov", {"kl_coef": 1.0}),
    ("policy_gradient", {}),
    ("sapo", {}),
    ("sequence_masked", USUAL | {"dual_clip": 10.0, "threshold": 0.1}),
    ("trpo", {"kl_coef": 1.0}),
    ("vespo", {}),
]


# Losses that give each token the value of its sequence.
SHARED_VALUES = SEQUENCE_LOSSES - {"vespo"}


def test_every_policy_loss_is_walked():
    assert {name for name, _ in CASES} == set(POLICY_LOSSES)


@pytest.mark.parametrize(
    ("name", "settings"), CASES, ids=[f"{n} {s}" if s else n for n, s in CASES]
)
def test_the_gradient_is_the_policy_gradient(name, settings):
    """d loss / d logprob = -A on packed rows with holes and NaN; a sequence's ratio shares it out."""
    ragged = Ragged.sample(3)
    logprob = ragged.values(-3, -0.1)
    # One advantage a sequence, of either sign and 0, as losses of sequences assume.
    levels = np.array([0.3, -1.5, 0.0, 2.0, -0.25, 1.0, -3.0], np.float32)
    advantage = [np.full(len(m), a) for m, a in zip(ragged.masks, levels, strict=True)]
    selected = [ragged.rng.random(len(m)) < 0.5 for m in ragged.masks]
    if name in ("clip_cov", "kl_cov"):
        settings = settings | {"selected": ragged.pack(selected, False, bool)}
    weight = ragged.mask
    if name in SHARED_VALUES:
        length = [np.full(len(m), max(1, m.sum())) for m in ragged.masks]
        weight = weight / ragged.pack(length, 1)

    def total(packed_logprob):
        old, advantages = ragged.spoiled(logprob), ragged.spoiled(advantage)
        arrays = packed_inputs(packed_logprob, old, advantages, *ragged.where)
        loss, _ = on_packed_rows(POLICY_LOSSES[name], arrays, **settings)
        return jnp.sum(weight * loss)

    slope = jax.grad(total)(jnp.asarray(ragged.spoiled(logprob)))
    expected = [-a for (a,) in ragged.trained(advantage)]
    if name in SHARED_VALUES:
        expected = [x / max(1, len(x)) for x in expected]
    if name == "clip_cov":  # spares the selected
        expected = [-a * (1 - s) for a, s in ragged.trained(advantage, selected)]
    ragged.assert_equal(slope, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_which_losses_learn_without_an_advantage(name):
    """Updates whose advantages are all 0 are skipped, except those of losses with other terms."""
    settings = next(settings for other, settings in CASES if other == name)
    ragged = Ragged.sample(5)
    if name in ("clip_cov", "kl_cov"):
        chosen = [np.ones(len(m), bool) for m in ragged.masks]
        settings = settings | {"selected": ragged.pack(chosen, False, bool)}
    old = ragged.spoiled(ragged.values(-3, -0.1))
    nothing = ragged.spoiled([np.zeros(len(m), np.float32) for m in ragged.masks])

    def total(logprob):
        arrays = packed_inputs(logprob, old, nothing, *ragged.where)
        loss, _ = on_packed_rows(POLICY_LOSSES[name], arrays, **settings)
        return jnp.sum(ragged.mask * loss)

    slope = np.asarray(jax.grad(total)(jnp.asarray(ragged.spoiled(ragged.values(-3, -0.1)))))
    assert (slope != 0).any() == (name in HAVE_OTHER_TERMS)


def test_a_step_off_the_kink_the_penalty_of_kl_cov_pulls_back():
    """By hand: A .3 and coefficient 1 give -A r + sign(log r)."""

    @jax.jit
    def slope(log_ratio):
        ones = jnp.ones((1, 1))
        loss = lambda p: POLICY_LOSSES["kl_cov"](  # noqa: E731
            p, -ones, 0.3 * ones, selected=ones > 0, kl_coef=1.0
        )[0].sum()
        return jax.grad(loss)(-ones + log_ratio)[0, 0]

    assert slope(0.0) == pytest.approx(-0.3)
    assert slope(0.01) == pytest.approx(-0.3 * math.exp(0.01) + 1, rel=1e-5)
    assert slope(-0.01) == pytest.approx(-0.3 * math.exp(-0.01) - 1, rel=1e-5)


@pytest.mark.parametrize("name", KL_ESTIMATES)
def test_the_kl_to_a_reference_that_is_the_policy_pulls_nowhere(name):
    logprob = jnp.array([-0.1, -30.0, 0.0])
    slope = jax.grad(lambda p: KL_ESTIMATES[name](p, logprob).sum())(logprob)
    # The gradient of k1 does not know where it stands.
    np.testing.assert_array_equal(slope, np.full(3, float(name == "k1")))


def test_so_does_the_kl_over_the_vocabulary():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
    log_q = jax.nn.log_softmax(logits)
    of_softmax = lambda x: kl.over_vocabulary(jax.nn.log_softmax(x), log_q).sum()  # noqa: E731
    slope = jax.jit(jax.grad(of_softmax))(logits)
    # Some ulps of the probabilities that cancel in it.
    np.testing.assert_allclose(slope, 0, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.5, math.inf])
def test_a_value_that_is_the_old_value_learns_from_its_error(clip):
    value, returns = np.float32([1.0, 1.0, 1.0, 100.1]), np.float32([3.0, -1.0, 1.0, 0.0])
    loss = lambda v: clipped_value(v, value, returns, clip=clip)[0].sum()  # noqa: E731
    slope = jax.jit(jax.grad(loss))(value)
    np.testing.assert_allclose(slope, value - returns, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "rest", "settings", "expected"),
    [
        ("bradley_terry", (0.0,), {}, -0.5),
        ("bradley_terry", (0.0,), {"center_coef": 0.1}, -0.5 + 0.1 * 2 * (2 + 2)),
        ("cost_preference", (0.0, 0.0), {}, 0.5),
        ("dpo", (2.0, 2.0), {"beta": 0.1}, -0.05),
        ("dpo", (2.0, 2.0), {"beta": 0.1, "label_smoothing": 0.2}, -0.05 + 0.02),
        ("ipo", (2.0, 2.0), {"beta": 0.1}, -2 / (2 * 0.1)),
    ],
)
def test_pairs_without_a_margin(name, rest, settings, expected):
    """By hand, d loss / d the chosen answer's score, cost or log-probability, both answers at 2."""

    def loss(chosen, rejected):
        function = PREFERENCE_LOSSES[name]
        values = (chosen, rejected, *(jnp.full(1, x) for x in rest))
        arrays = dict(zip(array_names(function), values, strict=True))
        value, _ = on_pairs(function, arrays, jnp.ones(1), **settings)
        return value.sum()

    two = np.full(1, 2, np.float32)
    assert jax.jit(jax.grad(loss))(two, two)[0] == pytest.approx(expected, rel=1e-6)


def test_every_preference_loss_is_walked():
    (mark,) = test_pairs_without_a_margin.pytestmark
    assert {case[0] for case in mark.args[1]} == set(PREFERENCE_LOSSES)


def test_the_two_functions_with_a_kink():
    x = jnp.array([-2.0, -0.5, 0.0, 0.5, 2.0])
    slope = lambda f: jax.jit(jax.vmap(jax.grad(f)))(x)  # noqa: E731
    np.testing.assert_array_equal(kinks.absolute(x), np.abs(x))
    np.testing.assert_array_equal(slope(kinks.absolute), [-1, -1, 0, 1, 1])
    clip = lambda x: kinks.clip(x, -0.5, 0.5)  # noqa: E731
    np.testing.assert_array_equal(clip(x), [-0.5, -0.5, 0, 0.5, 0.5])
    np.testing.assert_array_equal(slope(clip), [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(slope(lambda x: kinks.clip(x, highest=0.0)), [1, 1, 1, 0, 0])
    assert jax.grad(clip)(-jnp.inf) == 0
