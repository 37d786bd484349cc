import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention import cached_attention, segment_attention


def normal(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def attention_twin(q_BTQH, k_BTKH, v_BTKH, segment_ids_BT) -> np.ndarray:
    """One query at a time, in float64."""
    B, T, Q, H = q_BTQH.shape
    group = Q // k_BTKH.shape[2]
    out = np.zeros((B, T, Q, H))
    for b, t, q in np.ndindex(B, T, Q):
        seen = [s for s in range(t + 1) if segment_ids_BT[b, s] == segment_ids_BT[b, t]]
        keys = k_BTKH[b, seen, q // group].astype(np.float64)
        scores = keys @ q_BTQH[b, t, q] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, q] = weights @ v_BTKH[b, seen, q // group] / weights.sum()
    return out


@pytest.fixture
def packed():
    """Two rows of nine tokens: three segments, and one with padding behind it."""
    rng = np.random.default_rng(0)
    segment_ids_BT = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 0, 0, 0, 0]], np.int32)
    qkv = (normal(rng, 2, 9, 4, 8), normal(rng, 2, 9, 2, 8), normal(rng, 2, 9, 2, 8))
    return *qkv, segment_ids_BT


def test_segment_attention_equals_its_numpy_twin(packed):
    np.testing.assert_allclose(segment_attention(*packed), attention_twin(*packed), atol=1e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_query_heads_share_kv_heads_in_order(num_kv_heads):
    rng = np.random.default_rng(1)
    q = normal(rng, 1, 5, 4, 8)
    k, v = normal(rng, 1, 5, num_kv_heads, 8), normal(rng, 1, 5, num_kv_heads, 8)
    ids = np.ones((1, 5), np.int32)
    repeated = segment_attention(
        q, np.repeat(k, 4 // num_kv_heads, axis=2), np.repeat(v, 4 // num_kv_heads, axis=2), ids
    )
    np.testing.assert_allclose(segment_attention(q, k, v, ids), repeated, atol=1e-6)


def test_a_token_sees_nothing_later_and_nothing_of_another_segment(packed):
    q, k, v, ids = packed

    def fifth_token(k, v):
        return segment_attention(q, k, v, ids)[0, 5].sum()

    for gradient in jax.grad(fifth_token, argnums=(0, 1))(k, v):
        assert (np.asarray(gradient[0, [3, 4, 5]]) != 0).any(axis=(1, 2)).all()
        assert (np.asarray(gradient[0, [0, 1, 2, 6, 7, 8]]) == 0).all()
        assert (np.asarray(gradient[1]) == 0).all()


def test_padding_is_finite_with_finite_gradients(packed):
    q, k, v, ids = packed
    value, gradient = jax.value_and_grad(lambda q: (segment_attention(q, k, v, ids) ** 2).sum())(q)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_token_against_the_cache_is_the_last_token_of_the_whole_sequence(length):
    rng = np.random.default_rng(2)
    q, k, v = normal(rng, 1, 7, 4, 8), normal(rng, 1, 7, 2, 8), normal(rng, 1, 7, 2, 8)
    whole = segment_attention(q, k, v, np.ones((1, 7), np.int32))[:, length]

    # What a previous owner of the slot left behind the real tokens is large, and must not show.
    cache_k, cache_v = 100 * normal(rng, 1, 2, 8, 10), 100 * normal(rng, 1, 2, 10, 8)
    cache_k[..., :length] = k[:, :length].transpose(0, 2, 3, 1)
    cache_v[:, :, :length] = v[:, :length].transpose(0, 2, 1, 3)
    cached = cached_attention(
        q[:, length], k[:, length], v[:, length], cache_k, cache_v, np.array([length], np.int32)
    )
    np.testing.assert_allclose(cached, whole, atol=1e-6)


def test_sequences_of_a_batch_have_their_own_lengths():
    rng = np.random.default_rng(3)
    arrays = (
        normal(rng, 3, 4, 8),
        normal(rng, 3, 2, 8),
        normal(rng, 3, 2, 8),
        normal(rng, 3, 2, 8, 5),
        normal(rng, 3, 2, 5, 8),
        np.array([0, 5, 2], np.int32),
    )
    together = cached_attention(*arrays)
    for b in range(3):
        alone = cached_attention(*(a[b : b + 1] for a in arrays))
        np.testing.assert_allclose(together[b], alone[0], atol=1e-6)


def test_bfloat16_stays_bfloat16_and_close(packed):
    q, k, v, ids = packed
    low = segment_attention(*(jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)), jnp.asarray(ids))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), attention_twin(*packed), atol=0.05)
