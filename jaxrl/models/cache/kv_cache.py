"""The arrays of a key-value cache, and moves of its slots on the device that holds them.

    B sequences   C capacity in tokens   L layers   K kv heads   H head size   n slots   P pages of a slot
    W new tokens

Types: float32, bfloat16, or int8 with a scale per token and head. The moves take a tree of arrays, and a tree
of the same structure with a tuple of logical axes per leaf. "batch" counts slots, "length" cached tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl.models.compute import moved_as_bits
from jaxrl.models.delta_net import DeltaState, no_past
from jaxrl.models.model_config import ModelConfig
from jaxrl.quantized import quantize

# W -> (the entry of "batch", that of "length", whether it is written), arrays that broadcast to [n, W].
Places: TypeAlias = Callable[[int], tuple[jax.Array, jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Rotated keys and values, of one layer or, with a leading L, of all layers.

    Attributes:
      k: [.., B, K, H, C] or, with `keys_last` "head_dim", [.., B, K, C, H].
      v: [.., B, K, C, H]; None if keys are values too, as latents are.
      k_scale, v_scale: float32 [.., B, K, C], factors of int8 entries; None for other types.
      keys_last: last dimension of k, "length" or "head_dim".
    """

    k: jax.Array
    v: Any
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    keys_last: str = dataclasses.field(default="length", metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into a slot."""
        return self.k.shape[-1 if self.keys_last == "length" else -2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedSlots:
    """A cache whose slots are lists of pages. The host assigns the pages (`rollout.page_pool`).

    Token t of a slot is token t % page of page table[slot, t // page]. Page 0 of a device is a scratch page:
    unused entries of the table name it, and it takes whatever is written beyond the pages of a slot.

    Attributes:
      pool: the pages; a tree of arrays with the axes "batch" (pages) and "length" (tokens of a page).
      table: int32 [n, P], the pages of each slot, numbered on the device that holds them.
      shared: int32 [n], number of leading pages that a copy into the slot leaves unchanged.
      states: the states of delta layers of each slot, where the pool has None; they need no pages.
    """

    pool: Any
    table: jax.Array
    shared: jax.Array
    states: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """The experts that each token of a mixture took, beside its keys and values.

    Attributes:
      expert: int16 [L, B, C, A], of the layers with experts.
    """

    expert: jax.Array


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes and types of all caches of an engine.

    Attributes:
      num_layers, num_kv_heads, head_dim: sizes of the model; layers are those of the stack,
        or its periods, if these have several.
      dtype: float32, bfloat16 or int8.
      keys_last: see `KVCache`.
      periodic: the model, if its periods have several layers; None for others.
      tail_dtype: type of the tails of the states of delta layers.
      first_layers: number of layers before the stack.
      latent: whether keys are values too.
      routes: number of layers with experts and of experts of a token, to keep in `Routes`; None keeps none.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    keys_last: str = "length"
    periodic: ModelConfig | None = None
    tail_dtype: Any = jnp.float32
    first_layers: int = 0
    latent: bool = False
    routes: tuple[int, int] | None = None

    def empty(self, leading: tuple[int, ...], capacity: int) -> Any:
        """Zeros with the leading dimensions (L, B), or (B,) for one layer.

        A `KVCache`; with periods of several layers a list of the places in one, `DeltaState`s among them.
        """
        if self.periodic is None:
            return self.keys_and_values(leading, capacity)
        # A list: in a tree of logical axes a tuple is a leaf.
        return [
            self.no_past(leading)
            if kind == "delta"
            else self.keys_and_values(leading, capacity, self.periodic.of_kind(kind))
            for kind in self.periodic.layer_pattern
        ]

    def no_past(self, leading: tuple[int, ...]) -> DeltaState:
        """The state of a delta layer before the first token."""
        assert self.periodic is not None, "no layer has a state"
        return no_past(self.periodic, leading, self.tail_dtype)

    def keys_and_values(
        self, leading: tuple[int, ...], capacity: int, sizes: Any = None
    ) -> KVCache:
        """Zeros for one place of a period, with the heads of `sizes` if there are several."""
        sizes = sizes or self
        K, H, C = sizes.num_kv_heads, sizes.head_dim, capacity
        values = None if self.latent else jnp.zeros((*leading, K, C, H), self.dtype)
        scales: Any = [None, None]
        if self.dtype == jnp.int8:
            # A latent and its rotated part share one scale: of random numbers, a rotated part ten times as
            # large costs the latent eight times the error (docs/models.md).
            scales = [None if self.latent and i else jnp.zeros((*leading, K, C)) for i in range(2)]
        k_shape = (*leading, K, C, H) if self.keys_last == "head_dim" else (*leading, K, H, C)
        keys = jnp.zeros(k_shape, self.dtype)
        return KVCache(keys, values, *scales, keys_last=self.keys_last)

    def holding(self, k_TKH: jax.Array, v_TKH: jax.Array) -> KVCache:
        """A cache that holds exactly the given keys and values, [.., T, K, H]."""
        return cache_of(k_TKH, None if self.latent else v_TKH, self.dtype, self.keys_last)


def is_part(tree: Any) -> bool:
    """Whether a part of a cache is that of one layer, or one stack of layers."""
    return isinstance(tree, KVCache | DeltaState | Routes)


def without_routes(cache: Any) -> Any:
    """A cache or buffer without `Routes`: what attention reads."""
    if isinstance(cache, PagedSlots):
        pool, states = without_routes(cache.pool), cache.states
        return dataclasses.replace(
            cache, pool=pool, states=states if pool is cache.pool else states[0]
        )
    return cache[0] if isinstance(cache, list) and isinstance(cache[-1], Routes) else cache


def only(kind: Any, tree: Any) -> Any:
    """A cache or buffer with None for parts of other kinds than `kind`, a type or union of types."""
    return jax.tree.map(
        lambda part: part if isinstance(part, kind) else None, tree, is_leaf=is_part
    )


def cache_axes(cache: Any) -> Any:
    """The logical axes of the arrays of a part (`is_part`), in its structure."""
    if isinstance(cache, Routes):
        axes: Any = ("layers", "batch", "length", None)
        return Routes(axes)
    if isinstance(cache, DeltaState):
        lead = ("layers", "batch")[6 - cache.matrix.ndim :]
        tails = ((*lead, None, "heads", *[None] * n) for n in (1, 1, 2))
        return DeltaState((*lead, "heads", None, None, None), *tails)
    # Without the leading L these are the arrays of one layer.
    heads = ("layers", "batch", "kv_heads")[5 - cache.k.ndim :]
    scale: Any = None if cache.k_scale is None else (*heads, "length")
    v: Any = (*heads, "length", "head_dim")
    k: Any = v if cache.keys_last == "head_dim" else (*heads, "head_dim", "length")
    if cache.v is None:
        return KVCache(k, None, scale, None, cache.keys_last)
    return KVCache(k, v, scale, scale, cache.keys_last)


def cache_of(
    k_TKH: jax.Array, v_TKH: jax.Array | None, dtype: Any, keys_last: str = "length"
) -> KVCache:
    """A cache that holds exactly the given keys and values, [.., T, K, H]; without values keys are both."""

    def stored(x_TKH: jax.Array | None) -> tuple[Any, Any]:
        if x_TKH is None:
            return None, None
        x_KTH = x_TKH.swapaxes(-3, -2)
        if dtype != jnp.int8:
            return x_KTH.astype(dtype), None
        narrow = quantize(x_KTH, (x_KTH.ndim - 1,))
        # The scale has kept the head's dimension, with size 1.
        return narrow.values, narrow.scale[..., 0]

    (k_KTH, k_scale), (v_KTH, v_scale) = stored(k_TKH), stored(v_TKH)
    k = k_KTH if keys_last == "head_dim" else k_KTH.swapaxes(-1, -2)
    return KVCache(k, v_KTH, k_scale, v_scale, keys_last=keys_last)


def put_token(cache: Any, new: Any, place: jax.Array) -> Any:
    """Writes the one token of `new` to the same position of all slots. This needs no scatter.

    A `DeltaState` is replaced by the new one.
    """
    if isinstance(cache, DeltaState):
        return new

    def put(old, new, axes):
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, axes.index("length"))

    axes = cache_axes(cache)
    return moved_as_bits(lambda cache, new: jax.tree.map(put, cache, new, axes), cache, new)


def take_slots(tree: Any, axes: Any, slots_n: jax.Array) -> Any:
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


def copy_slots(tree: Any, axes: Any, other: Any, source_n: jax.Array) -> Any:
    """Replaces slot i of `tree` by slot source_n[i] of `other` if that number is not negative.

    Capacities may differ, but the tokens must fit. The cost grows with the number of replaced slots.
    """
    # Replaced slots first: the loop ends after them.
    order_n = jnp.argsort(source_n < 0, stable=True)

    def copy(j, trees):
        slot = order_n[j]

        def one(leaf, new, names):
            batch = names.index("batch")
            # Copy the smaller of the two capacities; all other dimensions are equal.
            sizes = [min(pair) for pair in zip(leaf.shape, new.shape, strict=True)]
            sizes[batch] = 1
            new = jax.lax.dynamic_slice(new, starts({batch: source_n[slot]}, leaf.ndim), sizes)
            return jax.lax.dynamic_update_slice(leaf, new, starts({batch: slot}, leaf.ndim))

        tree, other = trees
        return jax.tree.map(one, tree, other, axes), other

    return _each(copy, (source_n >= 0).sum(), tree, other)


def write_slots(tree: Any, axes: Any, new: Any, start_n: jax.Array, live_n: jax.Array) -> Any:
    """Writes the W tokens of `new` to every live slot of `tree`, at `start_n`; other slots stay unchanged.

    A live slot must have room for W tokens from its start. An array without lengths, a state, is replaced.
    """

    def in_loop(tree: Any, new: Any) -> Any:
        # Slot by slot: for a scatter XLA would copy the whole tree into another memory layout.
        order_n = jnp.argsort(~live_n, stable=True)

        def write(j, trees):
            slot = order_n[j]

            def one(leaf, new, names):
                batch = names.index("batch")
                new = jax.lax.dynamic_index_in_dim(new, slot, batch)
                at = {batch: slot}
                if "length" in names:
                    at[names.index("length")] = start_n[slot]
                start = starts(at, leaf.ndim)
                return jax.lax.dynamic_update_slice(leaf, new, start)

            tree, new = trees
            return jax.tree.map(one, tree, new, axes), new

        return _each(write, live_n.sum(), tree, new)

    def places(W: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        slot_n1 = jnp.arange(len(live_n))[:, None]
        return slot_n1, start_n[:, None] + jnp.arange(W)[None], live_n[:, None]

    return written(tree, new, axes, in_loop, places)


def written(tree: Any, new: Any, axes: Any, in_loop: Callable[..., Any], places: Places) -> Any:
    """The result of `in_loop`, or of `scattered` on a platform that is faster with it."""

    def at_once(tree: Any, new: Any) -> Any:
        return scattered(tree, new, axes, places)

    # A scatter numbers rows in int32. A device has no more, but a plan traces the slots of all as one.
    if any(jax.tree.leaves(jax.tree.map(_has_too_many_rows, tree, new, axes))):
        return in_loop(tree, new)
    # A round of a loop costs a GPU launches and a visit of the host. On CPU a scatter takes 1.5 to 3 times as
    # long; a TPU writes its rows one by one, 115,000 for 64 slots of 28 layers where the loop has 128 rounds.
    return jax.lax.platform_dependent(tree, new, cuda=at_once, rocm=at_once, default=in_loop)


def _last_of_rows(names: tuple[str | None, ...]) -> int:
    return names.index("length" if "length" in names else "batch")


def _has_too_many_rows(leaf: jax.Array, new: jax.Array, names: tuple[str | None, ...]) -> bool:
    lead = _last_of_rows(names) + 1
    return math.prod(leaf.shape[:lead]) + math.prod(new.shape[:lead]) > jnp.iinfo(jnp.int32).max


def scattered(tree: Any, new: Any, axes: Any, places: Places) -> Any:
    """Writes the tokens of `new` to any places of `tree` by one scatter for each array.

    Args:
      tree: arrays that are written.
      new: arrays with the n slots of the places and W tokens; those without lengths are states.
      axes: logical axes of both, "batch" before "length".
      places: see above; no place is written twice.
    """

    def one(leaf: jax.Array, new: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        batch, last = names.index("batch"), _last_of_rows(names)
        # Rows of what follows the length. A scatter along their number alone copies nothing.
        shape, lead = leaf.shape[: last + 1], new.shape[: last + 1]
        n, W = lead[batch], lead[last] if last > batch else 1

        def along(x: jax.Array) -> jax.Array:
            dims = [n if d == batch else W if d == last else 1 for d in range(last + 1)]
            return jnp.broadcast_to(x, (n, W)).reshape(dims)

        entry, place, is_written = map(along, places(W))
        at = [jax.lax.broadcasted_iota(jnp.int32, lead, d) for d in range(last + 1)]
        at[last], at[batch] = place, entry  # of a state the entry alone
        row = functools.reduce(lambda row, d: row * shape[d] + at[d], range(last + 1), jnp.int32(0))
        rows, of_new = math.prod(shape), math.prod(lead)
        # JAX drops rows behind the last; these differ too, as all must.
        row = jnp.where(is_written, row, rows + jnp.arange(of_new).reshape(lead)).reshape(-1)
        flat, new = leaf.reshape(rows, -1), new.reshape(of_new, -1)
        return flat.at[row].set(new, mode="drop", unique_indices=True).reshape(leaf.shape)

    return jax.tree.map(one, tree, new, axes)


def _each(move: Any, times: jax.Array, tree: Any, other: Any) -> Any:
    """Applies `move(j, (tree, other))` for j < times; returns the new `tree`."""
    return moved_as_bits(lambda *trees: jax.lax.fori_loop(0, times, move, trees)[0], tree, other)


def starts(at: dict[int, Any], ndim: int) -> list[Any]:
    """Start indices by dimension; 0 where `at` has none."""
    return [at.get(d, 0) for d in range(ndim)]
