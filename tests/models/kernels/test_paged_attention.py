"""The TPU's kernel for one token against a long cache, interpreted, against XLA; the choice of kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from long_caches import LAYER, in_pages, make, poisoned, unused_are_0

from jaxrl.errors import UserError
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import KVCache, PagedSlots
from jaxrl.models.kernels.paged_attention import (
    IMPLEMENTATIONS,
    paged_attention_tpu,
    pick_decode_implementation,
)


def by_xla(new, cache: KVCache, length_B) -> jax.Array:
    return cached_attention(*new, [(jax.tree.map(lambda x: x[LAYER], cache), length_B)])


@pytest.mark.parametrize("page", [128, 32])
def test_the_tpu_kernel_follows_the_table_of_pages(page):
    """A row with one page, less than a page, whole pages; what the table does not name is never used."""
    new, cache = make(kv_heads=2, group=4, head_dim=128, kv_dtype=jnp.bfloat16, capacity=640)
    length_B = jnp.array([0, 1, 128, 129, 640, 300], jnp.int32)
    used = unused_are_0(in_pages(cache, page), length_B)
    assert_close(by_kernel(new, used, length_B), by_xla(new, cache, length_B))


def by_kernel(new, cache: KVCache | PagedSlots, length_B) -> jax.Array:
    run = jax.jit(functools.partial(paged_attention_tpu, interpret=True))
    return cached_attention(*new, [], run(new[0], cache, jnp.int32(LAYER), length_B))


@pytest.mark.parametrize("group", [1, 4, 8])
def test_the_tpu_kernel_agrees_with_xla(group):
    """Empty rows, one token, a page of 512 tokens, one token more, and a full row; the rest is not read."""
    new, cache = make(kv_heads=2, group=group, head_dim=128, kv_dtype=jnp.bfloat16, capacity=1024)
    length_B = jnp.array([0, 1, 512, 513, 1024, 0], jnp.int32)
    assert_close(
        by_kernel(new, poisoned(cache, length_B, 512), length_B),
        by_xla(new, cache, length_B),
    )


def test_in_half_precision_the_tpu_kernel_is_as_close_to_the_truth_as_xla():
    """5 pages of 128 tokens: no whole number of blocks."""
    new, cache = make(
        kv_heads=2, group=4, head_dim=128, kv_dtype=jnp.bfloat16, dtype=jnp.bfloat16, capacity=640
    )
    length_B = jnp.array([0, 64, 129, 511, 513, 640], jnp.int32)
    truth = by_xla([x.astype(jnp.float32) for x in new], cache, length_B)
    kernels, xlas = (
        np.abs(out.astype(jnp.float32) - truth).max()
        for out in (by_kernel(new, cache, length_B), by_xla(new, cache, length_B))
    )
    assert kernels < 1.5 * xlas


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
