"""The kernel for one token on GPUs, interpreted here, against a slow twin in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from long_caches import LAYER, W, both_caches, in_pages, make, poisoned, slow, stored, unused_are_0

from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.kernels import decode_attention as module
from jaxrl.models.kernels.decode_attention import decode_attention

# Of W places of the buffer.
USED = 3


def both(new, cache, length_B, *, kind=FULL, seen_by_kernel=None, used=USED):
    """The results of kernel and twin, and the buffers after it."""
    q, k, v = new
    _, (buffer, used_B) = caches = both_caches(cache, length_B, used)
    run = jax.jit(functools.partial(decode_attention, interpret=True))
    given = cache if seen_by_kernel is None else seen_by_kernel
    out, after = run(q, given, np.int32(LAYER), length_B, k, v, buffer, used_B, kind)
    expected = slow(q, k, v, caches, kind)
    newest = stored(k[:, None], v[:, None], cache.k.dtype, "head_dim")
    for place, x in zip(jax.tree.leaves(buffer), jax.tree.leaves(newest), strict=True):
        place[:, :, used] = x[:, :, 0]
    jax.tree.map(np.testing.assert_array_equal, after, buffer)
    return out, expected


LENGTHS = np.array([0, 1, 64, 65, 192, 130], np.int32)


@pytest.mark.parametrize(
    ("kv_dtype", "group", "parts"),
    [("f", 4, 1), ("f", 4, 2), ("f", 4, 16), ("f", 20, 2), ("int8", 1, 16)],
)
def test_it_is_its_slow_twin(kv_dtype, group, parts, monkeypatch):
    """Rows of no block, a part of one, several; in parts that have none; the rest is not read."""
    monkeypatch.setattr(module, "_PARTS", 12 * parts)
    new, cache = make(kv_heads=2, group=group, head_dim=16, kv_dtype=kv_dtype, capacity=192)
    assert_close(*both(new, cache, LENGTHS, seen_by_kernel=poisoned(cache, LENGTHS, 64)))


@pytest.mark.parametrize("used", [0, W - 1])
def test_the_first_token_of_a_dispatch_and_the_last(used):
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    assert_close(*both(new, cache, LENGTHS, used=used))


@pytest.mark.parametrize(("kv_dtype", "page"), [("f", 128), ("f", 32), ("int8", 32)])
def test_it_follows_the_table_of_pages(kv_dtype, page):
    """A row with one page, less than a page, whole pages; what the table does not name is never used."""
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=kv_dtype, capacity=640)
    length_B = np.array([0, 1, 128, 129, 640, 300], np.int32)
    used = unused_are_0(in_pages(cache, page), length_B)
    assert_close(*both(new, cache, length_B, seen_by_kernel=used))


KINDS = {
    # Windows that end in the buffer, in the cache, and beyond all of it.
    "window of 3": AttentionKind(window=3),
    "window of 70": AttentionKind(window=70),
    "window of 4,000": AttentionKind(window=4000),
    "sliding by value": AttentionKind(window=70, slides=np.array(True)),
    "full by value": AttentionKind(window=70, slides=np.array(False)),
    "cap": AttentionKind(softcap=0.5),
    # One far above all scores, one far below.
    "sinks": AttentionKind(sinks=np.array([0.0, 40.0, -40.0, 1.0] * 2, np.float32)),
    "all": AttentionKind(window=70, softcap=0.5, sinks=np.linspace(-1, 1, 8, dtype=np.float32)),
}


@pytest.mark.parametrize(
    ("name", "parts"), [*((name, 3) for name in KINDS), ("window of 70", 1), ("all", 1)]
)
def test_windows_caps_and_sinks(name, parts, monkeypatch):
    monkeypatch.setattr(module, "_PARTS", 12 * parts)
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    assert_close(*both(new, cache, LENGTHS, kind=KINDS[name]))


def test_blocks_before_a_window_are_not_read():
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    unread_C1 = np.arange(192)[:, None] < 128
    unread = jax.tree.map(lambda x: np.where(unread_C1, np.float32(np.nan), x), cache)
    window, length_B = AttentionKind(window=66), np.full(6, 190, np.int32)
    assert_close(*both(new, cache, length_B, kind=window, seen_by_kernel=unread))


def test_in_half_precision_it_is_as_close_to_the_truth_as_xla():
    new, cache = make(
        kv_heads=2, group=4, head_dim=128, kv_dtype=jnp.bfloat16, dtype=jnp.bfloat16, capacity=640
    )
    length_B = np.array([0, 64, 129, 511, 513, 640], np.int32)
    kernel, truth = both(new, cache, length_B)
    xla = jax.jit(cached_attention)(*new, both_caches(cache, length_B, USED))
    far = lambda out: np.abs(np.asarray(out, float) - truth).max()  # noqa: E731
    assert far(kernel) < 1.5 * far(xla)


def test_of_replicated_heads_the_buffer_gets_all():
    """A device that holds more kv heads than its queries use, as with more shards than heads."""
    (q, k, v), cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    _, (buffer, used_B) = both_caches(cache, LENGTHS, USED)
    arguments = cache, np.int32(LAYER), LENGTHS, k, v, buffer, used_B
    run = functools.partial(decode_attention, interpret=True)
    out, after = jax.jit(run)(q, *arguments)
    of_one = jax.jit(functools.partial(run, num_heads=1))
    for head in range(2):
        own = slice(4 * head, 4 * head + 4)
        half, of_half = of_one(q[:, own], *arguments, first_head=np.int32(head))
        assert_close(half, np.asarray(out)[:, own])
        jax.tree.map(np.testing.assert_array_equal, of_half, after)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8])
def test_it_lowers_for_cuda(kv_dtype):
    (q, k, v), cache = make(
        kv_heads=2, group=6, head_dim=128, kv_dtype=kv_dtype, dtype=jnp.bfloat16, capacity=384
    )
    zeros_B, kind = np.zeros(6, np.int32), AttentionKind(9, 30.0, sinks=np.zeros(12, np.float32))
    _, (buffer, _) = both_caches(cache, zeros_B, 0)
    arguments = q, cache, np.int32(LAYER), zeros_B, k, v, buffer, zeros_B, kind
    # From jax 0.11 on lowering asks which GPU it is for.
    gpu = AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(decode_attention).trace(*arguments)
        assert "gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
