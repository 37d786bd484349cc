"""Devices that share rows, by exchange, by ring and by both, give what one device gives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from meshes import mesh_of

from jaxrl.mesh.parallel_layers import attention_parallel
from jaxrl.mesh.ring import ContextSplit, pick_split, splits, spread, unspread
from jaxrl.mesh.rules import TRAIN_RULES
from jaxrl.models.attention import TreeSegments, attention
from jaxrl.models.attention_kind import FULL, AttentionKind

EIGHT = {"train": "1-1-8", "context": 8}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def gradients(function, q, k, v, weights):
    def loss(q, k, v):
        out = function(q, k, v)
        return jnp.sum(out * weights), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out * (weights != 0).astype(out.dtype), found


def shared(attend, split, ids: Any, kind):
    """`attend` on eight devices that share every row."""
    mesh = mesh_of(**EIGHT)
    to = functools.partial(spread, split=split, mesh=mesh, rules=TRAIN_RULES)
    back = functools.partial(unspread, split=split, mesh=mesh, rules=TRAIN_RULES)
    on_mesh = attention_parallel(attend, mesh, TRAIN_RULES, split)
    return lambda q, k, v: back(on_mesh(*map(to, (q, k, v)), jax.tree.map(to, ids), kind))


# 80 tokens are 16 chunks of 5; 88 are 8 parts in their own order.
@pytest.mark.parametrize("tokens", [80, 88])
@pytest.mark.parametrize("split", [ContextSplit(4, 2), ContextSplit(2, 4), ContextSplit(1, 8)])
@pytest.mark.parametrize(
    "kind",
    [
        FULL,
        pytest.param(AttentionKind(13), marks=pytest.mark.long),
        pytest.param(AttentionKind(0, 3.0), marks=pytest.mark.long),
    ],
)
def test_a_ring_gives_what_one_device_gives(tokens, split, kind):
    q, k, v = normal(2, tokens, 8, 8), *(normal(2, tokens, 2, 8, seed=s) for s in (1, 2))
    rng = np.random.default_rng(3)
    ids: Any = np.sort(rng.integers(1, 4, (2, tokens)), axis=1).astype(np.int32)
    ids[0, -7:] = 0
    # Padding has outputs without a meaning.
    weights = normal(2, tokens, 8, 8, seed=4) * (ids > 0)[..., None, None]
    # Blocks that do not divide a chunk.
    attend = functools.partial(attention, block_tokens=3)
    found = gradients(shared(attend, split, ids, kind), q, k, v, weights)
    expected = gradients(lambda q, k, v: attend(q, k, v, ids, kind), q, k, v, weights)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", [FULL, AttentionKind(30)], ids=["full", "window"])
def test_answers_see_a_shared_prompt_on_other_devices(kind):
    """The prompt is in the first chunks, its two answers in the others."""
    ids: Any = np.repeat(np.array([[1, 2, 3]], np.int32), [24, 20, 36], axis=1)
    positions: Any = np.array([[*range(44), *range(24, 60)]], np.int32)
    segments: Any = TreeSegments(ids, jnp.where(ids > 1, 1, 0), positions)
    q, k, v = normal(1, 80, 2, 8), *(normal(1, 80, 1, 8, seed=s) for s in (1, 2))
    weights = normal(1, 80, 2, 8, seed=4)
    found = gradients(shared(attention, ContextSplit(1, 8), segments, kind), q, k, v, weights)
    expected = gradients(lambda q, k, v: attention(q, k, v, segments, kind), q, k, v, weights)
    assert_close(found, expected)


def test_sinks_count_once_however_many_parts_come_by():
    ids, sinks = np.ones((1, 80), np.int32), normal(8, seed=5)
    q, k, v = normal(1, 80, 8, 8), *(normal(1, 80, 2, 8, seed=s) for s in (1, 2))

    def gradient(attend):
        def loss(sinks):
            out = attend(q, k, v, AttentionKind(0, 0.0, None, sinks))
            return jnp.sum(out * normal(1, 80, 8, 8, seed=4)), out

        return jax.jit(jax.grad(loss, has_aux=True))(sinks)

    on_mesh = lambda q, k, v, kind: shared(attention, ContextSplit(2, 4), ids, kind)(q, k, v)  # noqa: E731
    alone = lambda q, k, v, kind: attention(q, k, v, jnp.asarray(ids), kind)  # noqa: E731
    assert_close(gradient(on_mesh), gradient(alone))


def test_the_order_for_a_ring():
    """Four devices, 16 tokens: the first and the last two, the next two from both ends, and so on."""
    mesh = mesh_of("1-1-4", context=4)
    row = np.arange(16)[None]
    split = ContextSplit(1, 4)
    found = jax.jit(lambda x: spread(x, split, mesh, TRAIN_RULES))(row)
    assert found[0].tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert jax.jit(lambda x: unspread(x, split, mesh, TRAIN_RULES))(found).tolist() == row.tolist()


@pytest.mark.parametrize("split", [ContextSplit(u, 8 // u) for u in (1, 2, 4)])
def test_every_order_comes_back(split):
    mesh, rows = mesh_of(**EIGHT), normal(2, 48, 3)
    there = jax.jit(lambda x: spread(x, split, mesh, TRAIN_RULES))(rows)
    back = jax.jit(lambda x: unspread(x, split, mesh, TRAIN_RULES))(there)
    assert sorted(there[0, :, 0].tolist()) == sorted(rows[0, :, 0].tolist())
    np.testing.assert_array_equal(back, rows)


@pytest.mark.parametrize("split", [ContextSplit(1, 4), ContextSplit(2, 2)])
def test_parts_of_a_ring_have_as_many_pairs_each(split):
    """Token t sees t + 1 tokens of one text: 80 * 81 / 2 pairs, the same share for each part."""
    mesh = mesh_of("1-1-4", context=4)
    seen = np.arange(1, 81)[None]
    there = jax.jit(lambda x: spread(x, split, mesh, TRAIN_RULES))(seen)
    of_parts = np.asarray(there).reshape(split.ring, -1).sum(1)
    assert of_parts.tolist() == [80 * 81 // 2 // split.ring] * split.ring
    # Rows that do not divide keep their order.
    odd = np.arange(84)[None]
    kept = jax.jit(lambda x: spread(x, split, mesh, TRAIN_RULES))(odd)
    np.testing.assert_array_equal(kept, odd)


@pytest.mark.parametrize("split", [ContextSplit(2, 4), ContextSplit(1, 8)])
def test_a_ring_in_bfloat16_is_as_exact_as_one_device(split):
    """Head size 128, 512 tokens, tiles of the size on accelerators: both are compared with float32."""
    q, k, v = normal(1, 512, 4, 128), *(normal(1, 512, 2, 128, seed=s) for s in (1, 2))
    ids: Any = np.sort(np.random.default_rng(3).integers(1, 4, (1, 512)), axis=1).astype(np.int32)
    weights = normal(1, 512, 4, 128, seed=4)
    exact = gradients(lambda q, k, v: attention(q, k, v, ids), q, k, v, weights)
    q, k, v, narrow_weights = (x.astype(jnp.bfloat16) for x in (q, k, v, weights))
    ring = shared(attention, split, ids, FULL)
    for attend in (ring, lambda q, k, v: attention(q, k, v, ids)):
        found = gradients(attend, q, k, v, narrow_weights)
        errors = [
            float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        ]
        # bfloat16 has 8 bits; inputs, products and outputs are rounded.
        assert max(errors) < 0.02


def test_the_way_that_sends_the_fewest_bytes():
    """The 7B of Qwen2.5 on 8 devices, with 28 heads and 4 kv heads; the 32B with t = 8, with 5 and 1."""
    # Exchange with 4: 2 (28 + 4) 3/4 = 48, and a ring of 2: 2 * 4. The ring alone: 2 * 4 * 7.
    assert ContextSplit(4, 2).heads_sent(28, 4) == 48 + 8
    assert ContextSplit(1, 8).heads_sent(28, 4) == 56
    # With 2: 2 (28 + 4) / 2, and 2 * 4 * 3.
    assert ContextSplit(2, 4).heads_sent(28, 4) == 32 + 24
    assert pick_split(8, 28, 4, whole_rows=False).heads_sent(28, 4) == 56
    assert pick_split(8, 5, 1, whole_rows=True) == ContextSplit(1, 8)
    assert pick_split(5, 5, 1, whole_rows=True) == ContextSplit(5, 1)
    assert pick_split(1, 5, 1, whole_rows=False) == ContextSplit()


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_any_number_of_devices_can_share_rows(size, kv_heads, group):
    ways = splits(size, kv_heads * group, kv_heads)
    assert ways[-1] == ContextSplit(1, size)
    assert all(way.size == size and kv_heads * group % way.exchanged == 0 for way in ways)
