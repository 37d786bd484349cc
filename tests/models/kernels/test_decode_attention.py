"""The kernel for one token on GPUs, interpreted here, against plain XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from long_caches import LAYER, in_pages, make, normal, poisoned, unused_are_0

from jaxrl.models.attention_kind import FULL, AttentionKind
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import KVCache, cache_of, put_token
from jaxrl.models.kernels import decode_attention as module
from jaxrl.models.kernels.decode_attention import decode_attention

# Places of the buffer, and those in use.
W, USED = 5, 3


def buffer_like(cache: KVCache, rows: int) -> KVCache:
    rng = np.random.default_rng(3)
    _, _, kv_heads, _, head_dim = cache.v.shape
    tokens = (rows, W, kv_heads, head_dim)
    return cache_of(normal(rng, *tokens), normal(rng, *tokens), cache.k.dtype, "head_dim")


def both(new, cache, length_B, *, kind=FULL, seen_by_kernel=None, used=USED):
    """The results of kernel and XLA, and the buffers after it."""
    q, k, v = new
    buffer, used_B = buffer_like(cache, len(q)), jnp.full_like(length_B, used)
    run = jax.jit(functools.partial(decode_attention, interpret=True))
    given = cache if seen_by_kernel is None else seen_by_kernel
    out, after = run(q, given, jnp.int32(LAYER), length_B, k, v, buffer, used_B, kind)
    layer = jax.tree.map(lambda x: x[LAYER], cache)
    expected = cached_attention(q, k, v, [(layer, length_B), (buffer, used_B)], kind=kind)
    newest = cache_of(k[:, None], v[:, None], cache.k.dtype, "head_dim")
    assert_same_trees(after, put_token(buffer, newest, jnp.int32(used)))
    return out, expected


def assert_same_trees(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


LENGTHS = [0, 1, 64, 65, 192, 130]


@pytest.mark.parametrize("parts", [1, 2, 16])
@pytest.mark.parametrize(
    ("kv_dtype", "group"), [(jnp.float32, 4), (jnp.float32, 20), (jnp.int8, 1)]
)
def test_it_agrees_with_xla(kv_dtype, group, parts, monkeypatch):
    """Rows of no block, a part of one, several; in parts that have none; the rest is not read."""
    monkeypatch.setattr(module, "_PARTS", 12 * parts)
    new, cache = make(kv_heads=2, group=group, head_dim=16, kv_dtype=kv_dtype, capacity=192)
    length_B = jnp.array(LENGTHS, jnp.int32)
    assert_close(*both(new, cache, length_B, seen_by_kernel=poisoned(cache, length_B, 64)))


@pytest.mark.parametrize("used", [0, W - 1])
def test_the_first_token_of_a_dispatch_and_the_last(used):
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    assert_close(*both(new, cache, jnp.array(LENGTHS, jnp.int32), used=used))


@pytest.mark.parametrize("page", [128, 32])
@pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.int8])
def test_it_follows_the_table_of_pages(kv_dtype, page):
    """A row with one page, less than a page, whole pages; what the table does not name is never used."""
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=kv_dtype, capacity=640)
    length_B = jnp.array([0, 1, 128, 129, 640, 300], jnp.int32)
    used = unused_are_0(in_pages(cache, page), length_B)
    assert_close(*both(new, cache, length_B, seen_by_kernel=used))


KINDS = {
    # Windows that end in the buffer, in the cache, and beyond all of it.
    "window of 3": AttentionKind(window=3),
    "window of 70": AttentionKind(window=70),
    "window of 4,000": AttentionKind(window=4000),
    "sliding by value": AttentionKind(window=70, slides=jnp.array(True)),
    "full by value": AttentionKind(window=70, slides=jnp.array(False)),
    "cap": AttentionKind(softcap=0.5),
    # One far above all scores, one far below.
    "sinks": AttentionKind(sinks=jnp.array([0.0, 40.0, -40.0, 1.0] * 2)),
    "all": AttentionKind(window=70, softcap=0.5, sinks=jnp.linspace(-1, 1, 8)),
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_windows_caps_and_sinks(kind, parts, monkeypatch):
    monkeypatch.setattr(module, "_PARTS", 12 * parts)
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    assert_close(*both(new, cache, jnp.array(LENGTHS, jnp.int32), kind=kind))


def test_blocks_before_a_window_are_not_read():
    new, cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    length_B = jnp.full(6, 190, jnp.int32)
    unread = jax.tree.map(lambda x: x.at[..., :128, :].set(jnp.nan), cache)
    assert_close(*both(new, cache, length_B, kind=AttentionKind(window=66), seen_by_kernel=unread))


def test_in_half_precision_it_is_as_close_to_the_truth_as_xla():
    new, cache = make(
        kv_heads=2, group=4, head_dim=128, kv_dtype=jnp.bfloat16, dtype=jnp.bfloat16, capacity=640
    )
    length_B = jnp.array([0, 64, 129, 511, 513, 640], jnp.int32)
    kernel, xla = both(new, cache, length_B)
    wide = [x.astype(jnp.float32) for x in new]
    layers = [(jax.tree.map(lambda x: x[LAYER], cache), length_B)]
    layers += [(buffer_like(cache, 6), jnp.full_like(length_B, USED))]
    truth = cached_attention(*wide, layers)
    far = lambda out: np.abs(out.astype(jnp.float32) - truth).max()  # noqa: E731
    assert far(kernel) < 1.5 * far(xla)


def test_of_replicated_heads_the_buffer_gets_all():
    """A device that holds more kv heads than its queries use, as with more shards than heads."""
    (q, k, v), cache = make(kv_heads=2, group=4, head_dim=16, kv_dtype=jnp.float32, capacity=192)
    length_B, used_B = jnp.array(LENGTHS, jnp.int32), jnp.full(6, USED, jnp.int32)
    buffer = buffer_like(cache, 6)
    arguments = cache, jnp.int32(LAYER), length_B, k, v, buffer, used_B
    out, after = decode_attention(q, *arguments, interpret=True)
    for head in range(2):
        own = slice(4 * head, 4 * head + 4)
        half, of_half = decode_attention(
            q[:, own], *arguments, first_head=head, num_heads=1, interpret=True
        )
        assert_close(half, out[:, own])
        assert_same_trees(of_half, after)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8])
def test_it_lowers_for_cuda(kv_dtype):
    (q, k, v), cache = make(
        kv_heads=2, group=6, head_dim=128, kv_dtype=kv_dtype, dtype=jnp.bfloat16, capacity=384
    )
    zeros_B, kind = jnp.zeros(6, jnp.int32), AttentionKind(9, 30.0, sinks=jnp.zeros(12))
    arguments = q, cache, jnp.int32(LAYER), zeros_B, k, v, buffer_like(cache, 6), zeros_B, kind
    # From jax 0.11 on lowering asks which GPU it is for.
    gpu = AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(decode_attention).trace(*arguments)
        assert "gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
