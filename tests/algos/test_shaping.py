import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algos.shaping import soft_overlong_penalty

limits = st.integers(2, 20480).flatmap(
    lambda most: st.tuples(st.just(most), st.integers(1, most - 1))
)
LENGTHS = st.lists(st.integers(1, 30000), min_size=1, max_size=8)


def penalty_of(lengths, most, buffer, penalty=1.0):
    return soft_overlong_penalty(
        jnp.asarray(lengths, jnp.int32),
        max_response_tokens=most,
        buffer_tokens=buffer,
        penalty=penalty,
    )


def test_by_hand_with_the_papers_limits():
    # L_max 20480, L_cache 4096: free up to 16384, half of it at 18432.
    penalty_B = penalty_of([1, 16384, 16385, 18432, 20479, 20480, 99999], 20480, 4096)
    expected = [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1]
    assert penalty_B.dtype == jnp.float32
    np.testing.assert_array_equal(penalty_B, np.array(expected, np.float32))


@given(LENGTHS, limits, st.floats(0, 4, width=32))
def test_equals_the_papers_three_branches(lengths, limits, penalty):
    most, buffer = limits
    expected = [
        0.0 if n <= most - buffer else -1.0 if n > most else ((most - buffer) - n) / buffer
        for n in lengths
    ]
    ours = penalty_of(lengths, most, buffer, penalty)
    np.testing.assert_allclose(ours, penalty * np.array(expected), rtol=1e-6, atol=1e-37)
