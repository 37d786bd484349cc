"""The kernels for one token against a long cache, interpreted here, against plain XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxrl.errors import UserError
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots, cache_of
from jaxrl.models.kernels.paged_attention import (
    IMPLEMENTATIONS,
    paged_attention_gpu,
    paged_attention_tpu,
    pick_decode_implementation,
)

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


def by_xla(new, cache: KVCache, length_B) -> jax.Array:
    return cached_attention(*new, [(jax.tree.map(lambda x: x[LAYER], cache), length_B)])


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


@pytest.mark.parametrize(
    ("kernel", "kv_dtype", "head_dim", "page"),
    [
        (paged_attention_tpu, jnp.bfloat16, 128, 128),
        (paged_attention_tpu, jnp.bfloat16, 128, 32),
        (paged_attention_gpu, jnp.float32, 16, 128),
        (paged_attention_gpu, jnp.int8, 16, 128),
        (paged_attention_gpu, jnp.float32, 16, 32),
    ],
)
def test_a_kernel_follows_the_table_of_pages(kernel, kv_dtype, head_dim, page):
    """A row with one page, less than a page, whole pages; what the table does not name is never used."""
    new, cache = make(kv_heads=2, group=4, head_dim=head_dim, kv_dtype=kv_dtype, capacity=640)
    length_B = jnp.array([0, 1, 128, 129, 640, 300], jnp.int32)
    used = unused_are_0(in_pages(cache, page), length_B)
    assert_close(by_kernel(kernel, new, used, length_B), by_xla(new, cache, length_B))


def by_kernel(kernel, new, cache: KVCache, length_B, **options) -> jax.Array:
    run = jax.jit(functools.partial(kernel, interpret=True, **options))
    return cached_attention(*new, [], run(new[0], cache, jnp.int32(LAYER), length_B))


@pytest.mark.parametrize("group", [1, 4, 8])
def test_the_tpu_kernel_agrees_with_xla(group):
    """Empty rows, one token, a page of 512 tokens, one token more, and a full row; the rest is not read."""
    new, cache = make(kv_heads=2, group=group, head_dim=128, kv_dtype=jnp.bfloat16, capacity=1024)
    length_B = jnp.array([0, 1, 512, 513, 1024, 0], jnp.int32)
    assert_close(
        by_kernel(paged_attention_tpu, new, poisoned(cache, length_B, 512), length_B),
        by_xla(new, cache, length_B),
    )


@pytest.mark.parametrize(
    ("kv_dtype", "group"), [(jnp.float32, 4), (jnp.float32, 20), (jnp.int8, 1)]
)
def test_the_gpu_kernel_agrees_with_xla(kv_dtype, group):
    new, cache = make(kv_heads=2, group=group, head_dim=16, kv_dtype=kv_dtype, capacity=192)
    length_B = jnp.array([0, 1, 64, 65, 192, 130], jnp.int32)
    assert_close(
        by_kernel(paged_attention_gpu, new, poisoned(cache, length_B, 64), length_B),
        by_xla(new, cache, length_B),
    )


@pytest.mark.parametrize("kernel", [paged_attention_tpu, paged_attention_gpu])
def test_in_half_precision_a_kernel_is_as_close_to_the_truth_as_xla(kernel):
    """5 pages of 128 tokens, or 10 of 64: no whole number of blocks, or of parts of a row."""
    new, cache = make(
        kv_heads=2, group=4, head_dim=128, kv_dtype=jnp.bfloat16, dtype=jnp.bfloat16, capacity=640
    )
    length_B = jnp.array([0, 64, 129, 511, 513, 640], jnp.int32)
    truth = by_xla([x.astype(jnp.float32) for x in new], cache, length_B)
    kernels, xlas = (
        np.abs(out.astype(jnp.float32) - truth).max()
        for out in (by_kernel(kernel, new, cache, length_B), by_xla(new, cache, length_B))
    )
    assert kernels < 1.5 * xlas


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8])
def test_the_gpu_kernel_lowers_for_cuda(kv_dtype):
    new, cache = make(
        kv_heads=2, group=6, head_dim=128, kv_dtype=kv_dtype, dtype=jnp.bfloat16, capacity=384
    )
    arguments = new[0], cache, jnp.int32(LAYER), jnp.zeros(6, jnp.int32)
    # From jax 0.11 on lowering asks which GPU it is for.
    gpu = AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(paged_attention_gpu).trace(*arguments)
        assert "gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("platform", "dtype", "kv_dtype", "head_dim", "expected"),
    [
        ("cpu", jnp.bfloat16, jnp.bfloat16, 128, "xla"),
        (None, jnp.bfloat16, jnp.bfloat16, 128, "xla"),
        ("tpu", jnp.bfloat16, jnp.bfloat16, 128, "paged_tpu"),
        ("tpu", jnp.float32, jnp.bfloat16, 256, "paged_tpu"),
        ("tpu", jnp.bfloat16, jnp.bfloat16, 64, "xla"),
        ("tpu", jnp.bfloat16, jnp.int8, 128, "xla"),
        ("tpu", jnp.float32, jnp.float32, 128, "xla"),
        ("gpu", jnp.bfloat16, jnp.bfloat16, 64, "paged_gpu"),
        ("gpu", jnp.bfloat16, jnp.int8, 128, "paged_gpu"),
        ("gpu", jnp.bfloat16, jnp.bfloat16, 96, "xla"),
        ("gpu", jnp.float32, jnp.float32, 128, "xla"),
    ],
)
def test_the_platforms_kernel_is_picked_where_it_can_run(
    platform, dtype, kv_dtype, head_dim, expected
):
    assert pick_decode_implementation(platform, dtype, kv_dtype, head_dim) == expected
    assert pick_decode_implementation(platform, dtype, kv_dtype, head_dim, "xla") == "xla"
    assert expected in IMPLEMENTATIONS
    if expected != "xla":
        named = pick_decode_implementation(platform, dtype, kv_dtype, head_dim, expected)
        assert named == expected


@pytest.mark.parametrize(
    ("requested", "platform", "kv_dtype", "message"),
    [
        (
            "paged",
            "tpu",
            jnp.bfloat16,
            "unknown decode attention 'paged'; use auto or one of paged_tpu",
        ),
        ("paged_tpu", "cpu", jnp.bfloat16, "'paged_tpu' on cpu .* it runs on TPUs, .*; use auto"),
        (
            "paged_tpu",
            "tpu",
            jnp.int8,
            "a int8 cache and head size 128: it runs on TPUs, a bfloat16",
        ),
        ("paged_gpu", "tpu", jnp.bfloat16, "'paged_gpu' on tpu .* it runs on GPUs, activations"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(requested, platform, kv_dtype, message):
    with pytest.raises(UserError, match=message):
        pick_decode_implementation(platform, jnp.bfloat16, kv_dtype, 128, requested)
