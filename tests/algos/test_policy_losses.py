import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxrl.algos import policy_losses

# Compiled once, with the bounds as arguments: the examples are many.
clipped = jax.jit(policy_losses.clipped)
slope_of = jax.jit(
    jax.grad(lambda *arrays, **options: policy_losses.clipped(*arrays, **options)[0])
)

# DAPO's numbers.
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}

log_ratios = st.floats(-30, 30, width=32, allow_subnormal=False)
advantages = st.integers(-32, 32).map(lambda n: n / 8)
bounds = st.fixed_dictionaries(
    {"clip_low": st.floats(0, 0.9), "clip_high": st.floats(0, 3), "dual_clip": st.floats(1.1, 20)}
)


def twin(logprob, old_logprob, advantage, *, clip_low, clip_high, dual_clip):
    """verl's vanilla loss and metrics for one token, with branches in the place of minima."""
    log_ratio = min(max(logprob - old_logprob, -20.0), 20.0)
    ratio = math.exp(log_ratio)
    stats: dict[str, float] = dict.fromkeys(
        ("pg_clipfrac", "pg_clipfrac_high", "pg_clipfrac_low", "pg_clipfrac_lower"), 0.0
    )
    stats["ppo_kl"] = -log_ratio
    loss = -advantage * ratio
    if advantage > 0 and ratio > 1 + clip_high:
        loss = -advantage * (1 + clip_high)
        stats["pg_clipfrac"] = stats["pg_clipfrac_high"] = 1.0
    if advantage < 0 and ratio < 1 - clip_low:
        loss = -advantage * (1 - clip_low)
        stats["pg_clipfrac"] = stats["pg_clipfrac_low"] = 1.0
    if advantage < 0 and loss > -advantage * dual_clip:
        loss = -advantage * dual_clip
        stats["pg_clipfrac_lower"] = 1.0
    return loss, stats


def gradient(log_ratio, advantage, **options) -> float:
    """Derivative of one token's loss by its log-probability."""
    old = jnp.full_like(jnp.asarray(log_ratio), -1.5)
    return float(slope_of(old + log_ratio, old, advantage, **options))


def raised(old: float, new: float, advantage: float, **options) -> tuple[float, float]:
    """Loss and gradient of a token whose probability went from `old` to `new`."""
    log_ratio, advantage_ = jnp.log(new / old), jnp.float32(advantage)
    loss, _ = clipped(log_ratio, jnp.zeros(()), advantage_, **options)
    return float(loss), gradient(log_ratio, advantage_, **options)


# By hand


def test_clip_higher_lets_an_unlikely_token_rise_a_little_more():
    # The paper's example: at .2 a token of .01 may rise to .012, at .28 to .0128.
    loss, slope = raised(0.01, 0.0127, 1.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [-1.27, -1.27], rtol=1e-5)
    loss, slope = raised(0.01, 0.0129, 1.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [-1.28, 0.0], rtol=1e-5)
    loss, slope = raised(0.01, 0.0127, 1.0, **{**DAPO, "clip_high": 0.2})
    np.testing.assert_allclose([loss, slope], [-1.2, 0.0], rtol=1e-5)


def test_a_bad_token_may_fall_to_four_fifths():
    loss, slope = raised(0.5, 0.41, -1.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [0.82, 0.82], rtol=1e-5)
    loss, slope = raised(0.5, 0.39, -1.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [0.8, 0.0], rtol=1e-5)


def test_what_went_the_wrong_way_is_not_clipped():
    # A good token that fell, a bad one that rose: the gradient that brings them back is whole.
    loss, slope = raised(0.5, 0.1, 1.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [-0.2, -0.2], rtol=1e-5)
    loss, slope = raised(0.1, 0.5, -1.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [5.0, 5.0], rtol=1e-5)


def test_dual_clip_bounds_a_bad_token_that_became_likely():
    loss, slope = raised(0.04, 0.36, -2.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [18.0, 18.0], rtol=1e-5)
    loss, slope = raised(0.04, 0.44, -2.0, **DAPO)
    np.testing.assert_allclose([loss, slope], [20.0, 0.0], rtol=1e-5)


def test_the_penalty_of_trpo_has_its_digits_near_a_ratio_of_one():
    """e^x - 1 - x = x^2/2 + x^3/6 + ..; at x = 1/1024, which is exact in float32, 4.77e-7."""
    x = 2.0**-10
    wanted = x**2 / 2 + x**3 / 6 + x**4 / 24
    loss, stats = policy_losses.trpo(
        jnp.array([x - 1]), jnp.array([-1.0]), jnp.array([0.0]), kl_coef=2.0
    )
    np.testing.assert_allclose(stats["kl_penalty"], wanted, rtol=1e-3)
    np.testing.assert_allclose(loss, 2 * wanted, rtol=1e-3)


# Against the twin


@given(st.lists(st.tuples(log_ratios, advantages), min_size=6, max_size=6), bounds)
def test_loss_and_stats_equal_the_numpy_twin(tokens, options):
    log_ratio, advantage = (np.array(column, np.float32) for column in zip(*tokens, strict=True))
    ratio = np.exp(log_ratio.astype(np.float64))
    for kink in (1 - options["clip_low"], 1 + options["clip_high"], options["dual_clip"]):
        # On a kink float32 may count a token on either side of it.
        assume(np.all(np.abs(ratio / kink - 1) > 1e-5))
    # Subtracting 0 is exact, so the twin sees the same ratio.
    loss, stats = clipped(jnp.asarray(log_ratio), jnp.zeros(6), jnp.asarray(advantage), **options)
    expected = [
        twin(float(d), 0.0, float(a), **options) for d, a in zip(log_ratio, advantage, strict=True)
    ]
    np.testing.assert_allclose(loss, [one for one, _ in expected], rtol=1e-5, atol=1e-30)
    assert set(stats) == set(expected[0][1])
    for name, value in stats.items():
        assert value.dtype == loss.dtype, "stats are summed with the loss"
        np.testing.assert_allclose(
            value, [one[name] for _, one in expected], rtol=1e-6, err_msg=name
        )


# Properties
