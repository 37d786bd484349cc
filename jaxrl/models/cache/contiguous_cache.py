"""A cache with contiguous slots, each as long as the longest possible sequence.

[L, B, ..]        one array for all layers: for scans over layers, stages of a pipeline, and kernels that
                  index layers by number
L times [B, ..]   an array for each layer, and a Python loop over layers: for shallow models on CPU, where
                  a scan copies the slice of the cache, and of the weights, for every layer

B slots   L layers   Q query heads   K kv heads   H head size   C capacity
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.cache.cached_attention import (
    PartialAttention,
    cached_attention,
    extending_attention,
)
from jaxrl.models.cache.interface import Attention, Cache, CachePass, DecodeStep
from jaxrl.models.cache.kv_cache import (
    CacheShape,
    KVCache,
    PagedSlots,
    cache_axes,
    copy_slots,
    put_token,
    take_slots,
    with_capacity,
    write_slots,
)
from jaxrl.models.compute import LayerFunction
from jaxrl.models.decoder import Decoder, Params

# (q_BQH, cache of L layers, layer, length_B) -> attention to that layer's part of the cache
PastAttention: TypeAlias = Callable[
    [jax.Array, KVCache | PagedSlots, jax.Array, jax.Array], PartialAttention
]

# Kernels read a cache page by page, so the longest capacity must consist of whole pages.
_PAGE = 128


@dataclasses.dataclass(frozen=True)
class ContiguousCache:
    """A `KVCache` of all layers or, with `unrolled`, a list of L of them.

    A list and not a tuple: in a tree of logical axes a tuple is a leaf, the axes of one array.

    Attributes:
      shape: sizes and types of the caches.
      unrolled: whether each layer has arrays of its own.
      kernel: attention to the past in decoding; None for XLA, as for unrolled layers.
      by_number: pass the whole stack and the number of the layer to the kernel, which copies nothing. False,
        as in a pipeline, passes the slice of the layer.
    """

    shape: CacheShape
    unrolled: bool = False
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

    def empty(self, num_slots: int, capacity: int) -> Cache:
        if not self.unrolled:
            return self.shape.empty(num_slots, capacity)
        return [self.shape.empty_layer(num_slots, capacity) for _ in range(self.shape.num_layers)]

    def buffer(self, num_slots: int, tokens: int) -> Cache:
        return self.empty(num_slots, tokens)

    def axes(self, cache: Cache) -> Cache:
        return jax.tree.map(cache_axes, cache, is_leaf=_is_cache)

    # Forward passes

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """A scan over layers, which stacks the caches of the layers."""

        def attend(q, k, v, kind, _, segment_ids) -> tuple[jax.Array, Any]:
            return attention(q, k, v, segment_ids, kind), self.shape.holding(k, v)

        def kept(stacked: KVCache) -> Cache:
            if not self.unrolled:
                return stacked
            layers = range(self.shape.num_layers)
            return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in layers]

        return CachePass(attend, None, segment_ids_BT, kept)

    def extend(self, model: Decoder, cache: Cache, length_B: jax.Array) -> CachePass:
        def attend(q, k, v, kind, layer, length_B) -> tuple[jax.Array, KVCache]:
            out_BTQH = extending_attention(q, k, v, layer, length_B, kind=kind)
            return out_BTQH, self.shape.holding(k, v)

        return CachePass(attend, cache, length_B, self._kept, self._layers(model))

    def decoding(self, model: Decoder, cache: Cache, length_B: jax.Array) -> DecodeStep:
        if self.kernel is not None:
            return self._decoding_by_kernel(self.kernel, cache, length_B)
        layers = self._layers(model)

        def attend(q_B1QH, k_B1KH, v_B1KH, kind, caches, lengths) -> tuple[jax.Array, KVCache]:
            q, k, v = q_B1QH[:, 0], k_B1KH[:, 0], v_B1KH[:, 0]
            out_BQH = cached_attention(q, k, v, tuple(zip(caches, lengths, strict=True)), kind=kind)
            return out_BQH[:, None], self.shape.holding(k_B1KH, v_B1KH)

        def step(buffer: Cache, i: jax.Array, _: jax.Array) -> CachePass:
            caches = (cache, buffer)
            if self.unrolled:
                caches = tuple(zip(*caches, strict=True))
            lengths = (length_B, jnp.full_like(length_B, i))
            return CachePass(attend, caches, lengths, self._kept, layers)

        return step

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
            return CachePass(attend, (past, buffer), lengths, self._kept)

        return step

    def _kept(self, new: Any) -> Cache:
        """The caches of the layers: a scan has stacked them, a loop has them one by one."""
        return list(new) if self.unrolled else new

    def _layers(self, model: Decoder) -> Callable[..., Any] | None:
        """A replacement for `models.compute.scan_layers` with separate arrays for each layer.

        Its `per_layer` and its results per layer are sequences of L trees. It ignores the stacked weights
        that it gets: they are split here, once. Otherwise a loop over tokens would split them for each token.
        """
        if not self.unrolled:
            return None
        _, stacked = nnx.split(model.layers)
        layers = [
            (jax.tree.map(lambda w, i=i: w[i], stacked), slides)
            for i, slides in enumerate(model.config.sliding_layers)
        ]

        def run(
            layer: LayerFunction,
            x_BTD: jax.Array,
            _: Any,
            per_layer: Any,
            per_row: Any,
            *,
            unroll: int,
        ) -> tuple[jax.Array, tuple[Any, Any]]:
            del unroll
            outs, sums = [], []
            for one_layer, layer_in in zip(layers, per_layer, strict=True):
                x_BTD, (out, of_rows) = layer(x_BTD, one_layer, layer_in, per_row)
                outs.append(out)
                sums.append(of_rows)
            return x_BTD, (tuple(outs), tuple(sums))

        return run

    # Tokens written, slots moved

    def put(self, buffer: Cache, new: Cache, i: jax.Array) -> Cache:
        return jax.tree.map(lambda old, one: put_token(old, one, i), buffer, new, is_leaf=_is_cache)

    def write(self, cache: Cache, new: Cache, start_B: jax.Array, live_B: jax.Array) -> Cache:
        return write_slots(cache, self.axes(cache), new, start_B, live_B)

    def take(self, cache: Cache, slots: jax.Array) -> Cache:
        return take_slots(cache, self.axes(cache), slots)

    def copy(self, cache: Cache, other: Cache, source_B: jax.Array) -> Cache:
        return copy_slots(cache, self.axes(cache), other, source_B)

    def resize(self, cache: Cache, capacity: int) -> Cache:
        return with_capacity(cache, self.axes(cache), capacity)


def _is_cache(part: Any) -> bool:
    return isinstance(part, KVCache)


def split_layers(params: Params) -> Params:
    """The weights with a list of trees, one for each layer, in place of the stack."""
    stack = params["layers"]
    layers = range(len(jax.tree.leaves(stack)[0]))
    return params | {"layers": [jax.tree.map(lambda w, i=i: w[i], stack) for i in layers]}


def stacked_layers(params: Params) -> Params:
    """The inverse of `split_layers`; stacked weights stay as they are.

    In a program that takes layers out of the stack again, as above, XLA removes both and copies nothing.
    """
    layers = params["layers"]
    if not isinstance(layers, list):
        return params
    return params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
