import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged

from jaxrl.algos import covariance as cov

seeds = st.integers(0, 10_000)
few = settings(max_examples=20)

covariance = jax.jit(cov.covariance)
select_highest = jax.jit(cov.select_highest)
select_random = jax.jit(cov.select_random)


def example(seed):
    ragged = Ragged.sample(seed)
    logprob, advantage = ragged.values(-3, 0), ragged.values()
    return (
        ragged,
        logprob,
        advantage,
        covariance(*map(ragged.spoiled, (logprob, advantage)), ragged.mask),
    )


def tokens(ragged, packed):
    return np.asarray(packed)[ragged.mask > 0]


@few
@given(seeds)
def test_covariance_equals_its_twin_and_sums_to_that_of_the_batch(seed):
    ragged, logprob, advantage, ours = example(seed)
    rows = ragged.trained(logprob, advantage)
    p, a = (np.concatenate(column) for column in zip(*rows, strict=True))
    if not len(p):
        return
    ragged.assert_equal(ours, [(x - p.mean()) * (y - a.mean()) for x, y in rows])
    # Products of two values within 2 of 0.
    assert_close(tokens(ragged, ours).mean(), np.cov(p, a, ddof=0)[0, 1], scale=4)


@few
@given(seeds, st.sampled_from([0.01, 0.3, 0.6]))
def test_the_highest_are_selected(seed, fraction):
    ragged, _, _, ours = example(seed)
    selected = select_highest(None, ours, ragged.mask, fraction=fraction)
    mine, value = tokens(ragged, selected), tokens(ragged, ours)
    quota = max(1, int(np.float32(fraction) * len(value)))
    assert mine.sum() == min(quota, (value > 0).sum())
    assert not np.asarray(selected)[ragged.mask == 0].any()
    if mine.any() and not mine.all():
        assert value[mine].min() > value[~mine].max()


def test_ties_at_the_edge_are_all_taken_and_worthless_tokens_never():
    mask = jnp.ones((1, 4))
    selected = cov.select_highest(None, jnp.array([[2.0, 1.0, 2.0, 0.0]]), mask, fraction=0.25)
    np.testing.assert_array_equal(selected, [[True, False, True, False]])
    assert not cov.select_highest(None, jnp.zeros((1, 4)), mask, fraction=1.0).any()


@few
@given(seeds, st.sampled_from([0.01, 0.3, 1.0]))
def test_the_random_are_in_the_band_and_as_many_as_asked(seed, fraction):
    ragged, _, _, ours = example(seed)
    band = {"lowest": 0.2, "highest": 1.0}
    selected = select_random(jax.random.key(seed), ours, ragged.mask, fraction=fraction, **band)
    mine, value = tokens(ragged, selected), tokens(ragged, ours)
    able = (value > 0.2) & (value < 1.0)
    assert not mine[~able].any()
    assert mine.sum() == min(able.sum(), max(1, int(np.float32(fraction) * len(value))))
    assert not np.asarray(selected)[ragged.mask == 0].any()


def test_each_able_token_is_as_likely_as_another_and_the_key_decides():
    value, mask = jnp.array([[0.5, 2.0, 0.5, 0.5, 0.5]]), jnp.ones((1, 5))
    draw = jax.vmap(
        lambda key: cov.select_random(key, value, mask, fraction=0.4, lowest=0.0, highest=1.0)
    )
    selected = draw(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(selected.mean(0), [[0.5, 0, 0.5, 0.5, 0.5]], atol=0.04)
    np.testing.assert_array_equal(selected, draw(jax.random.split(jax.random.key(0), 2000)))


@pytest.mark.parametrize(
    ("loss", "band"), [("kl_cov", {}), ("clip_cov", {"lowest": -1.0, "highest": 1.0})]
)
def test_an_empty_batch_selects_nothing(loss, band):
    value, mask = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3))
    assert not cov.SELECTIONS[loss](jax.random.key(0), value, mask, fraction=0.5, **band).any()
