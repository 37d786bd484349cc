import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged

from jaxrl.algos import token_advantages
from jaxrl.algos.controllers import moving_average

seeds = st.integers(0, 10_000)
discounts = st.sampled_from([(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.9, 1.0)])
few = settings(max_examples=20)
GROUPS = 3

gae = jax.jit(token_advantages.gae, static_argnames="steps")
reinforce = jax.jit(token_advantages.reinforce)
reinforce_plus_plus = jax.jit(token_advantages.reinforce_plus_plus)
remax = jax.jit(token_advantages.remax)
optimal = jax.jit(functools.partial(token_advantages.optimal_token_baseline, num_groups=GROUPS))


def gae_twin(reward, value, gamma, lam, steps=None):
    """By the definition: for each token its deltas to the end, no recurrence."""
    n = len(reward)
    after = np.append(value, 0.0)
    delta = [reward[t] + gamma * after[t + 1] - value[t] for t in range(n)]
    steps = n if steps is None else steps
    return np.array(
        [sum((gamma * lam) ** k * delta[t + k] for k in range(min(steps, n - t))) for t in range(n)]
    )


@few
@given(seeds, discounts, st.sampled_from([None, 1, 2, 12]))
def test_gae_equals_its_twin(seed, discounts, steps):
    """Monte Carlo and TD, which are settings of it, too."""
    gamma, lam = discounts
    ragged = Ragged.sample(seed)
    reward, value = ragged.values(), ragged.values()
    advantage, returns = gae(
        ragged.spoiled(reward),
        ragged.spoiled(value),
        *ragged.where,
        gamma=gamma,
        lam=lam,
        steps=steps,
    )
    expected = [gae_twin(r, v, gamma, lam, steps) for r, v in ragged.trained(reward, value)]
    ragged.assert_equal(advantage, expected)
    values = [v for _, v in ragged.trained(reward, value)]
    ragged.assert_equal(returns, [a + v for a, v in zip(expected, values, strict=True)])


def test_gae_by_hand():
    # One sequence of three tokens, reward 1 at the end: deltas 0, 0, .5 with gamma 1.
    reward, value = np.array([[0.0, 0, 1]], np.float32), np.full((1, 3), 0.5, np.float32)
    mask, ids = np.ones((1, 3), np.float32), np.ones((1, 3), np.int32)

    def advantage(**settings):
        return gae(reward, value, mask, ids, **settings)[0]

    np.testing.assert_allclose(advantage(), [[0.5, 0.5, 0.5]])
    np.testing.assert_allclose(advantage(lam=0.5), [[0.125, 0.25, 0.5]])


@few
@given(seeds, st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, -0.5]))
def test_reinforce_equals_its_twin(seed, gamma, average):
    ragged = Ragged.sample(seed)
    reward = ragged.values()
    inputs = (ragged.spoiled(reward), np.float32(average), *ragged.where)
    advantage, returns = reinforce(*inputs, gamma=gamma)
    expected = [
        np.array([sum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))])
        for (r,) in ragged.trained(reward)
    ]
    ragged.assert_equal(returns, expected)
    ragged.assert_equal(advantage, [x - average for x in expected])


def test_the_moving_average_by_hand():
    first = moving_average(None, 1.0, decay=0.9)
    second = moving_average(first, -1.0, decay=0.9)
    # .9 * 1 - .1 * 1, and .9 * .8 + .1 * 2.
    assert (first, second) == (1.0, pytest.approx(0.8))
    assert moving_average(second, 2.0, decay=0.9) == pytest.approx(0.92)
    assert moving_average(second, 2.0, decay=0.0) == 2.0


@few
@given(seeds, st.sampled_from([1.0, 0.9]))
def test_reinforce_plus_plus_equals_its_twin(seed, gamma):
    ragged = Ragged.sample(seed)
    reward = ragged.values()
    advantage, returns = reinforce_plus_plus(ragged.spoiled(reward), *ragged.where, gamma=gamma)
    expected = [
        np.array([sum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))])
        for (r,) in ragged.trained(reward)
    ]
    ragged.assert_equal(returns, expected)
    tokens = np.concatenate(expected)
    if len(tokens) < 2:
        np.testing.assert_array_equal(advantage, 0)
        return
    scale = np.sqrt(tokens.var(ddof=1) + 1e-8)
    ragged.assert_equal(advantage, [(x - tokens.mean()) / scale for x in expected], rtol=1e-4)


