"""Caches in which a slot is a run of memory, as long as the longest sequence may become."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxrl.models.cache import slot_moves
from jaxrl.models.cache.cached_attention import cached_attention, extending_attention
from jaxrl.models.cache.interface import Attention, Cache, CachePass
from jaxrl.models.cache.kv_cache import CacheShape, KVCache, cache_axes


@dataclasses.dataclass(frozen=True)
class SlotCache:
    """Moves slots of a tree whose parts are `KVCache`s.

    Attributes:
      shape: of the caches.
    """

    shape: CacheShape

    @property
    def capacity_multiple(self) -> int:
        """Any number of tokens will do."""
        return 1

    def axes(self, cache: Cache) -> Cache:
        """See `CacheKind.axes`."""
        return jax.tree.map(cache_axes, cache, is_leaf=lambda part: isinstance(part, KVCache))

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        """See `CacheKind.write`."""
        return slot_moves.written(cache, self.axes(cache), new, start_B, live_B)

    def take(self, cache: Cache, slots: jax.Array) -> Cache:
        """See `CacheKind.take`."""
        return slot_moves.taken(cache, self.axes(cache), slots)

    def copy(self, cache: Cache, other: Cache, source_B: jax.Array) -> Cache:
        """See `CacheKind.copy`."""
        return slot_moves.copied(cache, self.axes(cache), other, source_B)

    def resize(self, cache: Cache, capacity: int) -> Cache:
        """See `CacheKind.resize`."""
        return slot_moves.with_capacity(cache, self.axes(cache), capacity)

    def _whole(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """A pass over whole sequences whose layers are scanned, which stacks what each has kept."""

        def attend(q, k, v, kind, _, segment_ids) -> tuple[jax.Array, Any]:
            return attention(q, k, v, segment_ids, kind), self.shape.holding(k, v)

        return CachePass(attend, None, segment_ids_BT, kept=lambda stacked: stacked)

    def _attend_chunk(self, q, k, v, kind, layer, length_B) -> tuple[jax.Array, KVCache]:
        """T tokens of a layer, to its past and each other."""
        out_BTQH = extending_attention(q, k, v, layer, length_B, kind=kind)
        return out_BTQH, self.shape.holding(k, v)

    def _attend_token(
        self, q_B1QH, k_B1KH, v_B1KH, kind, caches, lengths
    ) -> tuple[jax.Array, KVCache]:
        """One token of a layer, to its past and its part of the buffer."""
        q, k, v = q_B1QH[:, 0], k_B1KH[:, 0], v_B1KH[:, 0]
        out_BQH = cached_attention(q, k, v, tuple(zip(caches, lengths, strict=True)), kind=kind)
        return out_BQH[:, None], self.shape.holding(k_B1KH, v_B1KH)
