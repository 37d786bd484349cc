"""The interface of key-value caches.

    prefill              sequences -> a cache of exactly their tokens
    extend               a cache, T new tokens -> a cache of the new tokens, which `write` adds to the first
    decoding             a cache (read only), a buffer -> one token at a time, each put into the buffer; at
                         the end `write` adds the buffer to the cache
    take, copy, resize   move slots, change their capacity

Implementations: `contiguous_cache.py` (slots are rows of arrays) and `paged_cache.py` (slots are tables of
pages). A cache is a pytree whose content only its `CacheKind`
knows. The engine passes it on, shards it by its `axes`, and frees it. Slots, prefixes and buffers may be
different trees.

    B slots, each with one sequence   T new tokens   W tokens of a dispatch   C capacity in tokens
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

from jaxrl.models.attention_kind import AttentionKind
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import Attend, Decoder

# A pytree of arrays: the keys and values of all layers.
Cache: TypeAlias = Any

# (q_BTQH, k_BTKH, v_BTKH, segment_ids_BT, kind) -> out_BTQH, over whole sequences
Attention: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, AttentionKind], jax.Array
]


class CachePass(NamedTuple):
    """A forward pass over new tokens with a cache.

    Attributes:
      attend, per_layer, per_row: arguments of `Decoder.__call__`.
      kept: (second results of `attend`, of all layers) -> the cache of the new tokens.
      layers: function that runs the stack; None for `Compute.layers`.
    """

    attend: Attend
    per_layer: Any
    per_row: Any
    kept: Callable[[Any], Cache]
    layers: Callable[..., Any] | None = None

    def run(
        self,
        model: Decoder,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        live_BT: jax.Array,
        compute: Compute,
    ) -> tuple[jax.Array, Cache]:
        """Runs the pass; returns the last hidden states [B, T, D] of the new tokens, and their cache."""
        if self.layers is not None:
            compute = dataclasses.replace(compute, layers=self.layers)
        out = model(
            tokens_BT,
            positions_BT,
            self.attend,
            compute=compute,
            per_layer=self.per_layer,
            per_row=self.per_row,
            live_BT=live_BT,
        )
        return out.hidden_BTD, self.kept(out.layer_out)


# (buffer, i, active_B) -> the pass for token `i` of a dispatch. Results of inactive slots are not used.
DecodeStep: TypeAlias = Callable[[Cache, jax.Array, jax.Array], CachePass]


class CacheKind(Protocol):
    """A way to store keys and values and to attend to them. It holds no arrays itself.

    All methods can be traced. `write`, `take` and `copy` run on every device for its own slots.
    """

    @property
    def capacity_multiple(self) -> int:
        """The longest capacity must be a multiple of this number of tokens."""
        ...

    @property
    def reads_own_length(self) -> bool:
        """Whether the cost of decoding depends on the lengths of slots only, not on the capacity.

        If True, one capacity serves a whole run: moving slots between capacities would save nothing and need
        memory for two caches.
        """
        ...

    def empty(self, num_slots: int, capacity: int) -> Cache:
        """An empty cache with `num_slots` slots of `capacity` tokens."""
        ...

    def buffer(self, num_slots: int, tokens: int) -> Cache:
        """An empty buffer for the tokens of a dispatch. All slots write to the same position of it."""
        ...

    def axes(self, cache: Cache) -> Cache:
        """The logical axes of every leaf of a cache or buffer; "batch" counts slots."""
        ...

    # Forward passes

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """The pass for T tokens without a past."""
        ...

    def extend(self, model: Decoder, cache: Cache, length_B: jax.Array) -> CachePass:
        """The pass for T tokens after `length_B` cached ones."""
        ...

    def decoding(self, model: Decoder, cache: Cache, length_B: jax.Array) -> DecodeStep:
        """The passes for one token per slot at a time, after `length_B` cached tokens and the buffer.

        Call this outside of the loop over tokens, and its result inside. The loop does not write the cache.
        """
        ...

    # Tokens written, slots moved

    def put(self, buffer: Cache, new: Cache, i: jax.Array) -> Cache:
        """Writes token `i` of all slots to the buffer."""
        ...

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        """Writes all tokens of `new`, a buffer or the result of a pass, to live slots at position `start_B`.

        Live slots must have room for them.
        """
        ...

    def take(self, cache: Cache, slots: jax.Array) -> Cache:
        """Takes the slots with the given numbers, int32, from a cache, as a prefix."""
        ...

    def copy(self, cache: Cache, other: Cache, source_B: jax.Array) -> Cache:
        """Replaces slot i by slot `source_B[i]` of `other`, unless that number is negative.

        Capacities may differ, but the tokens must fit.
        """
        ...

    def resize(self, cache: Cache, capacity: int) -> Cache:
        """Changes the capacity of all slots."""
        ...


def cache_bytes(kind: CacheKind, num_slots: int, capacity: int) -> int:
    """Bytes of a cache with the given slots and capacity, over all devices."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: kind.empty(num_slots, capacity)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
