"""A cache whose slots share one pool of pages: memory is taken by tokens, not by slots times the longest.

    pool [L, pages, K, page, H]   table [n, P]   buffer [L, n, K, W, H]   prefix [L, n, K, C, H]

Prefixes and the buffer of a dispatch are contiguous caches of another kind. A dispatch reads the pages, by a
kernel that follows the table or by gathering them once, and appends the buffer to them at its end.

    n slots   P pages of a slot   L layers   K kv heads   H head size   W tokens of a dispatch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxrl.models.cache import page_moves
from jaxrl.models.cache.interface import Attention, Cache, CacheKind, CachePass, DecodeStep
from jaxrl.models.cache.page_moves import PagedSlots
from jaxrl.models.decoder import Decoder

# (slots, logical axes of their arrays) -> the contiguous cache that they hold
Gather: TypeAlias = Callable[[PagedSlots, PagedSlots], Cache]


@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Slots are `PagedSlots`; prefixes and buffers are caches of the kind `contiguous`.

    Attributes:
      contiguous: kind of prefixes, buffers and, with other sizes, of the pool. Without `gather` its kernel
        must take `PagedSlots`.
      page_tokens: number of tokens of a page.
      num_pages: number of pages, over all devices that share the slots.
      gather: function that gathers the pages of all slots before each dispatch; None if a kernel follows the
        table.
    """

    contiguous: CacheKind
    page_tokens: int
    num_pages: int
    gather: Gather | None

    @property
    def capacity_multiple(self) -> int:
        """Tokens of a page."""
        return self.page_tokens

    @property
    def reads_own_length(self) -> bool:
        """True: a slot has as many pages as its sequence needs."""
        return True

    def empty(self, num_slots: int, capacity: int) -> PagedSlots:
        """See `CacheKind.empty`. The pool has `num_pages` pages for any number of slots."""
        return PagedSlots(
            self.contiguous.empty(self.num_pages, self.page_tokens),
            jnp.zeros((num_slots, capacity // self.page_tokens), jnp.int32),
            jnp.zeros(num_slots, jnp.int32),
        )

    def buffer(self, num_slots: int, tokens: int) -> Cache:
        """See `CacheKind.buffer`."""
        return self.contiguous.buffer(num_slots, tokens)

    def axes(self, cache: Cache) -> Cache:
        """See `CacheKind.axes`."""
        if not isinstance(cache, PagedSlots):
            return self.contiguous.axes(cache)
        table, shared = ("batch", None), ("batch",)
        return PagedSlots(self.contiguous.axes(cache.pool), table, shared)  # pyright: ignore

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """See `CacheKind.prefill`."""
        return self.contiguous.prefill(attention, segment_ids_BT)

    def extend(self, model: Decoder, cache: Cache, length_B: jax.Array) -> CachePass:
        """See `CacheKind.extend`; for prefixes only."""
        return self.contiguous.extend(model, cache, length_B)

    def decoding(self, model: Decoder, cache: PagedSlots, length_B: jax.Array) -> DecodeStep:
        """See `CacheKind.decoding`."""
        past = cache if self.gather is None else self.gather(cache, self.axes(cache))
        return self.contiguous.decoding(model, past, length_B)

    def put(self, buffer: Cache, new: Cache, i: jax.Array) -> Cache:
        """See `CacheKind.put`."""
        return self.contiguous.put(buffer, new, i)

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        """See `CacheKind.write`. In pages, tokens beyond those of a slot are lost."""
        if not isinstance(cache, PagedSlots):
            return self.contiguous.write(cache, new, start_B, live_B)
        return page_moves.written(cache, self.contiguous.axes(cache.pool), new, start_B, live_B)

    def take(self, cache: PagedSlots, slots: jax.Array) -> Cache:
        """See `CacheKind.take`; the result is contiguous."""
        return self.take_pages(cache, cache.table[slots])

    def take_pages(self, cache: PagedSlots, table_Pp: jax.Array) -> Cache:
        """Copies pages, int32 [P, p], one after another into a contiguous cache of P sequences."""
        return page_moves.gathered(cache.pool, self.contiguous.axes(cache.pool), table_Pp)

    def copy(self, cache: PagedSlots, other: Cache, source_B: jax.Array) -> PagedSlots:
        """See `CacheKind.copy`; `other` is contiguous."""
        return page_moves.copied(cache, self.contiguous.axes(cache.pool), other, source_B)

    def resize(self, cache: Cache, capacity: int) -> Cache:
        """See `CacheKind.resize`; for prefixes only."""
        return self.contiguous.resize(cache, capacity)
