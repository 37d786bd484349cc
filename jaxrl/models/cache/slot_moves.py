"""Moves slots of a cache, a tree of arrays with named axes, on the device that holds them.

Every function takes a tree of arrays and a tree of the same structure with a tuple of logical axes per leaf.
"batch" counts slots, "length" cached tokens.

    n slots   P slots of another tree   C capacity in tokens   W new tokens
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.bits import moved_as_bits


def taken(tree: Any, axes: Any, slots_n: jax.Array) -> Any:
    """Takes the slots with numbers `slots_n`, int32, from `tree`."""
    return jax.tree.map(
        lambda leaf, names: jnp.take(leaf, slots_n, axis=names.index("batch")), tree, axes
    )


def with_capacity(tree: Any, axes: Any, capacity: int) -> Any:
    """Changes the capacity of `tree`: appends zeros or cuts off the end."""

    def one(leaf, names):
        if "length" not in names:
            return leaf
        dim = names.index("length")
        if capacity <= leaf.shape[dim]:
            return jax.lax.slice_in_dim(leaf, 0, capacity, axis=dim)
        pad = [(0, 0)] * leaf.ndim
        pad[dim] = (0, capacity - leaf.shape[dim])
        return jnp.pad(leaf, pad)

    return jax.tree.map(one, tree, axes)


def copied(tree: Any, axes: Any, other: Any, source_n: jax.Array) -> Any:
    """Replaces slot i of `tree` by slot source_n[i] of `other` if that number is not negative.

    Capacities may differ, but the tokens must fit. The cost grows with the number of replaced slots.
    """
    order_n = jnp.argsort(source_n < 0, stable=True)

    def copy(j, trees):
        slot = order_n[j]

        def one(leaf, new, names):
            batch = names.index("batch")
            # Copy the smaller of the two capacities; all other dimensions are equal.
            sizes = [min(pair) for pair in zip(leaf.shape, new.shape, strict=True)]
            sizes[batch] = 1
            new = jax.lax.dynamic_slice(new, _at(batch, source_n[slot], leaf.ndim), sizes)
            return jax.lax.dynamic_update_slice(leaf, new, _at(batch, slot, leaf.ndim))

        tree, other = trees
        return jax.tree.map(one, tree, other, axes), other

    return _each(copy, (source_n >= 0).sum(), tree, other)


def _at(dim: int, index: jax.Array, ndim: int) -> list[Any]:
    """Start indices that are `index` in dimension `dim` and 0 elsewhere."""
    return [index if d == dim else 0 for d in range(ndim)]


def written(tree: Any, axes: Any, new: Any, start_n: jax.Array, live_n: jax.Array) -> Any:
    """Writes the W tokens of `new` to every live slot of `tree`, at `start_n`; other slots stay unchanged.

    A live slot must have room for W tokens from its start.
    """
    # Slot by slot: for a scatter XLA would copy the whole tree into another memory layout.
    order_n = jnp.argsort(~live_n, stable=True)

    def write(j, trees):
        slot = order_n[j]

        def one(leaf, new, names):
            batch, length = names.index("batch"), names.index("length")
            new = jax.lax.dynamic_index_in_dim(new, slot, batch)
            start = [{batch: slot, length: start_n[slot]}.get(d, 0) for d in range(leaf.ndim)]
            return jax.lax.dynamic_update_slice(leaf, new, start)

        tree, new = trees
        return jax.tree.map(one, tree, new, axes), new

    return _each(write, live_n.sum(), tree, new)


def _each(move: Any, times: jax.Array, tree: Any, other: Any) -> Any:
    """Applies `move(j, (tree, other))` for j < times; returns the new `tree`."""
    return moved_as_bits(lambda *trees: jax.lax.fori_loop(0, times, move, trees)[0], tree, other)
