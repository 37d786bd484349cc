"""Every entry of POLICY_LOSSES, on packed rows, against its formula written for one sequence."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import Ragged, differences, packed_inputs

from jaxrl.algos import policy_losses
from jaxrl.algos.aggregation import AGGREGATIONS, count
from jaxrl.algos.policy_losses import POLICY_LOSSES, on_packed_rows

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
NARROW = {"clip_low": 0.05, "clip_high": 0.1}
LIMITS = {"limit_low": 0.05, "limit_high": 0.1, "max_ratio": 1.2}
SETTINGS = {
    "cispo": CLIP,
    "clip_cov": CLIP,
    "clipped": CLIP | {"dual_clip": 1.5},
    "dppo_kl": LIMITS | {"limit_low": 0.004, "limit_high": 0.006},
    "dppo_tv": LIMITS,
    "dro": {"beta": 0.7},
    "geo_mean": CLIP,
    "gspo": NARROW,
    "gspo_token": NARROW,
    "kl_cov": {"kl_coef": 0.3},
    "sequence_masked": CLIP | {"dual_clip": 1.5, "threshold": 0.05},
    "vespo": {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 3.0, "lambda_negative": 2.0},
    "trpo": {"kl_coef": 0.3},
}

# Twins: (logprob, the same held constant, old, advantage, selected) of one sequence's trained tokens ->
# (losses, tokens counted as clipped). Where the formula stops the gradient stands the constant one.


def bounded(ratio, low, high):
    return np.minimum(np.maximum(ratio, 1 - low), 1 + high)


def surrogate(ratio, a, low, high):
    plain, clip = ratio * a, bounded(ratio, low, high) * a
    return -np.minimum(plain, clip), clip < plain


def clipped(p, still, old, a, selected, *, clip_low, clip_high, dual_clip):
    loss, active = surrogate(np.exp(p - old), a, clip_low, clip_high)
    return np.where(a < 0, np.minimum(loss, -dual_clip * a), loss), active


def cispo(p, still, old, a, selected, *, clip_low, clip_high):
    ratio = np.exp(still - old)
    weight = bounded(ratio, clip_low, clip_high)
    return -weight * a * p, weight != ratio


def clip_cov(p, still, old, a, selected, *, clip_low, clip_high):
    loss, active = surrogate(np.exp(p - old), a, clip_low, clip_high)
    return np.where(selected, 0, loss), active & ~selected


def kl_cov(p, still, old, a, selected, *, kl_coef):
    return -a * np.exp(p - old) + kl_coef * selected * np.abs(p - old), None


def dppo_tv(p, still, old, a, selected, *, limit_low, limit_high, max_ratio):
    moved = np.exp(still) - np.exp(old)
    keep = np.where(a > 0, moved <= limit_high, moved >= -limit_low)
    return -a * np.minimum(np.exp(still - old), max_ratio) * keep * p, ~keep


def dppo_kl(p, still, old, a, selected, *, limit_low, limit_high, max_ratio):
    new, was = np.exp(still), np.exp(old)
    kl = was * np.log(was / new) + (1 - was) * np.log((1 - was) / (1 - new))
    keep = np.where(a > 0, (kl <= limit_high) | (new <= was), (kl <= limit_low) | (new >= was))
    return -a * np.minimum(np.exp(still - old), max_ratio) * keep * p, ~keep


def dro(p, still, old, a, selected, *, beta):
    return -(a * p - beta / 2 * (p - old) ** 2), None


def policy_gradient(p, still, old, a, selected):
    return -a * p, None


def sapo(p, still, old, a, selected):
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (np.exp(p - old) - 1))), None


def trpo(p, still, old, a, selected, *, kl_coef):
    return -a * np.exp(p - old) + kl_coef * (np.exp(p - old) - 1 - (p - old)), None


def gspo(p, still, old, a, selected, *, clip_low, clip_high):
    if not len(p):
        return p, None
    return surrogate(np.full(len(p), np.exp(np.mean(p - old))), a, clip_low, clip_high)


def gspo_token(p, still, old, a, selected, *, clip_low, clip_high):
    if not len(p):
        return p, None
    s = np.exp(np.mean(still - old)) * np.exp(p - still)
    return surrogate(s, a, clip_low, clip_high)


def geo_mean(p, still, old, a, selected, *, clip_low, clip_high):
    if not len(p):
        return p, None
    d = p - old
    kept = np.where(a > 0, np.minimum(d, clip_high), np.maximum(d, -clip_low))
    return np.full(len(p), -a.mean() * np.exp(kept.mean())), kept != d


def vespo(p, still, old, a, selected, *, k_positive, lambda_positive, k_negative, lambda_negative):
    ratio = np.prod(np.exp(still - old))
    k, decay = (
        np.where(a >= 0, k_positive, k_negative),
        np.where(a >= 0, lambda_positive, lambda_negative),
    )
    return -(ratio**k) * np.exp(decay * (1 - ratio)) * a * p, None


def sequence_masked(p, still, old, a, selected, *, threshold, **clip):
    # The sampler's policy is the old one here.
    left_out = (a < 0) & (np.mean(old - still) > threshold) if len(p) else selected
    loss, active = clipped(p, still, old, a, selected, **clip)
    return np.where(left_out, 0, loss), active & ~left_out


TWINS = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "clipped": clipped,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dro": dro,
    "geo_mean": geo_mean,
    "gpg": policy_gradient,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "kl_cov": kl_cov,
    "policy_gradient": policy_gradient,
    "sapo": sapo,
    "sequence_masked": sequence_masked,
    "vespo": vespo,
    "trpo": trpo,
}
NEEDS_SELECTION = ("clip_cov", "kl_cov")


@functools.cache
def ours(name):
    def loss(logprob, old, advantage, mask, ids, selected):
        extra = {"selected": selected} if name in NEEDS_SELECTION else {}
        return on_packed_rows(
            POLICY_LOSSES[name],
            packed_inputs(logprob, old, advantage, mask, ids),
            **SETTINGS.get(name, {}),
            **extra,
        )

    return jax.jit(loss)


@functools.cache
def slope(name):
    def total(logprob, weight, *rest):
        return jnp.sum(jnp.where(weight != 0, weight * ours(name)(logprob, *rest)[0], 0.0))

    return jax.jit(jax.grad(total))


def example(seed):
    ragged = Ragged.sample(seed)
    old = ragged.values(-3, -0.1)
    moved = ragged.values(-0.5, 0.5)
    logprob = [np.minimum(x + d, -0.01) for x, d in zip(old, moved, strict=True)]
    advantage = ragged.values()
    selected = [ragged.rng.random(len(m)) < 0.4 for m in ragged.masks]
    return ragged, logprob, old, advantage, selected


def packed(ragged, logprob, old, advantage, selected):
    fields = (ragged.spoiled(x) for x in (logprob, old, advantage))
    return (*fields, *ragged.where, ragged.pack(selected, False, bool))


def test_every_loss_is_tested():
    assert set(TWINS) == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", TWINS)
def test_loss_and_clip_equal_the_twin(name):
    for seed in range(8):
        ragged, *fields = example(seed)
        loss, stats = ours(name)(*packed(ragged, *fields))
        assert loss.dtype == jnp.float32
        logprob, old, advantage, selected = fields
        rows = ragged.trained(logprob, logprob, old, advantage, selected)
        expected = [
            TWINS[name](*row[:4], row[4].astype(bool), **SETTINGS.get(name, {})) for row in rows
        ]
        ragged.assert_equal(loss, [x for x, _ in expected])
        ragged.assert_equal(stats["ppo_kl"], [row[2] - row[0] for row in rows])
        if "pg_clipfrac" in stats:
            none = np.zeros(0)
            ragged.assert_equal(
                stats["pg_clipfrac"], [none if f is None else f for _, f in expected]
            )
        assert all(value.dtype == loss.dtype for value in stats.values())


@pytest.mark.parametrize("name", TWINS)
def test_gradient_equals_differences(name):
    ragged, *fields = example(11)
    logprob, old, advantage, selected = fields
    weights = ragged.values()
    rows = ragged.trained(logprob, old, advantage, selected, weights)
    with jax.enable_x64(True):
        arrays = [np.asarray(x, np.float64) for x in packed(ragged, *fields)[:4]]
        rest = (*arrays[1:], *packed(ragged, *fields)[4:])
        weight = ragged.pack(weights).astype(np.float64) * ragged.mask
        ours = slope(name)(arrays[0], weight, *rest)

    def total(i, p):
        still, old, advantage, selected, weight = rows[i]
        loss, _ = TWINS[name](
            p, still, old, advantage, selected.astype(bool), **SETTINGS.get(name, {})
        )
        return np.sum(weight * loss)

    expected = [differences(functools.partial(total, i), row[0]) for i, row in enumerate(rows)]
    ragged.assert_equal(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", TWINS)
def test_impossible_tokens_stay_finite(name):
    ragged, logprob, old, advantage, selected = example(0)
    rng = np.random.default_rng(0)
    arrays = packed(
        ragged,
        [np.where(rng.random(len(x)) < 0.4, -1e4, x) for x in logprob],
        [np.where(rng.random(len(x)) < 0.4, -1e4, x) for x in old],
        advantage,
        selected,
    )
    loss, stats = ours(name)(*arrays)
    gradient = slope(name)(arrays[0], ragged.mask, *arrays[1:])
    for x in jax.tree.leaves((loss, stats, gradient)):
        assert np.all(np.isfinite(x))


@pytest.mark.parametrize("name", ["clipped", "geo_mean", "gspo"])
def test_a_mesh_over_rows_and_tokens_gives_the_same_loss_and_gradient(name):
    ragged, *fields = example(9)
    arrays = packed(ragged, *fields)
    aggregation = AGGREGATIONS["seq-mean-token-mean"]()

    @jax.jit
    def whole(logprob, *rest):
        def total(logprob):
            loss, _ = ours(name)(logprob, *rest)
            return aggregation.total(loss, *rest[2:4]) / aggregation.divisor(count(*rest[2:4]))

        return jax.value_and_grad(total)(logprob)

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "tokens"))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "tokens"))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        whole(*(jax.device_put(x, over) for x in arrays)),
        whole(*arrays),
    )


def test_a_dual_clip_of_infinity_is_none():
    arrays = (jnp.array([1.0, 1.0, 1.0]), jnp.array([-4.0, 0.0, 1.0]), jnp.array([-1.0, 0.0, -1.0]))
    loss, _ = policy_losses.clipped(*arrays, **CLIP, dual_clip=math.inf)
    np.testing.assert_allclose(loss, [math.exp(5), 0, 1], rtol=1e-6)


def test_the_entropy_bonus_lowers_the_loss_where_entropy_is_high():
    bonus = policy_losses.entropy_bonus(jnp.array([0.0, 2.0]), coef=0.25)
    np.testing.assert_array_equal(bonus, [0, -0.5])
