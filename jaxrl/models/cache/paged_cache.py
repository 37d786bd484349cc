"""A cache whose slots share one pool of pages: memory is taken by tokens, not by slots times the longest.

    pool [L, pages, K, page, H]   table [n, P]   buffer [L, n, K, W, H]   prefix [L, n, K, C, H]

Prefixes and the buffer of a dispatch are contiguous caches. A dispatch reads the pages, by a
kernel that follows the table or by gathering them once, and appends the buffer to them at its end.

A pool is a contiguous cache whose "slots" are pages: its axis "batch" counts pages, "length" the tokens of a
page.

    n slots   N pages of a device   P pages of a slot   L layers   K kv heads   H head size   W new tokens
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl.models.cache.cache_kind import Cache, CacheKind, DecodeStep
from jaxrl.models.cache.kv_cache import (
    KVCache,
    PagedSlots,
    Routes,
    copy_slots,
    is_part,
    only,
    starts,
    take_slots,
    with_capacity,
    without_routes,
    write_slots,
    written,
)
from jaxrl.models.decoder import Decoder
from jaxrl.models.delta_net import DeltaState

# (slots, logical axes of their arrays) -> the contiguous cache that they hold
Gather: TypeAlias = Callable[[PagedSlots, PagedSlots], Cache]


# What pages hold.
_PAGED = KVCache | Routes


@dataclasses.dataclass(frozen=True)
class PagedCache(CacheKind):
    """Slots are `PagedSlots`; prefixes and buffers are contiguous, and so is the pool, with other sizes.

    Without `gather` the kernel must take `PagedSlots`.

    Attributes:
      page_tokens: number of tokens of a page.
      num_pages: number of pages, over all devices that share the slots.
      gather: function that gathers the pages of all slots before each dispatch; None if a kernel follows the
        table.
    """

    page_tokens: int = dataclasses.field(kw_only=True)
    num_pages: int = dataclasses.field(kw_only=True)
    gather: Gather | None = dataclasses.field(kw_only=True)

    @property
    def capacity_multiple(self) -> int:
        return self.page_tokens

    @property
    def reads_own_length(self) -> bool:
        # A slot has as many pages as its sequence needs.
        return True

    def empty(self, num_slots: int, capacity: int) -> PagedSlots:
        """The pool has `num_pages` pages for any number of slots."""
        return PagedSlots(
            only(_PAGED, self.buffer(self.num_pages, self.page_tokens)),
            jnp.zeros((num_slots, capacity // self.page_tokens), jnp.int32),
            jnp.zeros(num_slots, jnp.int32),
            only(DeltaState, self.buffer(num_slots, 1)),
        )

    def buffer_after(self, cache: Cache, num_slots: int, tokens: int) -> Cache:
        return super().buffer_after(cache.states, num_slots, tokens)

    def axes(self, cache: Cache) -> Cache:
        if not isinstance(cache, PagedSlots):
            return super().axes(cache)
        table, shared = ("batch", None), ("batch",)
        of_states = super().axes(cache.states)
        return PagedSlots(super().axes(cache.pool), table, shared, of_states)  # pyright: ignore

    def decoding(self, model: Decoder, cache: PagedSlots, length_B: jax.Array) -> DecodeStep:
        cache = without_routes(cache)
        past = cache if self.gather is None else self.gather(cache, self.axes(cache))
        return super().decoding(model, past, length_B)

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        """In pages, tokens beyond those of a slot are lost."""
        if not isinstance(cache, PagedSlots):
            return super().write(cache, new, start_B, live_B)
        keys, states = only(_PAGED, new), only(DeltaState, new)
        states = write_slots(cache.states, self.axes(cache.states), states, start_B, live_B)
        cache = dataclasses.replace(cache, states=states)
        return written_to_pages(cache, self.axes(cache.pool), keys, start_B, live_B)

    def take(self, cache: PagedSlots, slots: jax.Array) -> Cache:
        """The result is contiguous."""
        return jax.tree.map(
            lambda keys, state: state if keys is None else keys,
            self.take_pages(cache, cache.table[slots]),
            take_slots(cache.states, self.axes(cache.states), slots),
            is_leaf=lambda part: part is None or is_part(part),
        )

    def take_pages(self, cache: PagedSlots, table_Pp: jax.Array) -> Cache:
        """Copies pages, int32 [P, p], one after another into a contiguous cache of P sequences.

        It has no states: a state is that of a whole sequence, not of a beginning.
        """
        return gathered_pages(cache.pool, self.axes(cache.pool), table_Pp)

    def copy(self, cache: PagedSlots, other: Cache, source_B: jax.Array) -> PagedSlots:
        """`other` is contiguous."""
        keys, states = only(_PAGED, other), only(DeltaState, other)
        states = copy_slots(cache.states, self.axes(cache.states), states, source_B)
        cache = dataclasses.replace(cache, states=states)
        return copied_to_pages(cache, self.axes(cache.pool), keys, source_B)

    def routes(self, cache: PagedSlots, slots: jax.Array) -> jax.Array:
        routes = cache.pool[1]
        return gathered_pages(routes, self.axes(routes), cache.table[slots]).expert

    def _first_and_stack(self, cache: PagedSlots) -> tuple[list[Cache], Cache]:
        first, stack = cache.pool
        alone = functools.partial(dataclasses.replace, cache, states=None)
        return [alone(pool=pool) for pool in first], alone(pool=stack)

    def _of_kernel(self, cache: PagedSlots) -> PagedSlots:
        pool = super()._of_kernel(cache.pool)
        return dataclasses.replace(cache, pool=pool, states=None)


def gathered_pages(pool: Any, axes: Any, table_nP: jax.Array) -> Any:
    """The pages of each slot one after another: a contiguous cache of n slots, 0 where a slot has no page."""
    n, P = table_nP.shape
    # Used entries first: the loop ends after them.
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
            return jax.lax.dynamic_update_slice(old, page, starts(at, leaf.ndim))

        return jax.tree.map(one, cache, pool, axes)

    # Page by page: for a gather XLA would copy the pool into another memory layout.
    used = (table_nP > 0).sum()
    return jax.lax.fori_loop(0, used, copy_page, jax.tree.map(empty, pool, axes))


def copied_to_pages(slots: PagedSlots, axes: Any, other: Any, source_n: jax.Array) -> PagedSlots:
    """Writes slot source_n[i] of the contiguous cache `other` to the pages of slot i.

    Slots with a negative source and the shared pages of a slot stay unchanged. The cost grows with the number
    of pages written.

    Args:
      slots: slots that are written.
      axes: logical axes of the pool, and of `other`.
      other: contiguous cache.
      source_n: int32 [n].
    """
    page, capacity = _page_tokens(slots.pool, axes), _page_tokens(other, axes)
    most = -(-capacity // page)
    other = with_capacity(other, axes, most * page)
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
                new = jax.lax.dynamic_slice(new, starts(at, leaf.ndim), sizes)
                return jax.lax.dynamic_update_slice(leaf, new, starts({batch: row_P[p]}, leaf.ndim))

            return jax.tree.map(one, pool, other, axes)

        # Shared pages have their tokens, and other slots read them.
        used = jnp.minimum((row_P > 0).sum(), most)
        return jax.lax.fori_loop(slots.shared[slot], used, copy_page, pool)

    pool = jax.lax.fori_loop(0, (source_n >= 0).sum(), copy_slot, slots.pool)
    return dataclasses.replace(slots, pool=pool)


def written_to_pages(
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
    page = _page_tokens(slots.pool, axes)

    def in_loop(pool: Any, new: Any) -> Any:
        W = _page_tokens(new, axes)
        # W tokens touch at most this many pages, wherever they begin.
        touched = (W + page - 2) // page + 1
        # Tokens beyond the table go to page 0, the scratch page.
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
                # The page may begin before the new tokens or end after them.
                pads = [(page, page) if d == length else (0, 0) for d in range(leaf.ndim)]
                new = jax.lax.dynamic_slice_in_dim(jnp.pad(new, pads), first + page, page, length)
                start = starts({batch: table_nP[slot, place]}, leaf.ndim)
                # Pages are read and written whole: a write of single tokens needs a loop over tokens.
                old = jax.lax.dynamic_slice(leaf, start, new.shape)
                chosen = is_new.reshape([page if d == length else 1 for d in range(leaf.ndim)])
                return jax.lax.dynamic_update_slice(leaf, jnp.where(chosen, new, old), start)

            return jax.tree.map(one, pool, new, axes)

        return jax.lax.fori_loop(0, live_n.sum() * touched, write, pool)

    def places(W: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        number_nW, place_nW = jnp.divmod(start_n[:, None] + jnp.arange(W)[None], page)
        # 0 beyond the table.
        page_nW = jnp.take_along_axis(slots.table, number_nW, axis=1, mode="fill", fill_value=0)
        return page_nW, place_nW, live_n[:, None] & (page_nW > 0)

    pool = written(slots.pool, new, axes, in_loop, places)
    return dataclasses.replace(slots, pool=pool)


def _page_tokens(tree: Any, axes: Any) -> int:
    """The size of the axis "length" of a tree."""
    sizes = jax.tree.map(lambda leaf, names: leaf.shape[names.index("length")], tree, axes)
    return jax.tree.leaves(sizes)[0]
