"""The kernel for one token on TPUs, interpreted here, against a slow twin; the choice of kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from long_caches import LAYER, both_caches, in_pages, make, poisoned, slow, unused_are_0
from test_decode_attention import KINDS, LENGTHS, USED

from jaxrl.errors import UserError
from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.kernels import paged_attention as module
from jaxrl.models.kernels.paged_attention import (
    IMPLEMENTATIONS,
    paged_attention_tpu,
    pick_decode_implementation,
)


def both(new, cache, lengths, *, kind=FULL, seen_by_kernel=None, used=USED):
    """The results of kernel and twin."""
    (q, k, v), length_B = new, np.array(lengths, np.int32)
    _, (buffer, used_B) = caches = both_caches(cache, length_B, used)
    run = jax.jit(functools.partial(paged_attention_tpu, interpret=True))
    given = cache if seen_by_kernel is None else seen_by_kernel
    # The buffers of the layers before are other ones.
    stack = jax.tree.map(lambda x: np.stack([np.zeros_like(x)] * LAYER + [x]), buffer)
    out = run(q, given, np.int32(LAYER), length_B, k, v, stack, used_B, kind)
    return out, slow(q, k, v, caches, kind)


@pytest.mark.parametrize(
    ("kv_dtype", "group", "block"), [(jnp.float32, 4, 64), (jnp.bfloat16, 1, 128)]
)
def test_it_is_its_slow_twin(kv_dtype, group, block, monkeypatch):
    """Rows of no block, a part of one, several, of one and of two copies; the rest is not read."""
    monkeypatch.setattr(module, "_BLOCK", block)
    new, cache = make(kv_heads=2, group=group, head_dim=16, kv_dtype=kv_dtype, capacity=192)
    seen = poisoned(cache, LENGTHS, 64)
    assert_close(*both(new, cache, LENGTHS, seen_by_kernel=seen))


def test_it_goes_on_in_the_next_step_of_the_grid():
    """20 rows are two steps of 8 and one of 4."""
    new, cache = make(kv_heads=1, group=2, head_dim=16, kv_dtype=jnp.float32, capacity=64, rows=20)
    assert_close(*both(new, cache, [0, 64, 1, 5] * 5))


def test_heads_of_two_tiles():
    new, cache = make(kv_heads=1, group=2, head_dim=256, kv_dtype=jnp.float32, capacity=64)
    assert_close(*both(new, cache, [0, 64, 1, 5, 0, 0]))


def test_it_follows_the_table_of_pages(monkeypatch):
    """A row with one page, less than a page, whole pages; what the table does not name is never used."""
    monkeypatch.setattr(module, "_BLOCK", 64)
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=160)
    lengths = [0, 1, 32, 33, 160, 70]
    used = unused_are_0(in_pages(cache, 32), np.array(lengths))
    assert_close(*both(new, cache, lengths, seen_by_kernel=used, used=0))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_windows_caps_and_sinks(kind, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 64)
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    assert_close(*both(new, cache, LENGTHS, kind=kind))


def test_copies_before_a_window_are_not_made(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 128)
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    unread_C1 = np.arange(192)[:, None] < 64
    unread = jax.tree.map(lambda x: np.where(unread_C1, np.float32(np.nan), x), cache)
    window = AttentionKind(window=100)
    assert_close(*both(new, cache, [190] * 6, kind=window, seen_by_kernel=unread))


def test_in_half_precision_it_is_as_close_to_the_truth_as_xla():
    new, cache = make(
        kv_heads=2, group=4, head_dim=128, kv_dtype=jnp.bfloat16, dtype=jnp.bfloat16, capacity=640
    )
    lengths = np.array([0, 64, 129, 511, 513, 640], np.int32)
    kernel, truth = both(new, cache, lengths)
    xla = jax.jit(cached_attention)(*new, both_caches(cache, lengths, USED))
    far = lambda out: np.abs(np.asarray(out, float) - truth).max()  # noqa: E731
    assert far(kernel) < 1.5 * far(xla)


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
