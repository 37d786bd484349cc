"""Sampler and trainer renormalise log-probabilities over the same tokens."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from jaxrl.algos.logprobs import squared_probabilities, token_logprobs
from jaxrl.algos.truncation import as_rows, digit_search, kept_tokens
from jaxrl.models.compute import Compute
from jaxrl.rollout.decode_state import DecodeState
from jaxrl.rollout.generate_program import sample
from jaxrl.rollout.sampling import sample_keys, truncation_of

SLOTS, V, QWEN = 6, 40, 151_936
NO_LIMIT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def renormalized(logits, **limits):
    """Log-probabilities among the kept tokens of one distribution."""
    return _renormalized(jnp.asarray(logits, jnp.float32), truncation_of(**NO_LIMIT | limits))


@jax.jit
def _renormalized(logits_V, truncation):
    logprobs_V = jax.nn.log_softmax(logits_V)
    return kept_tokens(logprobs_V, truncation).renormalized(logprobs_V)


def test_by_hand():
    logits = np.log([0.1, 0.4, 0.05, 0.25, 0.2])
    # .4 is less than .6, and .4 + .25 is enough: each is divided by .65.
    np.testing.assert_allclose(
        np.exp(renormalized(logits, top_p=0.6)), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0], rtol=1e-5
    )
    np.testing.assert_allclose(np.exp(renormalized(logits, top_k=1)), [0, 1, 0, 0, 0], rtol=1e-5)
    # At least half of .4.
    np.testing.assert_allclose(
        np.exp(renormalized(logits, min_p=0.5)), np.array([0, 0.4, 0, 0.25, 0.2]) / 0.85, rtol=1e-5
    )
    # Of the first three, .4 / .85 and .25 / .85 are above .7 together.
    np.testing.assert_allclose(
        np.exp(renormalized(logits, top_k=3, top_p=0.7)),
        np.array([0, 0.4, 0, 0.25, 0]) / 0.65,
        rtol=1e-5,
    )
    np.testing.assert_allclose(np.exp(renormalized(logits, top_p=1e-30)), [0, 1, 0, 0, 0])


def test_tokens_of_one_probability_stay_or_go_together():
    logits = np.log([0.1, 0.3, 0.3, 0.3, 1e-9])
    for limits in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.9}):
        np.testing.assert_allclose(
            np.exp(renormalized(logits, **limits)), [0, 1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-5
        )


def test_a_nan_stays_one():
    """It is no token outside, which would be masked in silence."""
    assert jnp.isnan(renormalized(np.full(5, np.nan), top_p=0.5)).all()


def sorted_twin(logits, *, top_k, top_p, min_p):
    """Renormalised log-probabilities by sorting, in double precision; -inf outside.

    Returns the distance to another set too: how near a limit comes to a token's probability.
    """
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    kept = np.ones(len(p), bool)
    near = np.inf
    if top_k:
        kept &= p >= np.sort(p)[::-1][min(top_k, len(p)) - 1]
    if top_p < 1:
        mass = p[kept].sum()
        above = np.array([p[p > one].sum() for one in p])
        near = min(near, np.abs(above - top_p * mass).min())
        kept &= above < top_p * mass
    if min_p:
        near = min(near, np.abs(p - min_p * p.max()).min())
        kept &= p >= min_p * p.max()
    with np.errstate(divide="ignore"):
        return np.where(kept, np.log(p / p[kept].sum()), -np.inf), near


@functools.partial(jax.jit, static_argnames=("temperature",))
def sampled(logits_SV, key_S2, truncation, temperature=1.0):
    """Tokens and log-probabilities of the sampler, for the logits of each slot."""
    slots = len(logits_SV)
    unread = dict.fromkeys(("context", "count", "limit", "active", "stops", "decoded"))
    limits = jax.tree.map(lambda x: jnp.broadcast_to(x, (slots,)), truncation)
    state = DecodeState(
        **unread, key=key_S2, temperature=jnp.full(slots, temperature), truncation=limits
    )
    return sample(
        logits_SV, state, jnp.zeros(slots, jnp.int32), (), lambda: logits_SV > 0, Compute()
    )[:2]


@functools.partial(jax.jit, static_argnames=("temperature", "statistic"))
def trained(logits_SV, token_S, truncation, temperature=1.0, statistic=None):
    """Log-probabilities of the trainer, or a statistic, for hidden states that are the logits."""
    logprob_S2, statistic_S2 = token_logprobs(
        lambda hidden, *_: hidden,
        jnp.stack([logits_SV, logits_SV], axis=1),
        jnp.stack([token_S, token_S], axis=1),
        jnp.ones((len(logits_SV), 2), jnp.int32),
        temperature=temperature,
        chunk_tokens=1,
        truncation=truncation,
        statistic=statistic,
    )
    return (statistic_S2 if statistic else logprob_S2)[:, 1]


@st.composite
def limits(draw):
    return {
        "top_k": draw(st.sampled_from([0, 1, 2, 7, V - 1, V, 1000])),
        "top_p": draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.03, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.01, 0.3, 0.99])),
    }


@hypothesis.given(
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    steps=st.sampled_from([0, 1, 4]),
    limits=limits(),
)
def test_sampler_and_trainer_agree(seed, scale, steps, limits):
    logits = scale * np.random.default_rng(seed).normal(size=(SLOTS, V)).astype(np.float32)
    # In few steps many tokens tie.
    logits = np.round(logits * steps) / steps if steps else logits
    logits = np.asarray(logits, np.float32)
    truncation = truncation_of(**limits, renormalized=True)
    keys = sample_keys(seed, 0, jnp.arange(SLOTS), jnp.arange(SLOTS))
    token_S, logprob_S = sampled(logits, keys, truncation)
    # A token that can be drawn is inside the trainer's set.
    np.testing.assert_allclose(trained(logits, token_S, truncation), logprob_S, atol=1e-6)
    each_N = trained(logits.repeat(V, axis=0), np.tile(np.arange(V), SLOTS), truncation)
    np.testing.assert_allclose(np.exp(each_N).reshape(SLOTS, V).sum(axis=1), 1, rtol=1e-5)
    for row, token, logprob in zip(logits, np.asarray(token_S), np.asarray(logprob_S), strict=True):
        expected, near = sorted_twin(row, **limits)
        # Where a limit is at a token but for rounding, float32 may decide otherwise than float64.
        if near > 1e-5:
            assert logprob == pytest.approx(expected[token], abs=1e-4 * max(1, scale))


@pytest.mark.parametrize("scale", [4.0, 0.5], ids=["few tokens", "nearly all tokens"])
def test_sampler_and_trainer_agree_at_a_vocabulary_of_152k(scale):
    limits = {"top_k": 100_000, "top_p": 0.9, "min_p": 1e-4}
    logits = scale * np.random.default_rng(0).normal(size=(2, QWEN)).astype(np.float32)
    truncation = truncation_of(**limits, renormalized=True)
    keys = sample_keys(5, 0, jnp.arange(2), jnp.arange(2))
    token_S, logprob_S = sampled(logits, keys, truncation, temperature=0.7)
    np.testing.assert_allclose(
        trained(logits, token_S, truncation, temperature=0.7), logprob_S, rtol=1e-5
    )
    for row, token, logprob in zip(logits / 0.7, token_S, logprob_S, strict=True):
        expected = sorted_twin_of_distinct(row, **limits)
        assert float(logprob) == pytest.approx(expected[int(token)], rel=1e-4)


def sorted_twin_of_distinct(logits, *, top_k, top_p, min_p):
    """`sorted_twin` in time V log V, where no two logits are equal."""
    order = np.argsort(-logits)
    p = np.exp(logits[order].astype(np.float64) - logits.max())
    p[top_k or len(p) :] = 0
    whole = p.sum()
    kept = (p > 0) & (np.cumsum(p) - p < top_p * whole) & (p >= min_p * p[0])
    out = np.full(len(p), -np.inf)
    out[order[kept]] = np.log(p[kept] / p[kept].sum())
    return out


def test_the_sampler_renormalises_only_slots_that_ask():
    """Requests of a server keep the log-probabilities of the whole vocabulary, beside a slot of training."""
    logits = np.tile(np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32), (2, 1))
    keys = sample_keys(0, 0, jnp.arange(2), jnp.arange(2))
    one = truncation_of(top_k=2, top_p=1.0, min_p=0.0)
    both = jax.tree.map(lambda x: jnp.full(2, x), one)
    both = dataclasses.replace(both, renormalized=jnp.array([False, True]))
    token_S, logprob_S = sampled(logits, keys, both)
    whole = np.array([0.4, 0.3, 0.2, 0.1])[np.asarray(token_S)]
    np.testing.assert_allclose(np.exp(logprob_S), whole / [1, 0.7], rtol=1e-5)


def test_the_gradient_is_that_of_the_twin():
    """d log p(token) / d logits = onehot - p, with p over the kept tokens."""
    rng = np.random.default_rng(3)
    logits = 2 * rng.normal(size=(SLOTS, V)).astype(np.float32)
    limits = {"top_k": 12, "top_p": 0.9, "min_p": 0.02}
    truncation, temperature = truncation_of(**limits), 0.8
    kept_SV = np.stack([np.isfinite(sorted_twin(row / temperature, **limits)[0]) for row in logits])
    token_S = logits.argmax(axis=1)
    total = lambda x: trained(x, token_S, truncation, temperature=temperature).sum()  # noqa: E731
    p_SV = np.where(kept_SV, np.exp(logits.astype(np.float64) / temperature), 0)
    p_SV /= p_SV.sum(axis=1, keepdims=True)
    assert_close(jax.jit(jax.grad(total))(logits), (np.eye(V)[token_S] - p_SV) / temperature)


def test_a_token_outside_has_no_probability_and_no_gradient():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    truncation = truncation_of(top_k=2, top_p=1.0, min_p=0.0)
    token = np.array([2])
    assert trained(logits, token, truncation).tolist() == [-np.inf]

    def masked(x):
        logprob = trained(x, token, truncation)
        return jnp.where(jnp.isneginf(logprob), 0.0, logprob).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(masked))(logits), 0)


def test_squared_probabilities_are_those_of_the_kept_tokens():
    logits, limits = np.log(np.float32([[0.4, 0.25, 0.2, 0.15]])), truncation_of(top_k=2)
    squares_S = trained(logits, np.array([0]), limits, statistic=squared_probabilities)
    assert float(squares_S[0]) == pytest.approx((0.4**2 + 0.25**2) / 0.65**2)


@functools.partial(jax.jit, static_argnums=3)
def searched(p, weight, wanted, bits):
    return digit_search(as_rows(p, 0.0), as_rows(weight, 0.0), wanted, digit_bits=bits)


@pytest.mark.parametrize("wanted", [3.0, 100.0, 0.5])
def test_digits_of_any_size_find_the_same(wanted):
    """GPU and TPU search by three bits at a time, CPU by one."""
    p = np.random.default_rng(0).dirichlet(np.full(300, 0.3), size=4).astype(np.float32)
    weight = np.ones_like(p) if wanted >= 1 else p
    found = [searched(p, weight, np.full((4, 1), wanted, np.float32), bits) for bits in (1, 3)]
    np.testing.assert_array_equal(*found)
    if wanted >= 1:
        expected = np.sort(p, axis=1)[:, ::-1][:, int(wanted) - 1]
        np.testing.assert_array_equal(found[0][:, 0], expected)


def test_the_backward_pass_does_not_search_again():
    def loss(logits):
        return trained(logits, jnp.zeros(SLOTS, jnp.int32), truncation_of(**NO_LIMIT)).sum()

    x = jax.ShapeDtypeStruct((SLOTS, V), jnp.float32)
    forward, both = (str(jax.make_jaxpr(f)(x)) for f in (loss, jax.grad(loss)))
    searches = forward.count("platform_index")
    assert searches == both.count("platform_index") > 0
