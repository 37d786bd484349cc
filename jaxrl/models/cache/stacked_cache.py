"""A cache with one array for all layers, for scans over layers and for kernels that index layers by number.

B slots   L layers   Q query heads   K kv heads   H head size   C capacity
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxrl.models.cache.cached_attention import PartialAttention, cached_attention
from jaxrl.models.cache.interface import Attention, CachePass, DecodeStep
from jaxrl.models.cache.kv_cache import KVCache, put_token
from jaxrl.models.cache.page_moves import PagedSlots
from jaxrl.models.cache.slot_cache import SlotCache
from jaxrl.models.decoder import Decoder

# (q_BQH, cache of L layers, layer, length_B) -> attention to that layer's part of the cache
PastAttention: TypeAlias = Callable[
    [jax.Array, KVCache | PagedSlots, jax.Array, jax.Array], PartialAttention
]

# Kernels read a cache page by page, so the longest capacity must consist of whole pages.
_PAGE = 128


@dataclasses.dataclass(frozen=True)
class StackedCache(SlotCache):
    """Caches [L, B, ..].

    Attributes:
      kernel: attention to the past in decoding; None for XLA.
      by_number: pass the whole stack and the number of the layer to the kernel, which copies nothing. False,
        as in a pipeline, passes the slice of the layer.
    """

    kernel: PastAttention | None = None
    by_number: bool = True

    @property
    def capacity_multiple(self) -> int:
        """Tokens of a page if there is a kernel."""
        return 1 if self.kernel is None else _PAGE

    @property
    def reads_own_length(self) -> bool:
        """True with a kernel, which reads pages only up to the length of a slot."""
        return self.kernel is not None

    def empty(self, num_slots: int, capacity: int) -> KVCache:
        """See `CacheKind.empty`."""
        return self.shape.empty(num_slots, capacity)

    def buffer(self, num_slots: int, tokens: int) -> KVCache:
        """See `CacheKind.buffer`."""
        return self.shape.empty(num_slots, tokens)

    def put(self, buffer: KVCache, new: KVCache, i: jax.Array) -> KVCache:
        """See `CacheKind.put`."""
        return put_token(buffer, new, i)

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """See `CacheKind.prefill`."""
        return self._whole(attention, segment_ids_BT)

    def extend(self, model: Decoder, cache: KVCache, length_B: jax.Array) -> CachePass:
        """See `CacheKind.extend`."""
        del model
        return CachePass(self._attend_chunk, cache, length_B, kept=_same)

    def decoding(self, model: Decoder, cache: KVCache, length_B: jax.Array) -> DecodeStep:
        """See `CacheKind.decoding`."""
        del model
        if self.kernel is None:
            return lambda buffer, i, _: CachePass(
                self._attend_token, (cache, buffer), (length_B, jnp.full_like(length_B, i)), _same
            )
        return self._decoding_by_kernel(self.kernel, cache, length_B)

    def _decoding_by_kernel(
        self, kernel: PastAttention, cache: KVCache, length_B: jax.Array
    ) -> DecodeStep:
        past = cache
        if self.by_number:
            numbers_L = jnp.arange(self.shape.num_layers)
            past = jnp.broadcast_to(numbers_L[:, None], (len(numbers_L), len(length_B)))

        def attend(q_B1QH, k_B1KH, v_B1KH, kind, layer, lengths):
            q, k, v = q_B1QH[:, 0], k_B1KH[:, 0], v_B1KH[:, 0]
            (past, recent), (past_length_B, recent_length_B) = layer, lengths
            if self.by_number:
                of_past = kernel(q, cache, past[0], past_length_B)
            else:
                stack = jax.tree.map(lambda leaf: leaf[None], past)
                of_past = kernel(q, stack, jnp.int32(0), past_length_B)
            out_BQH = cached_attention(q, k, v, [(recent, recent_length_B)], of_past, kind=kind)
            return out_BQH[:, None], self.shape.holding(k_B1KH, v_B1KH)

        def step(buffer: KVCache, i: jax.Array, active_B: jax.Array) -> CachePass:
            # Inactive slots get length 0: the kernel then reads nothing for them, and their results are
            # unused.
            lengths = (jnp.where(active_B, length_B, 0), jnp.full_like(length_B, i))
            return CachePass(attend, (past, buffer), lengths, _same)

        return step


def _same(new: KVCache) -> KVCache:
    """The identity: the scan has already stacked the layers."""
    return new
