"""A separate cache for each layer, and a Python loop over layers: for shallow models on CPU.

On CPU a scan over layers copies the slice of the stacked cache, and of the weights, for every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.cache.interface import Attention, CachePass, DecodeStep
from jaxrl.models.cache.kv_cache import KVCache, put_token
from jaxrl.models.cache.slot_cache import SlotCache
from jaxrl.models.compute import LayerFunction
from jaxrl.models.decoder import Decoder, Params

# A list and not a tuple: in a tree of logical axes a tuple is a leaf, the axes of one array.
Layers = list[KVCache]


@dataclasses.dataclass(frozen=True)
class PerLayerCache(SlotCache):
    """Caches as lists of L arrays [B, ..]."""

    @property
    def reads_own_length(self) -> bool:
        """False: XLA attends to the whole capacity."""
        return False

    def empty(self, num_slots: int, capacity: int) -> Layers:
        """See `CacheKind.empty`."""
        return [self.shape.empty_layer(num_slots, capacity) for _ in range(self.shape.num_layers)]

    def buffer(self, num_slots: int, tokens: int) -> Layers:
        """See `CacheKind.buffer`."""
        return self.empty(num_slots, tokens)

    def put(self, buffer: Layers, new: Layers, i: jax.Array) -> Layers:
        """See `CacheKind.put`."""
        return [put_token(old, one, i) for old, one in zip(buffer, new, strict=True)]

    def prefill(self, attention: Attention, segment_ids_BT: jax.Array) -> CachePass:
        """See `CacheKind.prefill`."""

        def kept(stacked: KVCache) -> Layers:
            layers = range(self.shape.num_layers)
            return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in layers]

        return self._whole(attention, segment_ids_BT)._replace(kept=kept)

    def extend(self, model: Decoder, cache: Layers, length_B: jax.Array) -> CachePass:
        """See `CacheKind.extend`."""
        layers = _one_by_one(model)
        return CachePass(self._attend_chunk, cache, length_B, kept=list, layers=layers)

    def decoding(self, model: Decoder, cache: Layers, length_B: jax.Array) -> DecodeStep:
        """See `CacheKind.decoding`."""
        layers = _one_by_one(model)

        def step(buffer: Layers, i: jax.Array, _: jax.Array) -> CachePass:
            caches = tuple(zip(cache, buffer, strict=True))
            lengths = (length_B, jnp.full_like(length_B, i))
            return CachePass(self._attend_token, caches, lengths, kept=list, layers=layers)

        return step


def split_layers(params: Params) -> Params:
    """The weights with a list of trees, one for each layer, in place of the stack."""
    stack = params["layers"]
    layers = range(len(jax.tree.leaves(stack)[0]))
    return params | {"layers": [jax.tree.map(lambda w, i=i: w[i], stack) for i in layers]}


def stacked_layers(params: Params) -> Params:
    """The inverse of `split_layers`; stacked weights stay as they are.

    In a program that takes layers out of the stack again, as below, XLA removes both and copies nothing.
    """
    layers = params["layers"]
    if not isinstance(layers, list):
        return params
    return params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def _one_by_one(model: Decoder) -> Callable[..., tuple[jax.Array, tuple[Any, Any]]]:
    """A replacement for `models.compute.scan_layers` with separate arrays for each layer.

    The stacked weights are split here, once. Otherwise a loop over tokens would split them for every token.

    Returns:
      A function with the arguments of `scan_layers`, except that `per_layer` and the results per layer are
      sequences of L trees. It ignores the stacked weights that it gets.
    """
    _, stacked = nnx.split(model.layers)
    layers = [
        (jax.tree.map(lambda w, i=i: w[i], stacked), slides)
        for i, slides in enumerate(model.config.sliding_layers)
    ]

    def run(
        layer: LayerFunction, x_BTD: jax.Array, _: Any, per_layer: Any, per_row: Any, *, unroll: int
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        del unroll
        outs, sums = [], []
        for one_layer, layer_in in zip(layers, per_layer, strict=True):
            x_BTD, (out, of_rows) = layer(x_BTD, one_layer, layer_in, per_row)
            outs.append(out)
            sums.append(of_rows)
        return x_BTD, (tuple(outs), tuple(sums))

    return run
