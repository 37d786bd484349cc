"""The key-value cache as an engine sees it: one protocol, whatever lies behind it.

    prefill       sequences -> a cache of exactly their tokens
    extend        a cache + T tokens on top -> a cache of the T tokens, to be written to the first
    decoding      a cache, only read + a buffer -> one token after another, each put into the buffer;
                  at the end the buffer's tokens are written to the cache
    take, copy, resize                             slots move, and get more room or less

What lies behind: `stacked_cache.py` (one array of all layers), `per_layer_cache.py` (each layer's own). A
cache is a pytree that nobody else looks into; whoever holds it passes it on, pins it by its `axes` and frees
it. Paged caches fit in here and are not written yet: their slots are tables of pages, which `copy` shares.

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

# Keys and values of all layers: a pytree of arrays.
Cache: TypeAlias = Any

# (q_BTQH, k_BTKH, v_BTKH, segment_ids_BT, kind) -> out_BTQH, over whole sequences
Attention: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, AttentionKind], jax.Array
]


class CachePass(NamedTuple):
    """A forward pass over new tokens in which a cache takes part.

    Attributes:
      attend, per_layer, per_row: as `Decoder.__call__` takes them.
      kept: the cache of the new tokens, from what `attend` has returned of all layers.
      layers: runs the stack in the place of `Compute.layers`, if not None.
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
        """Last hidden states [B, T, D] of the new tokens, and a cache of exactly these."""
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


# (buffer, i, active_B) -> the pass of token `i` of a dispatch; idle slots may compute anything.
DecodeStep: TypeAlias = Callable[[Cache, jax.Array, jax.Array], CachePass]


class CacheKind(Protocol):
    """How keys and values are kept and attended to. It holds no arrays.

    Everything may be traced. `write`, `take` and `copy` are run by every device for its own slots.
    """

    @property
    def capacity_multiple(self) -> int:
        """The longest capacity is a multiple of so many tokens."""
        ...

    @property
    def reads_own_length(self) -> bool:
        """Decoding costs what live tokens cost, whatever the capacity, and slots of no length nothing.

        Then one capacity serves a whole run: moving slots between capacities would only hold two caches. A
        paged cache says so too.
        """
        ...

    def empty(self, num_slots: int, capacity: int) -> Cache:
        """A cache of so many slots with room for so many tokens each."""
        ...

    def buffer(self, num_slots: int, tokens: int) -> Cache:
        """Room for the tokens of a dispatch, all slots at the same place of it."""
        ...

    def axes(self, cache: Cache) -> Cache:
        """Logical axes of every leaf of a cache or a buffer; slots are "batch"."""
        ...

    # Forward passes

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """T tokens that have no past."""
        ...

    def extend(self, model: Decoder, cache: Cache, length_B: jax.Array) -> CachePass:
        """T tokens on top of `length_B` cached ones."""
        ...

    def decoding(self, model: Decoder, cache: Cache, length_B: jax.Array) -> DecodeStep:
        """One token per slot at a time, on top of `length_B` cached ones and those in the buffer.

        Called outside of the loop over tokens, its result inside: the cache itself is not written meanwhile.
        """
        ...

    # Tokens written, slots moved

    def put(self, buffer: Cache, new: Cache, i: jax.Array) -> Cache:
        """The buffer with token `i` of all slots."""
        ...

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        """The cache with all tokens of `new`, written at `start_B` of live slots, which must have room.

        `new` is a buffer, or what a pass has given.
        """
        ...

    def take(self, cache: Cache, slots: jax.Array) -> Cache:
        """Some slots, int32, of a cache."""
        ...

    def copy(self, cache: Cache, other: Cache, source_B: jax.Array) -> Cache:
        """The cache with slot i replaced by slot `source_B[i]` of `other`, unless that is negative.

        Capacities may differ; what is copied must fit.
        """
        ...

    def resize(self, cache: Cache, capacity: int) -> Cache:
        """The cache with more room, or with less for all slots."""
        ...


def cache_bytes(kind: CacheKind, num_slots: int, capacity: int) -> int:
    """Bytes of a cache of so many slots and tokens, over all devices."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: kind.empty(num_slots, capacity)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