@few
@given(seeds)
def test_remax_equals_its_twin(seed):
    ragged = Ragged.sample(seed)
    reward = ragged.values()
    greedy = [np.full(len(m), x, np.float32) for m, x in zip(ragged.masks, range(9), strict=False)]
    advantage, returns = remax(ragged.spoiled(reward), ragged.spoiled(greedy), *ragged.where)
    expected = [np.cumsum(r[::-1])[::-1] for (r,) in ragged.trained(reward)]
    ragged.assert_equal(returns, expected)
    ragged.assert_equal(advantage, [x - i for i, x in enumerate(expected)])


def optimal_twin(rows, groups):
    """rows: (reward, logprob, sum of squares, weight) of each sequence; one token at a time."""
    returns = [np.cumsum(r[::-1])[::-1] for r, *_ in rows]
    energy = [np.cumsum((1 - 2 * np.exp(p) + q) * w**2) for _, p, q, w in rows]
    advantages = []
    for i, g in enumerate(groups):
        out = []
        for t in range(len(returns[i])):
            peers = [j for j, h in enumerate(groups) if h == g and len(returns[j]) > t]
            total = sum(energy[j][t] for j in peers)
            baseline = sum(energy[j][t] * returns[j][t] for j in peers) / total
            out.append(0.0 if g < 0 else returns[i][t] - baseline * (len(peers) > 1))
        advantages.append(out)
    return advantages, returns


@few
@given(seeds)
def test_the_optimal_token_baseline_equals_its_twin(seed):
    ragged = Ragged.sample(seed)
    reward, logprob = ragged.values(), ragged.values(-3, -0.1)
    squares = [np.exp(2 * p) + 0.3 * (1 - np.exp(p)) ** 2 for p in logprob]
    weight = ragged.values(0.5, 2)
    groups = ragged.rng.integers(-1, GROUPS, len(ragged.masks))
    group = ragged.pack(
        [np.full(len(m), g) for m, g in zip(ragged.masks, groups, strict=True)], -1, np.int32
    )
    arguments = (*map(ragged.spoiled, (reward, logprob, squares)), *ragged.where, group)
    rows = ragged.trained(reward, logprob, squares, weight)
    advantage, returns = optimal(*arguments, importance_weight_BT=ragged.spoiled(weight))
    expected = optimal_twin(rows, groups)
    ragged.assert_equal(advantage, expected[0], rtol=1e-4, atol=1e-5)
    ragged.assert_equal(returns, expected[1])
    advantage, _ = optimal(*arguments)
    plain = [(r, p, q, np.ones_like(w)) for r, p, q, w in rows]
    ragged.assert_equal(advantage, optimal_twin(plain, groups)[0], rtol=1e-4, atol=1e-5)


def test_the_optimal_baseline_of_equal_returns_is_exactly_theirs():
    rng = np.random.default_rng(0)
    shape = (3, 4)
    reward = np.zeros(shape, np.float32)
    reward[:, -1] = 0.7
    logprob = rng.uniform(-3, 0, shape).astype(np.float32)
    ones = np.ones(shape, np.int32)
    advantage, _ = optimal(reward, logprob, 0.5 + 0 * logprob, 1.0 * reward**0, ones, ones)
    np.testing.assert_array_equal(advantage, 0)


def test_reverse_kl_by_hand():
    student, teacher = jnp.log(jnp.array([[0.5, 0.2, 0.9]])), jnp.log(jnp.array([[0.25, 0.4, 0.9]]))
    mask = jnp.array([[1.0, 1.0, 0.0]])
    nowhere = jnp.array([[0.0, 0.0, jnp.nan]])
    advantage, target = token_advantages.reverse_kl(student, teacher + nowhere, mask)
    np.testing.assert_allclose(advantage, [[-np.log(2), np.log(2), 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(target, advantage)
    halved, _ = token_advantages.reverse_kl(student, teacher, mask, coef=0.5)
    np.testing.assert_allclose(halved, advantage / 2, rtol=1e-6)
