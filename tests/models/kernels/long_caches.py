"""Caches of several layers for tests of kernels, contiguous and in pages."""

import dataclasses

import jax
import numpy as np

from jaxrl.models.cache.kv_cache import KVCache, PagedSlots, cache_of

L, LAYER, W = 2, 1, 5
stored = jax.jit(cache_of, static_argnums=(2, 3))


def normal(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def cache_like(rng, tokens, dtype) -> KVCache:
    """Keys and values [.., T, K, H] at random, in NumPy."""
    k, v = normal(rng, *tokens), normal(rng, *tokens)
    return jax.tree.map(np.array, stored(k, v, dtype, "head_dim"))


def make(*, kv_heads, group, head_dim, kv_dtype, capacity, rows=6, dtype=np.float32):
    """A new token per row, and a cache of all layers in which nothing is zero."""
    rng = np.random.default_rng(0)
    q = normal(rng, rows, kv_heads * group, head_dim)
    k, v = (normal(rng, rows, kv_heads, head_dim) for _ in range(2))
    cache = cache_like(rng, (L, rows, capacity, kv_heads, head_dim), kv_dtype)
    return (q.astype(dtype), k.astype(dtype), v.astype(dtype)), cache


def both_caches(cache: KVCache, length_B, used: int):
    """The layer, and a buffer of W tokens, with their lengths."""
    B, kv_heads, _, head_dim = cache.v.shape[1:]
    buffer = cache_like(np.random.default_rng(3), (B, W, kv_heads, head_dim), cache.k.dtype)
    layer = jax.tree.map(lambda x: x[LAYER], cache)
    return [(layer, length_B), (buffer, np.full_like(length_B, used))]


def slow(q_BQH, k_BKH, v_BKH, caches, kind) -> np.ndarray:
    """Attention of a new token to caches and to itself, in float64."""
    wide = lambda x, scale: x.astype(float) * (1 if scale is None else scale[..., None])  # noqa: E731
    stored = [(wide(x.k, x.k_scale), wide(x.v, x.v_scale), n) for x, n in caches]
    out_BQH = np.zeros(q_BQH.shape)
    first = -kind.window if kind.window and (kind.slides is None or kind.slides) else 0
    for b, n in np.ndindex(out_BQH.shape[:2]):
        at = b, n // (q_BQH.shape[1] // k_BKH.shape[1])
        keys = np.concatenate([*(k[at][: n[b]] for k, _, n in stored), k_BKH[at][None]])[first:]
        values = np.concatenate([*(v[at][: n[b]] for _, v, n in stored), v_BKH[at][None]])[first:]
        scores = keys @ q_BQH[b, n].astype(float) / q_BQH.shape[2] ** 0.5
        weights = np.exp(kind.softcap * np.tanh(scores / kind.softcap) if kind.softcap else scores)
        sink = 0 if kind.sinks is None else np.exp(float(kind.sinks[n]))
        out_BQH[b, n] = weights @ values / (weights.sum() + sink)
    return out_BQH


def poisoned(cache: KVCache, length_B, block: int) -> KVCache:
    """`cache` with NaN in every block of tokens that begins beyond a row's length."""
    first_B = -(-length_B // block) * block
    unread_BC = np.arange(cache.capacity)[None] >= first_B[:, None]

    def poison(x):
        unread = unread_BC.reshape(1, x.shape[1], 1, cache.capacity, *[1] * (x.ndim - 4))
        return x if x.dtype == np.int8 else np.where(unread, x.dtype.type(np.nan), x)

    return jax.tree.map(poison, cache)


def in_pages(cache: KVCache, page: int) -> PagedSlots:
    """The same cache in pages, which lie in any order; page 0 belongs to nobody."""
    rows, per_row = cache.v.shape[1], cache.capacity // page
    order = 1 + np.random.default_rng(1).permutation(rows * per_row)

    def pool(x):
        # [L, B, K, P, page, ..] -> [L, B * P, K, page, ..]
        parts = x.reshape(*x.shape[:3], per_row, page, *x.shape[4:]).swapaxes(2, 3)
        parts = parts.reshape(x.shape[0], rows * per_row, *parts.shape[3:])
        nobody = np.full_like(parts[:, :1], 99)
        return np.concatenate([nobody, parts[:, np.argsort(order)]], axis=1)

    table = order.reshape(rows, per_row).astype(np.int32)
    return PagedSlots(jax.tree.map(pool, cache), table, np.zeros(rows, np.int32))


def unused_are_0(slots: PagedSlots, length_B) -> PagedSlots:
    """The table without the pages beyond the length of a row, as the host has it."""
    first = np.arange(slots.table.shape[1])[None] * slots.pool.capacity
    return dataclasses.replace(slots, table=np.where(first < length_B[:, None], slots.table, 0))
