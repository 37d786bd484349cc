"""Caches of several layers for tests of kernels, contiguous and in pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.cache.kv_cache import KVCache, PagedSlots, cache_of

L, LAYER = 2, 1


def normal(rng, *shape) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def make(*, kv_heads, group, head_dim, kv_dtype, capacity, rows=6, dtype=jnp.float32):
    """A new token per row, and a cache of all layers in which nothing is zero."""
    rng = np.random.default_rng(0)
    q = normal(rng, rows, kv_heads * group, head_dim)
    k, v = (normal(rng, rows, kv_heads, head_dim) for _ in range(2))
    tokens = (L, rows, capacity, kv_heads, head_dim)
    cache = cache_of(normal(rng, *tokens), normal(rng, *tokens), kv_dtype, "head_dim")
    return (q.astype(dtype), k.astype(dtype), v.astype(dtype)), cache


def poisoned(cache: KVCache, length_B, block: int) -> KVCache:
    """`cache` with NaN in every block of tokens that begins beyond a row's length."""
    first_B = -(-length_B // block) * block
    unread_BC = jnp.arange(cache.capacity)[None] >= first_B[:, None]

    def poison(x):
        unread = unread_BC.reshape(1, x.shape[1], 1, cache.capacity, *[1] * (x.ndim - 4))
        return jnp.where(unread, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(poison, cache)


def in_pages(cache: KVCache, page: int) -> PagedSlots:
    """The same cache in pages, which lie in any order; page 0 belongs to nobody."""
    rows, per_row = cache.v.shape[1], cache.capacity // page
    order = 1 + np.random.default_rng(1).permutation(rows * per_row)

    def pool(x):
        # [L, B, K, P, page, ..] -> [L, B * P, K, page, ..]
        parts = x.reshape(*x.shape[:3], per_row, page, *x.shape[4:]).swapaxes(2, 3)
        parts = parts.reshape(x.shape[0], rows * per_row, *parts.shape[3:])
        nobody = jnp.full_like(parts[:, :1], 99)
        return jnp.concatenate([nobody, parts[:, np.argsort(order)]], axis=1)

    table = jnp.asarray(order.reshape(rows, per_row), jnp.int32)
    return PagedSlots(jax.tree.map(pool, cache), table, jnp.zeros(rows, jnp.int32))


def unused_are_0(slots: PagedSlots, length_B) -> PagedSlots:
    """The table without the pages beyond the length of a row, as the host has it."""
    first = jnp.arange(slots.table.shape[1])[None] * slots.pool.capacity
    return dataclasses.replace(slots, table=jnp.where(first < length_B[:, None], slots.table, 0))
