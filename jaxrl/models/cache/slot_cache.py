"""Caches with contiguous slots, each as long as the longest possible sequence."""

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
    """Moves slots of a tree of `KVCache`s.

    Attributes:
      shape: sizes and types of the caches.
    """

    shape: CacheShape

    @property
    def capacity_multiple(self) -> int:
        """Any capacity is allowed."""
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
        """A pass over whole sequences in a scan over layers, which stacks the caches of the layers."""

        def attend(q, k, v, kind, _, segment_ids) -> tuple[jax.Array, Any]:
            return attention(q, k, v, segment_ids, kind), self.shape.holding(k, v)

        return CachePass(attend, None, segment_ids_BT, kept=lambda stacked: stacked)

    def _attend_chunk(self, q, k, v, kind, layer, length_B) -> tuple[jax.Array, KVCache]:
        """Attention of T new tokens to their past and to each other, in one layer."""
        out_BTQH = extending_attention(q, k, v, layer, length_B, kind=kind)
        return out_BTQH, self.shape.holding(k, v)

    def _attend_token(
        self, q_B1QH, k_B1KH, v_B1KH, kind, caches, lengths
    ) -> tuple[jax.Array, KVCache]:
        """Attention of one new token to its past and to the buffer, in one layer."""
        q, k, v = q_B1QH[:, 0], k_B1KH[:, 0], v_B1KH[:, 0]
        out_BQH = cached_attention(q, k, v, tuple(zip(caches, lengths, strict=True)), kind=kind)
        return out_BQH[:, None], self.shape.holding(k_B1KH, v_B1KH)
