"""The compiled half of rollout: prefill, insert and generate over slots.

The methods and their meaning are those of JetStream's `engine_api.Engine`; nothing of it is imported
here. One state holds n slots of capacity C. Where decoding reads all of C, `resize` moves the slots that are
in use to a state of another n and C, so that a dispatch costs what its live slots and their lengths cost; on
accelerators, whose kernels read each slot's own length, there is one n and one C for the whole run:

    prefill    prompts -> Prefix                 once per prompt, in chunks where it is long
    insert     Prefix -> slots of a state        once per sample
    generate   up to W tokens in every active slot; the past is only read, the W new tokens wait in a
               buffer of their own and join the cache at the end of the dispatch
    extract    slots of a state -> Prefix        to go on after tokens that the model did not sample
    resize     state -> state of n' slots and capacity C'

Programs are compiled per size on first use; sizes come from `slot_sizes`, `cache_sizes`, `prompt_sizes` and
`batch_sizes`, so their number is bounded. Not covered: paged caches; slots that share a prompt each hold a
copy of its keys and values.

    S slots at most, n of them in the state   P prompts of a prefill batch   T prompt tokens
    W tokens of a dispatch   C capacity of a slot   L layers   K kv heads   H head size   V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.mesh.attention_parallel import attention_parallel
from jaxrl.mesh.devices import platform_of
from jaxrl.mesh.expert_parallel import expert_parallel
from jaxrl.mesh.hosts import put
from jaxrl.mesh.manual import per_device
from jaxrl.mesh.pipeline import pipeline
from jaxrl.mesh.rules import (
    GENERATE_RULES,
    constraint,
    partition_spec,
    replicated,
    shardings,
    shards_of,
)
from jaxrl.models.attention import attention, pick_implementation
from jaxrl.models.cache import slot_moves
from jaxrl.models.cache.interface import Cache, DecodeStep, cache_bytes
from jaxrl.models.compute import Compute, scan_layers
from jaxrl.models.decoder import Decoder, Params
from jaxrl.models.experts import experts_for
from jaxrl.models.logprobs import log_softmax_entropy
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.buckets import bucket_sizes
from jaxrl.rollout.cache_choice import choose_cache
from jaxrl.rollout.decode_state import Assignment, DecodeState, Prefix
from jaxrl.rollout.sampling import (
    Truncation,
    draw,
    forbid,
    gumbel_noise,
    penalize,
    sample_keys,
    untruncated,
)
from jaxrl.rollout.settings import EngineConfig

# The smallest sizes worth a program of their own.
_SHORTEST_CACHE, _SHORTEST_PROMPT = 64, 64

# Logical axes of a prefix whose cache is None.
_PREFIX_AXES: Any = Prefix(*cast(Any, (None, ("batch", "length"), ("batch",), ("batch",))))


class _NewTokens(NamedTuple):
    """W tokens of every slot that come on top: a cache of them, and int32 [n, W]."""

    cache: Cache
    tokens: jax.Array


class _Step(NamedTuple):
    """The part of a state that changes within a dispatch, after `i` tokens of every slot still active.

    Attributes:
      i: int32 scalar.
      recent: keys and values of these tokens, a buffer of the `CacheKind`.
      token, active, out_count, out_token, out_logprob, out_entropy: as of the state.
    """

    i: jax.Array
    recent: Cache
    token: jax.Array
    active: jax.Array
    out_count: jax.Array
    out_token: jax.Array
    out_logprob: jax.Array
    out_entropy: jax.Array


class Engine:
    """Prefill, insert and generate for one model on one mesh. Each compiles once per size it meets.

    The sequence of a run, `load_params` aside, is: prefill some prompts, insert them into idle slots,
    generate until a slot falls idle, read it, repeat; `resize` where more or fewer slots, or longer ones, are
    needed. On a mesh the slots are shared out in equal runs, and a slot stays on its shard.
    """

    def __init__(self, model: ModelConfig, graph: nnx.GraphDef, mesh: Mesh, config: EngineConfig):
        unknown = [i for i in config.stop_ids if not 0 <= i < model.vocab_size]
        if unknown:
            raise UserError(
                f"stop_ids {unknown} are no tokens of a model with {model.vocab_size}: no response would end "
                "there; give ids of its tokenizer"
            )
        self.model = model
        self.config = config
        self.mesh = mesh
        self._graph = graph
        self._constrain = constraint(mesh, GENERATE_RULES)
        platform = platform_of(mesh)
        unroll = config.layers_per_iteration(model.num_layers, platform)
        self._compute = Compute(
            dtype=jnp.dtype(config.dtype),
            constrain=self._constrain,
            experts=expert_parallel(experts_for(platform_of(mesh)), mesh, GENERATE_RULES),
            layers=pipeline(scan_layers, mesh, GENERATE_RULES),
            unroll=unroll,
        )
        implementation = pick_implementation(
            platform, config.dtype, config.attention, softcap=model.attention_softcap
        )
        self._attention = attention_parallel(
            functools.partial(attention, implementation=implementation), mesh, GENERATE_RULES
        )
        self._cache = choose_cache(
            model,
            mesh,
            dtype=config.dtype,
            kv_dtype=config.cache_dtype,
            unroll=unroll,
            decode_attention=config.decode_attention,
        )
        self.shards = shards_of("batch", GENERATE_RULES, mesh)
        # On accelerators one state for the whole run, allocated once: a second one would hold as much again.
        fixed = self._cache.reads_own_length
        self.slot_sizes = self._shared_out(
            config.slots, config.slots if fixed else config.fewest_slots
        )
        # Few: each is compiled for every prompt size, and so is inserting from it.
        prompts = max(1, config.prefill_prompts // self.shards)
        self.batch_sizes = tuple(n * self.shards for n in sorted({-(-prompts // 4), prompts}))
        longest = config.max_context_tokens + config.tokens_per_dispatch
        longest += -longest % self._cache.capacity_multiple
        self.prefix_sizes = bucket_sizes(longest, _SHORTEST_CACHE)
        self.cache_sizes = (longest,) if fixed else self.prefix_sizes
        self.prompt_sizes = bucket_sizes(config.chunk_tokens, _SHORTEST_PROMPT)
        self._idle = jax.jit(self._idle_state, static_argnums=(0, 1))
        self.prefill = jax.jit(self._prefill)
        self.extend = jax.jit(self._extend, donate_argnames="prefix")
        self.insert = jax.jit(self._insert, donate_argnames="state")
        self.generate = jax.jit(self._generate, donate_argnames="state")
        self.release = jax.jit(self._release, donate_argnames="state")
        self.extract = jax.jit(self._extract)
        self.widen = jax.jit(self._widen, static_argnames="capacity")
        self.resize = jax.jit(self._resize, static_argnames="capacity")

    def _shared_out(self, largest: int, smallest: int) -> tuple[int, ...]:
        """Sizes of something that is shared out over the shards of the batch."""
        each = bucket_sizes(max(1, largest // self.shards), max(1, smallest // self.shards))
        return tuple(size * self.shards for size in each)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self.config.slots

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt in tokens."""
        return self.config.max_prompt_tokens

    def init_decode_state(self, num_slots: int = 0, capacity: int = 0) -> DecodeState:
        """A state with every slot idle, born sharded.

        Args:
          num_slots: n, one of `slot_sizes`; 0 is all slots.
          capacity: C, one of `cache_sizes`; 0 is the longest.
        """
        return self._idle(num_slots or self.slot_sizes[-1], capacity or self.cache_sizes[-1])

    def abstract_decode_state(self) -> DecodeState:
        """Shapes and shardings of the slots at their largest, nothing allocated."""
        return self._with_shardings(jax.eval_shape(self.init_decode_state))

    def abstract_prefix(self, shapes: Prefix) -> Prefix:
        """Shapes and shardings of a prefix, from its shapes alone."""
        return self._with_shardings(shapes)

    def _with_shardings(self, shapes: Any) -> Any:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings(self._axes_of(shapes), shapes, GENERATE_RULES, self.mesh),
        )

    def cache_bytes(self, num_slots: int, capacity: int) -> int:
        """Bytes of the keys and values of a state, over all devices."""
        return cache_bytes(self._cache, num_slots, capacity)

    def _idle_state(self, n: int, capacity: int) -> DecodeState:
        W = self.config.tokens_per_dispatch
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        cache = self._cache.empty(n, capacity)
        return self._place(
            DecodeState(
                context=Prefix(cache, ints((n, capacity)), ints((n,)), ints((n,))),
                key=jnp.zeros((n, 2), jnp.uint32),
                temperature=jnp.ones((n,)),
                truncation=jax.tree.map(lambda x: jnp.full((n,), x), untruncated()),
                count=ints((n,)),
                limit=ints((n,)),
                active=jnp.zeros((n,), bool),
                out_count=ints((n,)),
                out_token=ints((n, W)),
                out_logprob=jnp.zeros((n, W)),
                out_entropy=jnp.zeros((n, W)),
            )
        )

    # Where slots lie

    def _place(self, tree: Any) -> Any:
        """Pins every field to where its logical axes lie."""
        return jax.tree.map(self._constrain, tree, self._axes_of(tree))

    def _axes_of(self, tree: Any) -> Any:
        """Logical axes of every leaf of a state or prefix, or of a tree of arrays of one entry per slot."""
        if isinstance(tree, DecodeState):
            rest = tree.replace(context=None)
            return _slots_first(rest).replace(context=self._axes_of(tree.context))
        if isinstance(tree, Prefix):
            return dataclasses.replace(_PREFIX_AXES, cache=self._cache.axes(tree.cache))
        if isinstance(tree, _NewTokens):
            return _NewTokens(self._cache.axes(tree.cache), _PREFIX_AXES.history)
        return _slots_first(tree)

    def _on_own_slots(
        self, function: Callable[..., Any], tree: Any, *others: Any, whole: Any = None
    ) -> Any:
        """`function(tree, *others)`, each device with its own slots.

        Args:
          function: returns something of the structure and axes of `tree`.
          tree, others: slots of states or prefixes, or arrays of one entry per slot.
          whole: a last argument, of which every device gets the slots of all.
        """
        given = (tree, *others) if whole is None else (tree, *others, whole)
        if self.mesh.size == 1:
            return function(*given)
        specs = [self._specs(tree) for tree in (tree, *others)]
        if whole is not None:
            specs.append(self._specs(whole, without="batch"))
        return per_device(function, self.mesh, in_specs=tuple(specs), out_specs=specs[0])(*given)

    def _specs(self, tree: Any, without: str = "") -> Any:
        sizes = dict(self.mesh.shape)

        def spec(leaf, axes):
            axes = tuple(None if axis == without else axis for axis in axes)
            return partition_spec(axes, leaf.shape, GENERATE_RULES, sizes, "slots")

        return jax.tree.map(spec, tree, self._axes_of(tree))

    # Prefill

    def _prefill(self, params: Params, tokens_PT: jax.Array, length_P: jax.Array) -> Prefix:
        """Runs P sequences of `length_P` tokens, padded on the right, and keeps keys and values."""
        model: Decoder = nnx.merge(self._graph, params)
        P, T = tokens_PT.shape
        positions_PT = jnp.broadcast_to(jnp.arange(T), (P, T))
        # Padding sits after the prompt, so causality alone hides it from real tokens.
        one_segment_PT = jnp.ones((P, T), jnp.int32)
        live_PT = positions_PT < length_P[:, None]
        fresh = self._cache.prefill(self._attention, one_segment_PT)
        _, cache = fresh.run(model, tokens_PT, positions_PT, live_PT, self._compute)
        return self._place(Prefix(cache, tokens_PT, length_P - 1, _last(tokens_PT, length_P)))

    def _extend(
        self, params: Params, prefix: Prefix, tokens_PT: jax.Array, length_P: jax.Array
    ) -> Prefix:
        """Appends `length_P` tokens, padded on the right, to sequences with room for so many.

        The prefix's last token is run with them, the last of them is not. A length of 0 leaves a sequence
        as it is.
        """
        model: Decoder = nnx.merge(self._graph, params)
        fed_PT = jnp.concatenate([prefix.token[:, None], tokens_PT[:, :-1]], axis=1)
        offset_PT = jnp.broadcast_to(jnp.arange(fed_PT.shape[1]), fed_PT.shape)
        positions_PT, live_PT = prefix.length[:, None] + offset_PT, offset_PT < length_P[:, None]
        on_top = self._cache.extend(model, prefix.cache, prefix.length)
        _, new = on_top.run(model, fed_PT, positions_PT, live_PT, self._compute)
        live_P = length_P > 0
        # With padding there may be no room, which would move what is written: there is for a moment.
        wide = self._with_capacity(prefix, prefix.capacity + fed_PT.shape[1])
        prefix = self._with_capacity(self._append(wide, new, fed_PT, live_P), prefix.capacity)
        token_P = jnp.where(live_P, _last(tokens_PT, length_P), prefix.token)
        return self._place(
            dataclasses.replace(prefix, length=prefix.length + length_P, token=token_P)
        )

    def _append(
        self, context: Prefix, new: Cache, tokens_nW: jax.Array, live_n: jax.Array
    ) -> Prefix:
        """`context` with W tokens more in the cache and the history of its live slots; no length changes."""

        def append(context: Prefix, new: _NewTokens, live_n):
            start_n = context.length
            history = slot_moves.written(
                context.history, _PREFIX_AXES.history, new.tokens, start_n, live_n
            )
            cache = self._cache.write(context.cache, new.cache, start_n, live_n)
            return dataclasses.replace(context, cache=cache, history=history)

        return self._on_own_slots(append, context, _NewTokens(new, tokens_nW), live_n)

    def _with_capacity(self, prefix: Prefix, capacity: int) -> Prefix:
        history = slot_moves.with_capacity(prefix.history, _PREFIX_AXES.history, capacity)
        cache = self._cache.resize(prefix.cache, capacity)
        return dataclasses.replace(prefix, cache=cache, history=history)

    def _widen(self, prefix: Prefix, *, capacity: int) -> Prefix:
        """A copy of the prefix with room for `capacity` tokens."""
        return self._place(self._with_capacity(prefix, capacity))

    # Slots

    def _insert(
        self,
        prefix: Prefix,
        state: DecodeState,
        assignment: Assignment,
        seed: jax.Array,
        step: jax.Array,
        temperature: jax.Array,
        truncation: Truncation,
    ) -> DecodeState:
        """Starts samples in the assigned slots, whose capacity is at least the prefix's."""
        new_n = assignment.source >= 0

        def put(old, new):
            return jnp.where(new_n.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

        key_n2 = sample_keys(seed, step, assignment.prompt_id, assignment.sample_index)
        return self._place(
            state.replace(
                context=self._on_own_slots(
                    self._copied, state.context, assignment.source, whole=prefix
                ),
                key=put(state.key, key_n2),
                temperature=put(state.temperature, temperature),
                truncation=jax.tree.map(put, state.truncation, truncation),
                count=put(state.count, assignment.count),
                limit=put(state.limit, assignment.limit),
                active=put(state.active, True),
                out_count=put(state.out_count, 0),
            )
        )

    def _extract(
        self, state: DecodeState, slot_P: jax.Array, length_P: jax.Array, token_P: jax.Array
    ) -> Prefix:
        """The sequences in some slots, or the beginnings of them, to be extended and inserted again.

        Args:
          state: not consumed.
          slot_P: int32 [P], P slots in equal runs from every shard, each counted within its shard.
          length_P, token_P: as of `Prefix`: where each is to end.
        """

        def take(context: Prefix, slot_P):
            taken = slot_moves.taken(_without_cache(context), _PREFIX_AXES, slot_P)
            return dataclasses.replace(taken, cache=self._cache.take(context.cache, slot_P))

        context = self._on_own_slots(take, state.context, slot_P)
        return dataclasses.replace(context, length=length_P, token=token_P)

    def _resize(self, state: DecodeState, slot_n: jax.Array, *, capacity: int) -> DecodeState:
        """A state of other slots and capacity; what the slots in use hold stays as it is.

        Args:
          state: the old one, not consumed: its arrays have other shapes.
          slot_n: int32, for each new slot the old one that it takes over, counted within its shard, or -1
            for an idle slot.
          capacity: C, at least W more than the longest sequence of an active slot.
        """
        idle = self._idle_state(slot_n.shape[0], capacity)
        return self._on_own_slots(self._copied, idle, slot_n, state)

    def _copied(self, tree: Any, source_n: jax.Array, other: Any) -> Any:
        """A state or prefix with slot i replaced by slot source_n[i] of `other`, unless that is negative."""
        if isinstance(tree, DecodeState):
            rest, others = tree.replace(context=None), other.replace(context=None)
            copied = slot_moves.copied(rest, _slots_first(rest), others, source_n)
            return copied.replace(context=self._copied(tree.context, source_n, other.context))
        rest, others = _without_cache(tree), _without_cache(other)
        copied = slot_moves.copied(rest, _PREFIX_AXES, others, source_n)
        return dataclasses.replace(
            copied, cache=self._cache.copy(tree.cache, other.cache, source_n)
        )

    def _release(self, state: DecodeState, keep_n: jax.Array) -> DecodeState:
        """Retires the active slots where `keep_n`, bool, is False."""
        return state.replace(active=state.active & keep_n)

    # Decoding

    def _generate(
        self, params: Params, state: DecodeState, least_active: jax.Array | int = 0
    ) -> DecodeState:
        """Decodes up to W tokens in every active slot; stops early at `least_active` active slots.

        Args:
          params: weights in the generation layout.
          state: consumed. Its capacity is at least W more than the longest active sequence.
          least_active: int32 scalar, the dispatch ends when no more are active; 0 goes on while any is.
        """
        model: Decoder = nnx.merge(self._graph, params)
        W, start = self.config.tokens_per_dispatch, state.context
        buffer = self._cache.buffer(state.num_slots, W)
        step = _Step(
            jnp.int32(0),
            jax.tree.map(self._constrain, buffer, self._cache.axes(buffer)),
            start.token,
            state.active,
            jnp.zeros_like(state.count),
            jnp.zeros_like(state.out_token),
            jnp.zeros_like(state.out_logprob),
            jnp.zeros_like(state.out_entropy),
        )
        on_past = self._cache.decoding(model, start.cache, start.length)

        def unfinished(step: _Step):
            return (step.i < W) & (step.active.sum() > least_active)

        def decode(step: _Step):
            return self._decode(model, on_past, state, step)

        step = jax.lax.while_loop(unfinished, decode, step)
        fed_nW = jnp.concatenate([start.token[:, None], step.out_token[:, :-1]], axis=1)
        context = self._append(start, step.recent, fed_nW, state.active)
        return self._place(
            state.replace(
                context=dataclasses.replace(
                    context, length=start.length + step.out_count, token=step.token
                ),
                count=state.count + step.out_count,
                active=step.active,
                out_count=step.out_count,
                out_token=step.out_token,
                out_logprob=step.out_logprob,
                out_entropy=step.out_entropy,
            )
        )

    def _decode(
        self, model: Decoder, on_past: DecodeStep, state: DecodeState, step: _Step
    ) -> _Step:
        """One token for every active slot."""
        i = step.i
        hidden_n1D, new = on_past(step.recent, i, step.active).run(
            model,
            step.token[:, None],
            (state.context.length + i)[:, None],
            step.active[:, None],
            self._compute,
        )
        logits_nV = model.logits(hidden_n1D[:, 0], compute=self._compute)
        token_n, logprob_n, entropy_n = self._sample(logits_nV, state, step)
        stopped_n = jnp.isin(token_n, jnp.array(self.config.stop_ids, jnp.int32))
        stopped_n |= state.count + i + 1 >= state.limit

        def at_i(all_nW, new_n):
            new_n = jnp.where(step.active, new_n, jnp.zeros_like(new_n))
            return jax.lax.dynamic_update_slice_in_dim(all_nW, new_n[:, None], i, 1)

        return _Step(
            i + 1,
            self._cache.put(step.recent, new, i),
            jnp.where(step.active, token_n, step.token),
            step.active & ~stopped_n,
            step.out_count + step.active.astype(jnp.int32),
            at_i(step.out_token, token_n),
            at_i(step.out_logprob, logprob_n),
            at_i(step.out_entropy, entropy_n),
        )

    def _sample(self, logits_nV: jax.Array, state: DecodeState, step: _Step):
        """Draws tokens; log-probability and entropy are those of the tempered distribution alone."""
        greedy_n = state.temperature == 0
        position_n = state.count + step.i
        scaled_nV = logits_nV / jnp.where(greedy_n, 1.0, state.temperature)[:, None]
        choice_nV = penalize(
            scaled_nV, state.truncation, lambda: _seen(logits_nV.shape[-1], state, step)
        )
        choice_nV = forbid(choice_nV, state.truncation, position_n, self.config.stop_ids)
        noise_nV = gumbel_noise(state.key, position_n, self.model.vocab_size)
        noise_nV = jnp.where(greedy_n[:, None], 0.0, noise_nV)
        token_n = draw(choice_nV, noise_nV, state.truncation)
        logprobs_nV, entropy_n = log_softmax_entropy(scaled_nV)
        return token_n, jnp.take_along_axis(logprobs_nV, token_n[:, None], axis=-1)[:, 0], entropy_n


def _seen(vocab_size: int, state: DecodeState, step: _Step) -> jax.Array:
    """Bool [n, V]: the token occurs in the slot's sequence so far."""
    context = state.context
    slot_n1 = jnp.arange(state.num_slots)[:, None]
    place_1C = jnp.arange(context.capacity)[None]
    # Places that are not in use point outside of the vocabulary, which JAX drops.
    past_nC = jnp.where(place_1C < context.length[:, None], context.history, vocab_size)
    decoded_1W = jnp.arange(step.out_token.shape[1])[None] < step.i
    decoded_nW = jnp.where(decoded_1W, step.out_token, vocab_size)
    seen_nV = jnp.zeros((state.num_slots, vocab_size), bool)
    for tokens in (past_nC, decoded_nW, context.token[:, None]):
        seen_nV = seen_nV.at[slot_n1, tokens].set(True, mode="drop")
    return seen_nV


def _last(tokens_PT: jax.Array, length_P: jax.Array) -> jax.Array:
    """The last real token of each sequence, the first of an empty one."""
    return jnp.take_along_axis(tokens_PT, jnp.maximum(length_P - 1, 0)[:, None], axis=1)[:, 0]


def _slots_first(tree: Any) -> Any:
    """Logical axes of arrays that lead with slots."""
    return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), tree)


def _without_cache(prefix: Prefix) -> Prefix:
    return dataclasses.replace(prefix, cache=None)


def host_inputs(mesh: Mesh, *arrays: Any) -> tuple[jax.Array, ...]:
    """Small host arrays, replicated over `mesh`."""
    return tuple(put(a, replicated(mesh)) for a in arrays)
