"""Programs that move sequences between prefixes and slots. None of them runs the model.

    idle                  -> state      n idle slots of capacity C
    insert    prefix      -> state      starts samples in slots
    taken     state       -> state      copies some slots, put_back returns them
    reuse     state       -> prefix     copies beginnings of sequences out of pages
    routes    state       -> [m, ..]    the experts that the tokens of some slots took
    resize    state       -> state      other numbers n and C, the sequences in use kept
    release   state       -> state      stops slots
    append    new tokens  -> prefix     writes tokens behind those of a sequence

A layout knows the logical axes of every array whose first dimension is slots. It pins arrays to the devices
of these axes, and runs functions on every device for the device's own slots.

    n slots   P sequences of a prefix   W tokens of a dispatch   C capacity in tokens
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.mesh.rules import (
    GENERATE_RULES,
    constraint,
    partition_spec,
    per_device,
    shardings,
    with_shardings,
)
from jaxrl.models.cache.cache_kind import Cache, CacheKind
from jaxrl.models.cache.kv_cache import copy_slots, take_slots, with_capacity, write_slots
from jaxrl.models.cache.paged_cache import PagedCache
from jaxrl.rollout.decode_state import Assignment, DecodedTokens, DecodeState, Prefix
from jaxrl.rollout.sampling import Truncation, sample_keys, truncation_of

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
        def spec(leaf, axes):
            axes = tuple(None if axis == without else axis for axis in axes)
            return partition_spec(axes, leaf.shape, GENERATE_RULES, dict(self.mesh.shape), "slots")

        return jax.tree.map(spec, tree, self.axes_of(tree))


def slots_first(tree: Any) -> Any:
    """Logical axes of arrays whose first dimension is slots."""
    return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), tree)


@dataclasses.dataclass(frozen=True, eq=False)
class SlotPrograms:
    """The programs listed above; every method may be traced.

    Attributes:
      cache: kind of the KV cache.
      layout: sharding of the slots.
      tokens_per_dispatch: W.
    """

    cache: CacheKind
    layout: SlotLayout
    tokens_per_dispatch: int

    def idle(self, n: int, capacity: int) -> DecodeState:
        """A state of n idle slots with room for `capacity` tokens each."""
        W = self.tokens_per_dispatch
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        cache = self.cache.empty(n, capacity)
        return self.layout.place(
            DecodeState(
                context=Prefix(cache, ints((n, capacity)), ints((n,)), ints((n,))),
                key=jnp.zeros((n, 2), jnp.uint32),
                temperature=jnp.ones((n,)),
                truncation=jax.tree.map(lambda x: jnp.full((n,), x), truncation_of()),
                count=ints((n,)),
                limit=ints((n,)),
                active=jnp.zeros((n,), bool),
                stops=jnp.ones((n,), bool),
                decoded=DecodedTokens(
                    ints((n,)), ints((n, W)), jnp.zeros((n, W)), jnp.zeros((n, W))
                ),
            )
        )

    def insert(
        self,
        prefix: Prefix,
        state: DecodeState,
        assignment: Assignment,
        seed: jax.Array,
        step: jax.Array,
        temperature: jax.Array,
        stops: jax.Array,
        truncation: Truncation,
    ) -> DecodeState:
        """Starts samples in the assigned slots.

        Args:
          prefix: prefilled sequences; its capacity is at most that of the state.
          state: state of the slots; consumed.
          assignment: sequence of each slot that starts.
          seed, step, temperature, stops, truncation: scalars, the same for all of these samples.
        """
        new_n = assignment.source >= 0

        def put(old, new):
            return jnp.where(new_n.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

        key_n2 = sample_keys(seed, step, assignment.prompt_id, assignment.sample_index)
        # Every device gets the whole prefix: a sample may start on any shard.
        context = self.layout.on_own_slots(
            self._copied, state.context, assignment.source, whole=prefix
        )
        return self.layout.place(
            state.replace(
                context=context,
                key=put(state.key, key_n2),
                temperature=put(state.temperature, temperature),
                truncation=jax.tree.map(put, state.truncation, truncation),
                count=put(state.count, assignment.count),
                limit=put(state.limit, assignment.limit),
                active=put(state.active, True),
                stops=put(state.stops, stops),
                decoded=dataclasses.replace(state.decoded, count=put(state.decoded.count, 0)),
            )
        )

    def taken(self, state: DecodeState, slot_m: jax.Array) -> DecodeState:
        """A state of the given slots alone, with a contiguous cache.

        Args:
          state: state of the slots; not consumed.
          slot_m: int32 [m], the same number of slots from every shard, each counted within its shard; -1
            makes an idle slot.
        """
        used_m = slot_m >= 0
        # 0 stands for -1: that copy is not active and never read.
        taken = self._take(state, jnp.where(used_m, slot_m, 0))
        return self.layout.place(taken.replace(active=taken.active & used_m))

    def routes(self, state: DecodeState, slot_m: jax.Array) -> jax.Array:
        """The experts that the tokens of slots took, int16 [m, L, C, A]; `slot_m` as for `taken`."""

        def take(context: Prefix, slot_m):
            return jnp.moveaxis(self.cache.routes(context.cache, jnp.maximum(slot_m, 0)), 1, 0)

        taken = jax.eval_shape(take, state.context, slot_m)
        return self.layout.on_own_slots(take, state.context, slot_m, result=taken)

    def put_back(self, state: DecodeState, source_n: jax.Array, taken: DecodeState) -> DecodeState:
        """Replaces slot i by slot `source_n[i]` of `taken`, counted within its shard, unless it is -1."""
        return self.layout.on_own_slots(self._copied, state, source_n, taken)

    def reuse(
        self,
        state: DecodeState,
        table_Pp: jax.Array,
        history_PC: jax.Array,
        length_P: jax.Array,
        token_P: jax.Array,
    ) -> Prefix:
        """Copies beginnings of sequences out of the pages of a paged cache, to extend and insert them.

        Args:
          state: state of the slots; not consumed.
          table_Pp: int32 [P, p], pages of each sequence, the same number of sequences from every shard, each
            numbered within its shard; 0 behind the last.
          history_PC, length_P, token_P: tokens, length and last token of each resulting sequence, as in
            `Prefix`.
        """
        assert isinstance(self.cache, PagedCache), "only pages can be shared"
        cache = self.cache

        def take(context: Prefix, table_Pp, *rest):
            return Prefix(cache.take_pages(context.cache, table_Pp), *rest)

        given = (table_Pp, history_PC, length_P, token_P)
        taken = jax.eval_shape(take, state.context, *given)
        return self.layout.on_own_slots(take, state.context, *given, result=taken)

    def resize(self, state: DecodeState, slot_n: jax.Array, *, capacity: int) -> DecodeState:
        """Moves the sequences in use to a state with another number of slots or capacity.

        Args:
          state: state of the slots; not consumed, because the new arrays have other shapes.
          slot_n: int32 [n'], for each new slot the old slot whose sequence moves there, counted within its
            shard, or -1 for an idle slot.
          capacity: C', at least W more than the longest sequence of an active slot.
        """
        idle = self.idle(slot_n.shape[0], capacity)
        return self.layout.on_own_slots(self._copied, idle, slot_n, state)

    def release(self, state: DecodeState, keep_n: jax.Array) -> DecodeState:
        """Stops the active slots where `keep_n`, bool [n], is False."""
        return state.replace(active=state.active & keep_n)

    def append(
        self, context: Prefix, new: Cache, tokens_nW: jax.Array, live_n: jax.Array
    ) -> Prefix:
        """Writes W tokens to cache and history after the sequences of live slots. Lengths do not change."""

        def append(context: Prefix, new: NewTokens, live_n):
            start_n = context.length
            history = write_slots(context.history, PREFIX_AXES.history, new.tokens, start_n, live_n)
            cache = self.cache.write(context.cache, new.cache, start_n, live_n)
            return dataclasses.replace(context, cache=cache, history=history)

        return self.layout.on_own_slots(append, context, NewTokens(new, tokens_nW), live_n)

    def with_capacity(self, prefix: Prefix, capacity: int) -> Prefix:
        """The prefix with a capacity of `capacity` tokens, larger or smaller than before."""
        history = with_capacity(prefix.history, PREFIX_AXES.history, capacity)
        cache = self.cache.resize(prefix.cache, capacity)
        return dataclasses.replace(prefix, cache=cache, history=history)

    def widen(self, prefix: Prefix, *, capacity: int) -> Prefix:
        """Runs `with_capacity` as a separate program."""
        return self.layout.place(self.with_capacity(prefix, capacity))

    def _take(self, tree: Any, slot_m: jax.Array) -> Any:
        """Takes slots out of a state or its context, on their own shards."""

        def take(tree: Any, slot_m):
            if isinstance(tree, DecodeState):
                rest = tree.replace(context=None)
                taken = take_slots(rest, slots_first(rest), slot_m)
                return taken.replace(context=take(tree.context, slot_m))
            rest = dataclasses.replace(tree, cache=None)
            taken = take_slots(rest, PREFIX_AXES, slot_m)
            return dataclasses.replace(taken, cache=self.cache.take(tree.cache, slot_m))

        # The sequences of a paged cache come out contiguous, so they differ from the state in structure.
        taken = jax.eval_shape(take, tree, slot_m)
        return self.layout.on_own_slots(take, tree, slot_m, result=taken)

    def _copied(self, tree: Any, source_n: jax.Array, other: Any) -> Any:
        """A copy in which slot i is slot source_n[i] of `other`, or unchanged if source_n[i] is negative."""
        if isinstance(tree, DecodeState):
            rest, others = tree.replace(context=None), other.replace(context=None)
            copied = copy_slots(rest, slots_first(rest), others, source_n)
            return copied.replace(context=self._copied(tree.context, source_n, other.context))
        rest, others = (dataclasses.replace(each, cache=None) for each in (tree, other))
        copied = copy_slots(rest, PREFIX_AXES, others, source_n)
        cache = self.cache.copy(tree.cache, other.cache, source_n)
        return dataclasses.replace(copied, cache=cache)
