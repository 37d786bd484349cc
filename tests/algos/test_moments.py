"""Statistics of parts that add up to those of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algos.moments import Moments, add_moments, merge_moments

few = settings(max_examples=20)
ROWS = 6


def statistics(x):
    """By NumPy, of the numbers themselves."""
    if not len(x):
        return dict.fromkeys(("mean", "mean_square", "std", "sample_std", "min", "max"), 0.0)
    return {
        "mean": x.mean(),
        "mean_square": (x**2).mean(),
        "std": x.std(),
        "sample_std": x.std(ddof=1) if len(x) > 1 else 0.0,
        "min": x.min(),
        "max": x.max(),
    }


@jax.jit
def of_rows(x, mask):
    """Moments of each row, added in order, and the same merged at once."""
    parts = [Moments.of(x[i], mask[i]) for i in range(ROWS)]
    added = {"x": jax.tree.map(jnp.zeros_like, parts[0])}  # a carry begins with zeros
    for part in parts:
        added = add_moments(added, {"x": part})
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    return added["x"], merge_moments({"x": stacked})["x"]


@few
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 0.9]))
def test_parts_add_up_to_the_whole(seed, share):
    rng = np.random.default_rng(seed)
    x = rng.normal(1, 0.5, (ROWS, 4)).astype(np.float32)
    mask = rng.random(x.shape) < share
    spoiled = np.where(mask, x, np.nan)
    for moments in of_rows(spoiled, mask.astype(np.float32)):
        for name, expected in statistics(x[mask].astype(np.float64)).items():
            np.testing.assert_allclose(
                getattr(moments, name), expected, rtol=2e-5, atol=2e-6, err_msg=name
            )


def test_a_small_deviation_of_large_numbers_keeps_its_digits():
    # In float32 the mean of the squares would have no digit of it.
    ones, x = jnp.ones(4), 1000 + jnp.array([-0.25, 0.25, -0.25, 0.25])
    assert float((Moments.of(x, ones) + Moments.of(x, ones)).std) == pytest.approx(0.25)
    assert float(Moments.of(0.1 * ones, ones).std) < 1e-8


def test_no_gradient_goes_through():
    slope = jax.grad(lambda x: Moments.of(x, jnp.ones(3)).mean)(jnp.arange(3.0))
    assert not slope.any()
