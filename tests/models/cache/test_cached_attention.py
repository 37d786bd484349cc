"""A cache whose keys lie as values do is read and written as one whose keys keep length last."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from jaxrl.models.cache.cached_attention import cached_attention, extending_attention
from jaxrl.models.cache.kv_cache import CacheShape, cache_axes, cache_of, put_token

B, T, Q, K, H, C = 2, 3, 4, 2, 8, 6


def normal(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_attention_does_not_depend_on_how_keys_lie(dtype):
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, B, T, Q, H), normal(rng, B, T, K, H), normal(rng, B, T, K, H)
    past = normal(rng, B, C, K, H), normal(rng, B, C, K, H)
    length_B = np.array([2, 6], np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs(keys_last):
        cache = cache_of(*past, dtype, keys_last)
        extended = extending_attention(q, k, v, cache, length_B, block_tokens=4)
        cache = put_token(cache, cache_of(k[:, :1], v[:, :1], dtype, keys_last), jnp.int32(1))
        return extended, cached_attention(q[:, 0], k[:, 0], v[:, 0], [(cache, length_B)])

    for ours, twin in zip(outputs("head_dim"), outputs("length"), strict=True):
        assert_close(ours, twin)


@pytest.mark.parametrize("keys_last", ["length", "head_dim"])
def test_axes_name_every_dimension(keys_last):
    shape = CacheShape(5, K, H, jnp.int8, keys_last)
    sizes = {"layers": 5, "batch": B, "kv_heads": K, "head_dim": H, "length": C}
    for cache in (shape.empty((5, B), C), shape.empty((B,), C)):
        jax.tree.map(
            lambda leaf, axes: np.testing.assert_array_equal(leaf.shape, [sizes[a] for a in axes]),
            cache,
            cache_axes(cache),
        )
        assert cache.k.shape[-1] == sizes[keys_last]
        assert cache.capacity == C
