"""Pages are written and read as slots of a contiguous cache would be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_writes import filled

from jaxrl.models.cache import paged_cache
from jaxrl.models.cache.cache_kind import CacheKind, cache_bytes
from jaxrl.models.cache.kv_cache import CacheShape, PagedSlots
from jaxrl.models.cache.paged_cache import PagedCache

PAGE, SLOTS, PER_SLOT, W = 4, 3, 5, 6
KINDS = {
    "stacked, keys last": CacheKind(CacheShape(2, 2, 3, jnp.float32, "head_dim")),
    "stacked, int8": CacheKind(CacheShape(2, 2, 3, jnp.int8)),
    "per layer": CacheKind(CacheShape(2, 2, 3, jnp.float32), unrolled=True),
}


def slots_of(kind, seed: int, pages_of_slots) -> PagedSlots:
    """A pool full of numbers, and slots with so many pages each, in any order."""
    rng = np.random.default_rng(seed)
    order = 1 + rng.permutation(SLOTS * PER_SLOT)
    table = np.zeros((SLOTS, PER_SLOT), np.int32)
    for row, pages, count in zip(
        table, order.reshape(SLOTS, PER_SLOT), pages_of_slots, strict=True
    ):
        row[:count] = pages[:count]
    pool = filled(kind, 1 + SLOTS * PER_SLOT, PAGE, seed=seed)
    return PagedSlots(pool, table, np.zeros(SLOTS, np.int32))


@functools.cache
def compiled(kind, name: str):
    """A function of `paged_cache` for the caches of a kind; compiled once per shape."""
    axes = kind.axes(kind.empty(1, 1))
    function = getattr(paged_cache, name)
    return jax.jit(lambda first, *rest: function(first, axes, *rest))


resized = jax.jit(lambda kind, cache, tokens: kind.resize(cache, tokens), static_argnums=(0, 2))


def contiguous(kind, slots: PagedSlots):
    return compiled(kind, "gathered_pages")(slots.pool, slots.table)


def only_owned(kind, cache, pages_of_slots):
    """The cache with zeros where slots have no pages."""
    owned = np.arange(PER_SLOT * PAGE)[None] < PAGE * np.asarray(pages_of_slots)[:, None]

    def one(leaf, names):
        shape = [1] * leaf.ndim
        shape[names.index("batch")], shape[names.index("length")] = owned.shape
        return np.where(owned.reshape(shape), leaf, np.zeros_like(leaf))

    return jax.tree.map(one, cache, kind.axes(cache))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_new_tokens_are_appended_to_live_slots(kind, data):
    """Also across pages, and beyond the last page of a slot, where they are lost."""
    held = data.draw(st.lists(st.integers(1, PER_SLOT), min_size=SLOTS, max_size=SLOTS))
    start = np.array([data.draw(st.integers(0, PAGE * n - 1)) for n in held], np.int32)
    live = np.array(data.draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)))
    slots = slots_of(kind, data.draw(st.integers(0, 99)), held)
    new = filled(kind, SLOTS, W, seed=1)
    got = compiled(kind, "written_to_pages")(slots, new, start, live)
    before = resized(kind, contiguous(kind, slots), PER_SLOT * PAGE + W)
    want = resized(kind, jax.jit(kind.write)(before, new, start, live), PER_SLOT * PAGE)
    assert_equal(contiguous(kind, got), only_owned(kind, want, held))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_a_sequence_is_copied_into_the_pages_of_a_slot(kind, data):
    held = data.draw(st.lists(st.integers(1, PER_SLOT), min_size=SLOTS, max_size=SLOTS))
    source = data.draw(st.lists(st.integers(-1, 1), min_size=SLOTS, max_size=SLOTS))
    source, capacity = np.array(source, np.int32), data.draw(st.sampled_from([3, 8, 18]))
    slots = slots_of(kind, data.draw(st.integers(0, 99)), held)
    other = filled(kind, 2, capacity, seed=1)
    got = contiguous(kind, compiled(kind, "copied_to_pages")(slots, other, source))
    whole_pages = resized(kind, other, capacity + -capacity % PAGE)
    want = jax.jit(kind.copy)(contiguous(kind, slots), whole_pages, source)
    assert_equal(got, only_owned(kind, want, held))
    # Shared pages are left as they are.
    shared = dataclasses.replace(slots, shared=np.full(SLOTS, PER_SLOT, np.int32))
    again = compiled(kind, "copied_to_pages")(shared, other, source)
    assert_equal(contiguous(kind, again), contiguous(kind, slots))


def test_a_pool_takes_the_memory_of_its_pages_for_any_number_of_slots():
    paged = PagedCache(CacheShape(2, 2, 3, jnp.int8), page_tokens=PAGE, num_pages=10, gather=None)
    pool = 10 * PAGE * 2 * 2 * 2 * (3 + 4)
    assert cache_bytes(paged, 3, 5 * PAGE) == pool + 4 * (3 * 5 + 3)
    assert cache_bytes(paged, 30, 5 * PAGE) == pool + 4 * (30 * 5 + 30)
    cache = paged.empty(3, 5 * PAGE)
    ranks = jax.tree.map(lambda leaf, axes: (leaf.ndim, len(axes)), cache, paged.axes(cache))
    for ndim, named in jax.tree.leaves(ranks, is_leaf=lambda x: isinstance(x, tuple)):
        assert ndim == named
