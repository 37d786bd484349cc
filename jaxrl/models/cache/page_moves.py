"""Slots as tables of pages, and their moves on the device that holds the pages.

A pool is a contiguous cache whose "slots" are pages: its axis "batch" counts pages, "length" the tokens of a
page. Token t of a slot is token t % page of page table[slot, t // page]. Page 0 of a device belongs to
nobody; unused entries of the table name it, and it takes whatever is written beyond the pages of a slot.

    n slots   N pages of a device   P pages of a slot   W new tokens
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedSlots:
    """A cache whose slots are lists of pages. The host assigns the pages (`rollout.page_pool`).

    Attributes:
      pool: the pages; a tree of arrays with the axes "batch" (pages) and "length" (tokens of a page).
      table: int32 [n, P], the pages of each slot, numbered on the device that holds them.
      shared: int32 [n], number of leading pages that a copy into the slot leaves unchanged.
    """

    pool: Any
    table: jax.Array
    shared: jax.Array


def gathered(pool: Any, axes: Any, table_nP: jax.Array) -> Any:
    """The pages of each slot one after another: a contiguous cache of n slots, 0 where a slot has no page."""
    n, P = table_nP.shape
    order = jnp.argsort((table_nP == 0).reshape(-1), stable=True)

    def empty(leaf, names):
        shape = list(leaf.shape)
        shape[names.index("batch")] = n
        shape[names.index("length")] *= P
        return jnp.zeros(shape, leaf.dtype)

    def copy_page(j, cache):
        slot, p = order[j] // P, order[j] % P

        def one(old, leaf, names):
            batch, length = names.index("batch"), names.index("length")
            page = jax.lax.dynamic_slice_in_dim(leaf, table_nP[slot, p], 1, batch)
            at = {batch: slot, length: p * leaf.shape[length]}
            return jax.lax.dynamic_update_slice(old, page, _starts(at, leaf.ndim))

        return jax.tree.map(one, cache, pool, axes)

    # Page by page: for a gather XLA would copy the pool into another memory layout.
    used = (table_nP > 0).sum()
    return jax.lax.fori_loop(0, used, copy_page, jax.tree.map(empty, pool, axes))


def copied(slots: PagedSlots, axes: Any, other: Any, source_n: jax.Array) -> PagedSlots:
    """Writes slot source_n[i] of the contiguous cache `other` to the pages of slot i.

    Slots with a negative source and the shared pages of a slot stay unchanged. The cost grows with the number
    of pages written.

    Args:
      slots: slots that are written.
      axes: logical axes of the pool, and of `other`.
      other: contiguous cache.
      source_n: int32 [n].
    """
    page = _page_tokens(slots.pool, axes)
    other = _whole_pages(other, axes, page)
    most = _page_tokens(other, axes) // page
    order_n = jnp.argsort(source_n < 0, stable=True)

    def copy_slot(j, pool):
        slot = order_n[j]
        row_P = slots.table[slot]

        def copy_page(p, pool):
            def one(leaf, new, names):
                batch, length = names.index("batch"), names.index("length")
                sizes = list(new.shape)
                sizes[batch], sizes[length] = 1, page
                at = {batch: source_n[slot], length: p * page}
                new = jax.lax.dynamic_slice(new, _starts(at, leaf.ndim), sizes)
                return jax.lax.dynamic_update_slice(
                    leaf, new, _starts({batch: row_P[p]}, leaf.ndim)
                )

            return jax.tree.map(one, pool, other, axes)

        used = jnp.minimum((row_P > 0).sum(), most)
        return jax.lax.fori_loop(slots.shared[slot], used, copy_page, pool)

    pool = jax.lax.fori_loop(0, (source_n >= 0).sum(), copy_slot, slots.pool)
    return dataclasses.replace(slots, pool=pool)


def written(
    slots: PagedSlots, axes: Any, new: Any, start_n: jax.Array, live_n: jax.Array
) -> PagedSlots:
    """Writes the W tokens of `new` to every live slot, at `start_n`. Tokens beyond its pages are lost.

    Args:
      slots: slots that are written.
      axes: logical axes of the pool, and of `new`.
      new: contiguous cache of W tokens in n slots.
      start_n: int32 [n], position of the first new token.
      live_n: bool [n].
    """
    page, W = _page_tokens(slots.pool, axes), _page_tokens(new, axes)
    # W tokens touch at most this many pages, wherever they begin.
    touched = (W + page - 2) // page + 1
    table_nP = jnp.pad(slots.table, ((0, 0), (0, touched)))
    order_n = jnp.argsort(~live_n, stable=True)

    def write(j, pool):
        slot = order_n[j // touched]
        place = start_n[slot] // page + j % touched
        # The index among the new tokens of the first token of the page; negative if older ones precede.
        first = place * page - start_n[slot]
        index = first + jnp.arange(page)
        is_new = (index >= 0) & (index < W)

        def one(leaf, new, names):
            batch, length = names.index("batch"), names.index("length")
            new = jax.lax.dynamic_index_in_dim(new, slot, batch)
            pads = [(page, page) if d == length else (0, 0) for d in range(leaf.ndim)]
            new = jax.lax.dynamic_slice_in_dim(jnp.pad(new, pads), first + page, page, length)
            start = _starts({batch: table_nP[slot, place]}, leaf.ndim)
            # Pages are read and written whole: a write of single tokens needs a loop over tokens.
            old = jax.lax.dynamic_slice(leaf, start, new.shape)
            chosen = is_new.reshape([page if d == length else 1 for d in range(leaf.ndim)])
            return jax.lax.dynamic_update_slice(leaf, jnp.where(chosen, new, old), start)

        return jax.tree.map(one, pool, new, axes)

    pool = jax.lax.fori_loop(0, live_n.sum() * touched, write, slots.pool)
    return dataclasses.replace(slots, pool=pool)


def _whole_pages(tree: Any, axes: Any, page: int) -> Any:
    """`tree` with zeros appended up to a whole number of pages."""

    def one(leaf, names):
        pads = [(0, 0)] * leaf.ndim
        length = names.index("length")
        pads[length] = (0, -leaf.shape[length] % page)
        return jnp.pad(leaf, pads)

    return jax.tree.map(one, tree, axes)


def _page_tokens(tree: Any, axes: Any) -> int:
    """The size of the axis "length" of a tree."""
    sizes = jax.tree.map(lambda leaf, names: leaf.shape[names.index("length")], tree, axes)
    return jax.tree.leaves(sizes)[0]


def _starts(at: dict[int, Any], ndim: int) -> list[Any]:
    """Start indices by dimension; 0 where `at` has none."""
    return [at.get(d, 0) for d in range(ndim)]
