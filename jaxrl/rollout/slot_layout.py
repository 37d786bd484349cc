"""The sharding of slots and their sequences on a mesh.

A layout knows the logical axes of every array whose first dimension is slots. It pins arrays to the devices
of these axes, and runs functions on every device for the device's own slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import Mesh

from jaxrl.mesh.rules import (
    GENERATE_RULES,
    constraint,
    partition_spec,
    per_device,
    shardings,
    with_shardings,
)
from jaxrl.models.cache.interface import Cache, CacheKind
from jaxrl.rollout.decode_state import DecodeState, Prefix

# Logical axes of a prefix without a cache.
PREFIX_AXES: Any = Prefix(*cast(Any, (None, ("batch", "length"), ("batch",), ("batch",))))


class NewTokens(NamedTuple):
    """Tokens to append to sequences: their cache, and int32 [n, W]."""

    cache: Cache
    tokens: jax.Array


class SlotLayout:
    """Places states, prefixes and arrays with one entry per slot. Holds no arrays."""

    def __init__(self, mesh: Mesh, cache: CacheKind):
        """Args: the devices, laid out for generation; the kind of the KV cache."""
        self.mesh = mesh
        self.constrain = constraint(mesh, GENERATE_RULES)
        self._cache = cache

    def axes_of(self, tree: Any) -> Any:
        """Logical axes of every leaf of a state, a prefix, or a tree of arrays with one entry per slot."""
        if isinstance(tree, DecodeState):
            rest = tree.replace(context=None)
            return slots_first(rest).replace(context=self.axes_of(tree.context))
        if isinstance(tree, Prefix):
            return dataclasses.replace(PREFIX_AXES, cache=self._cache.axes(tree.cache))
        if isinstance(tree, NewTokens):
            return NewTokens(self._cache.axes(tree.cache), PREFIX_AXES.history)
        return slots_first(tree)

    def place(self, tree: Any) -> Any:
        """Pins every leaf of a state or prefix to its devices."""
        return jax.tree.map(self.constrain, tree, self.axes_of(tree))

    def place_buffer(self, buffer: Cache) -> Cache:
        """Pins the buffer for a dispatch's new keys and values to its devices."""
        return jax.tree.map(self.constrain, buffer, self._cache.axes(buffer))

    def abstract(self, shapes: Any) -> Any:
        """Adds shardings to the shapes of a state or prefix."""
        where = shardings(self.axes_of(shapes), shapes, GENERATE_RULES, self.mesh)
        return with_shardings(shapes, where)

    def on_own_slots(
        self,
        function: Callable[..., Any],
        tree: Any,
        *others: Any,
        whole: Any = None,
        result: Any = None,
    ) -> Any:
        """Calls `function(tree, *others)` on every device with the device's own slots.

        Args:
          function: function that returns a tree with the structure and axes of `result`.
          tree, others: states, prefixes, or arrays with one entry per slot.
          whole: last argument, passed to every device with all slots; None omits it.
          result: shapes of the result over all devices; None for a result like `tree`.
        """
        given = (tree, *others) if whole is None else (tree, *others, whole)
        if self.mesh.size == 1:
            return function(*given)
        specs = [self._specs(tree) for tree in (tree, *others)]
        if whole is not None:
            specs.append(self._specs(whole, without="batch"))
        out = specs[0] if result is None else self._specs(result)
        return per_device(function, self.mesh, in_specs=tuple(specs), out_specs=out)(*given)

    def _specs(self, tree: Any, without: str = "") -> Any:
        sizes = dict(self.mesh.shape)

        def spec(leaf, axes):
            axes = tuple(None if axis == without else axis for axis in axes)
            return partition_spec(axes, leaf.shape, GENERATE_RULES, sizes, "slots")

        return jax.tree.map(spec, tree, self.axes_of(tree))


def slots_first(tree: Any) -> Any:
    """Logical axes of arrays whose first dimension is slots."""
    return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), tree)
