"""The Tinker API's losses, by hand: each number can be worked out on paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tinker.summed_losses import SUMMED_LOSSES

# r = 2, 1/2, 1, 1: with A of both signs, inside and outside of clips at .8 and 1.2.
LOGPROB = np.log(np.float32([[0.8, 0.2, 0.5, 0.5]]))
OLD = np.log(np.float32([[0.4, 0.4, 0.5, 0.5]]))
ADVANTAGE = np.float32([[1.0, 2.0, -3.0, 0.0]])
SEGMENTS = np.array([[1, 1, 2, 2]])
ln = np.log


def per_token(name, logprob=LOGPROB, **arrays):
    loss = SUMMED_LOSSES[name]
    given = {"logprobs": OLD, "advantages": ADVANTAGE, **arrays}
    given |= {k: jnp.full(LOGPROB.shape, v) for k, v in loss.numbers.items() if k not in arrays}
    return loss.function(logprob, SEGMENTS, **{k: jnp.asarray(given[k]) for k in loss.arrays})


def gradient(name, **arrays):
    return jax.grad(lambda x: per_token(name, x, **arrays).sum())(jnp.asarray(LOGPROB))


@pytest.mark.parametrize(
    ("name", "arrays", "loss", "slope"),
    [
        (
            "cross_entropy",
            {"weights": np.float32([[1, -2, 0, 0.5]])},
            [-ln(0.8), 2 * ln(0.2), 0, -0.5 * ln(0.5)],
            [-1, 2, 0, -0.5],
        ),
        ("importance_sampling", {}, [-2, -1, 3, 0], [-2, -1, 3, 0]),
        # The first token is clipped at 1.2; the second, below .8 with A > 0, is not.
        ("ppo", {}, [-1.2, -1, 3, 0], [0, -1, 3, 0]),
        # Weights 1.2, .8, 1, 1, and every token keeps its gradient.
        ("cispo", {}, [-1.2 * ln(0.8), -1.6 * ln(0.2), 3 * ln(0.5), 0], [-1.2, -1.6, 3, 0]),
        # Half of beta times the squared log-ratio, which is log 2 both ways.
        (
            "dro",
            {"beta": np.float32([[0.4] * 4])},
            [-ln(0.8) + 0.2 * ln(2) ** 2, -2 * ln(0.2) + 0.2 * ln(2) ** 2, 3 * ln(0.5), 0],
            [-1 + 0.4 * ln(2), -2 - 0.4 * ln(2), 3, 0],
        ),
        # Sequence 1: over its first token alone s = 2, clipped at 1.2. Sequence 2: s = 1.
        (
            "gspo",
            {
                "sequence_ratio_mask": np.float32([[1, 0, 1, 1]]),
                "clip_low_threshold": np.float32([[0.8] * 4]),
                "clip_high_threshold": np.float32([[1.2] * 4]),
            },
            [-1.2, 0, 3, 0],
            [0, 0, 1.5, 1.5],
        ),
    ],
)
def test_values_and_gradients_of_each_token(name, arrays, loss, slope):
    np.testing.assert_allclose(per_token(name, **arrays), [loss], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient(name, **arrays), [slope], rtol=1e-6, atol=1e-6)


def test_thresholds_are_bounds_of_the_ratio_itself_and_may_differ_by_token():
    high = np.float32([[1.5, 1.2, 1.2, 1.2]])
    assert float(per_token("ppo", clip_high_threshold=high)[0, 0]) == pytest.approx(-1.5)
