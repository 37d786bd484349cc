"""What docs/from_trl.md calls the same, by the formulas of TRL 1.16 written down again in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos import group_advantages, kl
from jaxrl.algos.aggregation import AGGREGATIONS, count
from jaxrl.algos.policy_losses import cispo, gspo

B, T = 4, 6
RNG = np.random.default_rng(0)
OLD = RNG.uniform(-2, -0.1, (B, T)).astype(np.float32)
NEW = OLD + RNG.uniform(-0.5, 0.5, (B, T)).astype(np.float32)
ADVANTAGE = np.array([[1.0], [-0.5], [2.0], [-1.5]], np.float32) * np.ones((1, T), np.float32)
MASK = (np.arange(T) < np.array([[6], [3], [5], [2]])).astype(np.float32)
IDS = np.ones((B, T), np.int32)


@functools.partial(jax.jit, static_argnums=0)
def aggregated(name: str, loss_BT):
    aggregation, mask = AGGREGATIONS[name](), jnp.asarray(MASK)
    return aggregation.total(loss_BT, mask, IDS) / aggregation.divisor(count(mask, IDS))


def test_luspo_is_gspo_summed_over_tokens():
    lengths = MASK.sum(axis=1)
    ratio = np.exp(((NEW - OLD) * MASK).sum(axis=1) / lengths)
    clipped = np.clip(ratio, 1 - 0.02, 1 + 0.03)
    per_sequence = -np.minimum(ratio * ADVANTAGE[:, 0], clipped * ADVANTAGE[:, 0])
    luspo = (per_sequence * lengths).mean()
    loss, _ = jax.jit(gspo)(NEW, OLD, ADVANTAGE, MASK, IDS, clip_low=0.02, clip_high=0.03)
    np.testing.assert_allclose(aggregated("seq-mean-token-sum", loss), luspo, rtol=1e-5)
    assert abs(aggregated("seq-mean-token-mean", loss) - luspo) > 0.1


def test_the_bound_of_cispo_is_the_ratio_itself():
    highest = 1.2
    weight = np.minimum(np.exp(NEW - OLD), highest)
    loss, _ = jax.jit(cispo)(NEW, OLD, ADVANTAGE, clip_low=1.0, clip_high=highest - 1)
    np.testing.assert_allclose(loss, -weight * ADVANTAGE * NEW, rtol=1e-5)


def test_scaling_by_the_batch_is_not_whitening():
    reward = np.float32([1, 0, 1, 1, 0, 0, 1, 0])
    group = np.int32([0, 0, 1, 1, 2, 2, 3, 3])
    centered = reward - reward.reshape(4, 2).mean(axis=1).repeat(2)
    expected = centered / (reward.std(ddof=1) + 1e-4)
    of = functools.partial(group_advantages.grpo_batch_std, num_groups=4, epsilon=1e-4)
    found = jax.jit(of)(reward, group)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (reward.std(ddof=1) / centered.std(ddof=1)) > 1.35


def test_the_kl_of_default_settings_has_the_gradient_of_k3_plus_on_policy():
    """TRL multiplies k3 by the ratio, which has a gradient where it is 1."""
    ref = OLD + RNG.uniform(-0.5, 0.5, (B, T)).astype(np.float32)

    def corrected(logprob, ref):
        k3 = jnp.exp(ref - logprob) - (ref - logprob) - 1
        return k3 * jnp.exp(logprob - OLD)

    def gradient(function):
        return jax.jit(jax.grad(lambda logprob: function(logprob, ref).sum()))(OLD)

    theirs = gradient(corrected)
    ours = {name: gradient(kl.KL_ESTIMATES[name]) for name in ("k3", "k3+")}
    np.testing.assert_allclose(theirs, ours["k3+"], rtol=1e-4, atol=1e-6)
    assert np.abs(theirs - ours["k3"]).max() > 0.05
