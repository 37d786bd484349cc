"""A way to store keys and values, and the forward passes that write and read them.

    prefill              sequences -> a cache of exactly their tokens
    extend               a cache, T new tokens -> a cache of the new tokens, which `write` adds to the first
    decoding             a cache (read only), a buffer -> one token at a time, each put into the buffer; at
                         the end `write` adds the buffer to the cache
    take, copy, resize   move slots, change their capacity

A cache is a pytree whose content only its `CacheKind` knows. The engine passes it on, shards it by its
`axes`, and frees it. Slots, prefixes and buffers may be different trees. Here all of them are contiguous,
each slot as long as the longest possible sequence; in `paged_cache.py` slots are tables of pages.

[L, B, ..]        one array for all layers: for scans over layers, stages of a pipeline, and kernels that
                  index layers by number
L times [B, ..]   an array for each layer, and a Python loop over layers: for shallow models on CPU, where
                  a scan copies the slice of the cache, and of the weights, for every layer; and for buffers
                  that a kernel writes

With periods of several layers each of these is a list of the places in one, and "layers" are periods. A place
has keys and values, of its own head size, or a `DeltaState`. A `DeltaState` has no length: cache and buffer
hold the state after the last token.
With first dense layers a cache is a list of two: a list of the arrays of these layers, and one of the above.
If the routes of a mixture are kept, it is a list of all this and `Routes`.

B slots, each with one sequence   T new tokens   W tokens of a dispatch   C capacity in tokens   L layers
Q query heads   K kv heads   H head size
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl.models.attention_kind import AttentionKind
from jaxrl.models.cache.cached_attention import (
    cached_attention,
    extending_attention,
)
from jaxrl.models.cache.kv_cache import (
    CacheShape,
    KVCache,
    PagedSlots,
    Routes,
    cache_axes,
    copy_slots,
    is_part,
    only,
    put_token,
    take_slots,
    with_capacity,
    without_routes,
    write_slots,
)
from jaxrl.models.compute import Compute, LayerFunction, entry, scan_layers
from jaxrl.models.decoder import Attend, Decoder
from jaxrl.models.delta_net import DeltaInputs, DeltaState, Recur, delta_after, delta_of_rows

# A pytree of arrays: the keys and values of all layers.
Cache: TypeAlias = Any

# (q_BTQH, k_BTKH, v_BTKH, segment_ids_BT, kind) -> out_BTQH, over whole sequences
Attention: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, AttentionKind], jax.Array
]

# The arguments and the results of `decode_attention`; one that does not write has a buffer of L layers, and
# returns attention alone.
PastAttention: TypeAlias = Callable[..., Any]

# Kernels read a cache page by page, so the longest capacity must consist of whole pages.
_PAGE = 128


class CachePass(NamedTuple):
    """A forward pass over new tokens with a cache.

    Attributes:
      attend, per_layer, per_row, recur: arguments of `Decoder.__call__`.
      kept: (second results of `attend`, of all layers) -> the cache of the new tokens.
      layers: function that runs the stack; None for `Compute.layers`.
      absorbs: whether `attend` attends to a cache, see `Compute.absorbs`.
      keeps_routes: whether the cache has `Routes`.
    """

    attend: Attend
    per_layer: Any
    per_row: Any
    kept: Callable[[Any], Cache] = lambda new: new
    layers: Callable[..., Any] | None = None
    recur: Recur = delta_of_rows
    absorbs: bool = False
    keeps_routes: bool = False

    def run(
        self,
        model: Decoder,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        live_BT: jax.Array,
        compute: Compute,
    ) -> tuple[jax.Array, Cache]:
        """Runs the pass; returns the last hidden states [B, T, D] of the new tokens, and their cache."""
        compute = dataclasses.replace(compute, absorbs=self.absorbs, keeps_routes=self.keeps_routes)
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
            recur=self.recur,
        )
        cache = self.kept(out.layer_out)
        if self.keeps_routes:
            assert out.routing is not None and out.routing.expert is not None, "a mixture has some"
            cache = [cache, Routes(out.routing.expert)]
        return out.hidden_BTD, cache


# (buffer, i, active_B) -> the pass for token `i` of a dispatch. Results of inactive slots are not used.
DecodeStep: TypeAlias = Callable[[Cache, jax.Array, jax.Array], CachePass]


@dataclasses.dataclass(frozen=True)
class CacheKind:
    """Slots are rows of a `KVCache` of all layers or, with `unrolled`, of a list of L of them.

    It holds no arrays itself. All methods can be traced. `write`, `take` and `copy` run on every device for
    its own slots. A list and not a tuple: in a tree of logical axes a tuple is a leaf, the axes of one array.

    Attributes:
      shape: sizes and types of the caches.
      unrolled: whether each layer has arrays of its own.
      kernel: attention in decoding; None for XLA, as for unrolled layers.
      writes: whether the kernel adds the new token to the buffer.
      by_number: pass the whole stack and the number of the layer to the kernel, which copies nothing. False,
        as in a pipeline, passes the slice of the layer.
    """

    shape: CacheShape
    unrolled: bool = False
    kernel: PastAttention | None = None
    by_number: bool = True
    writes: bool = False

    @property
    def lists_buffers(self) -> bool:
        """Whether the buffer of a dispatch is a list of layers, and a pass returns it with its token.

        Out of a stack XLA would copy each layer for the kernel, and back.
        """
        return self.writes and self.by_number

    @property
    def capacity_multiple(self) -> int:
        """The longest capacity must be a multiple of this number of tokens."""
        return 1 if self.kernel is None else _PAGE

    @property
    def reads_own_length(self) -> bool:
        """Whether the cost of decoding depends on the lengths of slots only, not on the capacity.

        If True, one capacity serves a whole run: moving slots between capacities would save nothing and need
        memory for two caches. A kernel reads pages only up to the length of a slot.
        """
        return self.kernel is not None

    def empty(self, num_slots: int, capacity: int) -> Cache:
        """An empty cache with `num_slots` slots of `capacity` tokens."""
        return self.buffer(num_slots, capacity)

    def buffer(self, num_slots: int, tokens: int) -> Cache:
        """An empty buffer for the tokens of a dispatch. All slots write to the same position of it."""
        shape = self.shape
        if self.unrolled:
            stack = [shape.empty((num_slots,), tokens) for _ in range(shape.num_layers)]
        else:
            stack = shape.empty((shape.num_layers, num_slots), tokens)
        first = [shape.empty((num_slots,), tokens) for _ in range(shape.first_layers)]
        cache = [first, stack] if first else stack
        if shape.routes is None:
            return cache
        layers, experts = shape.routes
        return [cache, Routes(jnp.zeros((layers, num_slots, tokens, experts), jnp.int16))]

    def _pass(self, *arguments: Any, **further: Any) -> CachePass:
        return CachePass(*arguments, keeps_routes=self.shape.routes is not None, **further)

    def buffer_after(self, cache: Cache, num_slots: int, tokens: int) -> Cache:
        """An empty buffer with the states of a cache, which decoding goes on from."""
        return jax.tree.map(
            lambda new, past: past if isinstance(new, DeltaState) else new,
            self.buffer(num_slots, tokens),
            cache,
            is_leaf=is_part,
        )

    def apart(self, cache: Cache) -> Cache:
        """The cache with a list of layers in place of their stack."""
        return self._changed(
            cache, lambda stack: [entry(stack, i) for i in range(self.shape.num_layers)]
        )

    def stacked(self, cache: Cache) -> Cache:
        """The inverse of `apart`."""
        return self._changed(
            cache, lambda layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        )

    def _changed(self, cache: Cache, change: Callable[[Cache], Cache]) -> Cache:
        keys = without_routes(cache)
        new = [keys[0], change(keys[1])] if self.shape.first_layers else change(keys)
        return new if keys is cache else [new, cache[1]]

    def axes(self, cache: Cache) -> Cache:
        """The logical axes of every leaf of a cache or buffer; "batch" counts slots."""
        return jax.tree.map(cache_axes, cache, is_leaf=is_part)

    # Forward passes

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """The pass for T tokens without a past: a scan over layers, which stacks the caches of the layers."""

        def attend(q, k, v, kind, _, segment_ids, latents=None) -> tuple[jax.Array, Any]:
            cached = self.shape.holding(k if latents is None else latents, v)
            return attention(q, k, v, segment_ids, kind), cached

        def recur(inputs: DeltaInputs, *_) -> tuple[jax.Array, DeltaState]:
            return delta_after(inputs, self.shape.no_past((len(inputs.live),)))

        kept = self.apart if self.unrolled else lambda new: new
        return self._pass(attend, None, segment_ids_BT, kept, recur=recur)

    def extend(self, model: Decoder, cache: Cache, length_B: jax.Array) -> CachePass:
        """The pass for T tokens after `length_B` cached ones."""

        def attend(q, k, v, kind, layer, length_B) -> tuple[jax.Array, KVCache]:
            out_BTQH = extending_attention(q, k, v, layer, length_B, kind=kind)
            return out_BTQH, self.shape.holding(k, v)

        def recur(inputs: DeltaInputs, state: DeltaState, _) -> tuple[jax.Array, DeltaState]:
            return delta_after(inputs, state)

        layers, keys = self._layers(model, self.unrolled), without_routes(cache)
        return self._pass(attend, keys, length_B, layers=layers, recur=recur, absorbs=True)

    def decoding(self, model: Decoder, cache: Cache, length_B: jax.Array) -> DecodeStep:
        """The passes for one token per slot at a time, after `length_B` cached tokens and the buffer.

        Call this outside of the loop over tokens, and its result inside. The loop does not write the cache.
        """
        cache = without_routes(cache)
        apart, kernel, past = self.unrolled or self.lists_buffers, self.kernel, cache
        layers = self._layers(model, apart)
        by_number = kernel is not None and self.by_number
        if by_number and not apart:
            layers = self._joined_layers(model)
        if by_number:
            count, period = (
                self.shape.num_layers,
                self.shape.periodic and self.shape.periodic.period,
            )
            # One place of a period has attention, so that a number tells which layer it is.
            places = lambda number: [number] * period if period else number  # noqa: E731
            numbers = jnp.arange(count)
            past = [places(n) for n in numbers] if self.lists_buffers else places(numbers)
            if period:
                cache = self._of_kernel(cache)
            elif self.shape.first_layers:
                first, cache = self._first_and_stack(cache)
                past = [first, past]

        def attend(buffers, q_B1QH, k_B1KH, v_B1KH, kind, caches, lengths) -> tuple[jax.Array, Any]:
            q, k, v = q_B1QH[:, 0], k_B1KH[:, 0], v_B1KH[:, 0]
            newest = self.shape.holding(k_B1KH, v_B1KH)
            if kernel is None:
                to_read = tuple(zip(caches, lengths, strict=True))
                return cached_attention(q, k, v, to_read, kind=kind)[:, None], newest
            (past, buffer), (past_length_B, used_B) = caches, lengths
            if isinstance(past, jax.Array):
                given, stack = (q, cache, past), buffers
            else:
                given, stack = (q, _stack_of_one(past), jnp.int32(0)), _stack_of_one(buffer)
            stack = buffer if self.writes else stack
            out = kernel(*given, past_length_B, k, v, stack, used_B, kind)
            out_BQH, buffer = out if self.writes else (out, None)
            return out_BQH[:, None], buffer if self.lists_buffers else newest

        def recur(inputs: DeltaInputs, caches, _) -> tuple[jax.Array, DeltaState]:
            return delta_after(inputs, caches[1])

        def pair(past: Cache, buffer: Cache) -> Any:
            """What each layer reads: its past and buffer, or its state in the buffer."""
            if self.shape.periodic is None:
                return past, buffer
            return [
                (None, new) if isinstance(new, DeltaState) else (old, new)
                for old, new in zip(past, buffer, strict=True)
            ]

        pairs = (lambda *both: [*map(pair, *both)]) if apart else pair

        def step(buffer: Cache, i: jax.Array, active_B: jax.Array) -> CachePass:
            buffer = without_routes(buffer)
            # Inactive slots get length 0: a kernel then reads nothing for them, and their results are unused.
            past_length_B = length_B if kernel is None else jnp.where(active_B, length_B, 0)
            lengths = (past_length_B, jnp.full_like(length_B, i))
            if self.shape.first_layers:
                first = [*zip(past[0], buffer[0], strict=True)]
                caches = [first, pairs(past[1], buffer[1])]
            else:
                caches = pairs(past, buffer)
            of_stack = None
            if by_number and not self.writes:
                # The kernel gets the whole stack, too.
                stack = buffer[1] if self.shape.first_layers else buffer
                of_stack = CacheKind._of_kernel(self, stack)
            by_layer = functools.partial(attend, of_stack)
            return self._pass(by_layer, caches, lengths, layers=layers, recur=recur, absorbs=True)

        return step

    def _of_kernel(self, cache: Cache) -> Any:
        """The keys and values of the only place of a period that has some."""
        (part,) = jax.tree.leaves(only(KVCache, cache), is_leaf=is_part)
        return part

    def _first_and_stack(self, cache: Cache) -> tuple[list[Cache], Cache]:
        """The caches of each of the first dense layers, and that of the stack."""
        return tuple(cache)

    def _layers(self, model: Decoder, apart: bool) -> Callable[..., Any] | None:
        """A replacement for `models.compute.scan_layers` if what layers get is `apart`; else None.

        Its `per_layer` and its results per layer are sequences of L trees. It ignores the stacked weights
        that it gets, but not what is beside them: they are split here, once. A loop over tokens would split
        them for each token.
        """
        if not apart:
            return None
        layers = model.layers_apart(None)

        def run(
            layer: LayerFunction,
            x_BTD: jax.Array,
            stacked: Any,
            per_layer: Any,
            per_row: Any,
            *,
            unroll: int,
        ) -> tuple[jax.Array, tuple[Any, Any]]:
            del unroll
            if not isinstance(stacked, list):
                stacked = [
                    (weights, entry(stacked[1], i) if flags is None else flags)
                    for i, (weights, flags) in enumerate(layers)
                ]
            outs, sums = [], []
            for own, layer_in in zip(stacked, per_layer, strict=True):
                x_BTD, (out, of_rows) = layer(x_BTD, own, layer_in, per_row)
                outs.append(out)
                sums.append(of_rows)
            return x_BTD, (outs, sums)

        return run

    def _joined_layers(self, model: Decoder) -> Callable[..., Any] | None:
        """`models.compute.scan_layers` over weights whose vectors are joined here, once; None for lists."""
        if (joined := model.vectors_joined()) is None:
            return None
        stacks, weights_of = joined

        def run(layer, x_BTD, stacked, *rest, unroll):
            def of_joined(x_BTD, own, layer_in, per_row):
                own, beside = own
                return layer(x_BTD, (weights_of(own), beside), layer_in, per_row)

            return scan_layers(of_joined, x_BTD, (stacks, stacked[1]), *rest, unroll=unroll)

        return run

    # Tokens written, slots moved

    def routes(self, cache: Cache, slots: jax.Array) -> jax.Array:
        """The routes of slots, int16 [L, n, C, A]."""
        routes = cache[1]
        return take_slots(routes, self.axes(routes), slots).expert

    def put(self, buffer: Cache, new: Cache, i: jax.Array) -> Cache:
        """Writes token `i` of all slots to the buffer; with `lists_buffers` attention has done so."""
        written = KVCache if self.lists_buffers else ()
        put = lambda old, one: one if isinstance(one, written) else put_token(old, one, i)  # noqa: E731
        return jax.tree.map(put, buffer, new, is_leaf=is_part)

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        """Writes all tokens of `new`, a buffer or the result of a pass, to live slots at position `start_B`.

        Live slots must have room for them.
        """
        return write_slots(cache, self.axes(cache), new, start_B, live_B)

    def take(self, cache: Cache, slots: jax.Array) -> Cache:
        """Takes the slots with the given numbers, int32, from a cache, as a prefix."""
        return take_slots(cache, self.axes(cache), slots)

    def copy(self, cache: Cache, other: Cache, source_B: jax.Array) -> Cache:
        """Replaces slot i by slot `source_B[i]` of `other`, unless that number is negative.

        Capacities may differ, but the tokens must fit.
        """
        return copy_slots(cache, self.axes(cache), other, source_B)

    def resize(self, cache: Cache, capacity: int) -> Cache:
        """Changes the capacity of all slots."""
        return with_capacity(cache, self.axes(cache), capacity)


def _stack_of_one(layer: KVCache | PagedSlots) -> KVCache | PagedSlots:
    """The cache of one layer as a stack, for kernels."""
    if isinstance(layer, PagedSlots):
        return dataclasses.replace(layer, pool=_stack_of_one(layer.pool))
    return jax.tree.map(lambda leaf: leaf[None], layer)


def cache_bytes(kind: CacheKind, num_slots: int, capacity: int) -> int:
    """Bytes of a cache with the given slots and capacity, over all devices."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: kind.empty(num_slots, capacity)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
