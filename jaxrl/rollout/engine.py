"""The compiled half of rollout: prefill, insert and generate over rows of slots.

The methods and their meaning are those of JetStream's `engine_api.Engine`; nothing of it is imported
here. One state holds n rows of capacity C; `resize` moves the rows that are in use to a state of another n
and C, so that a dispatch costs what its live rows and their lengths cost:

    prefill    prompts -> Prefix                 once per prompt, in chunks where it is long
    insert     Prefix -> rows of a state         once per sample
    generate   up to W tokens in every active row; the past is only read, the W new tokens wait in a
               buffer of their own and join the cache at the end of the dispatch
    extract    rows of a state -> Prefix         to go on after tokens that the model did not sample
    resize     state -> state of n' rows and capacity C'

Programs are compiled per size on first use; sizes come from `slot_sizes`, `cache_sizes`, `prompt_sizes` and
`batch_sizes`, so their number is bounded. Not covered: paged caches; slots that share a prompt each hold a
copy of its keys and values.

    S slots, n of them rows of the state   P prompts of a prefill batch   T prompt tokens
    W tokens of a dispatch   C capacity of a row   L layers   K kv heads   H head size   V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl.checks import MAX_LAYERS, at_least, check_fields, count, one_of, token_count
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
from jaxrl.models.attention import IMPLEMENTATIONS, attention, pick_implementation
from jaxrl.models.cached_attention import (
    KVCache,
    PartialAttention,
    cache_axes,
    cache_of,
    cached_attention,
    empty_cache,
    extending_attention,
    put_token,
)
from jaxrl.models.cached_attention_paged import IMPLEMENTATIONS as DECODE_IMPLEMENTATIONS
from jaxrl.models.cached_attention_paged import KERNELS, pick_decode_implementation
from jaxrl.models.compute import Compute, scan_layers
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, Params
from jaxrl.models.experts import apply_experts
from jaxrl.models.logprobs import log_softmax_entropy
from jaxrl.rollout import rows
from jaxrl.rollout.buckets import ladder
from jaxrl.rollout.layers import layers_apart
from jaxrl.rollout.past_attention import PastAttention, past_attention
from jaxrl.rollout.sampling import (
    Truncation,
    forbid,
    gumbel_noise,
    penalize,
    sample_keys,
    sample_tokens,
    truncate,
    untruncated,
)

# The smallest sizes worth a program of their own.
_SHORTEST_CACHE, _SHORTEST_PROMPT = 64, 64
# The longest cache is a multiple of so many tokens where a kernel reads it page by page.
_PAGE = 128


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Shapes of the compiled programs.

    Attributes:
      slots: S, samples decoded side by side at most.
      fewest_rows: a state has so many rows at least, however few are in use. The more, the fewer programs are
        compiled, and the slower the last samples of a batch are decoded.
      prefill_prompts: P, prompts of one prefill.
      max_prompt_tokens: T.
      max_response_tokens: R, end-of-sequence included.
      context_tokens: of a prompt and its response together; 0 is T + R.
      tokens_per_dispatch: W, tokens decoded between two looks of the host.
      stop_ids: ids that end a response.
      dtype: of weights and activations.
      kv_dtype: of the cache, float32, bfloat16 or int8 (with a scale per token and head); None is `dtype`.
      prefill_chunk_tokens: prompts are prefilled so many tokens at a time; 0 is all at once.
      unroll: layers per iteration of the layer scan. With all of them decoding has no scan, and every layer
        its own arrays, its cache for good and its weights for a dispatch: on CPU, where a scan copies both to
        use them, that is twice as fast.
      attention: of prefill, "auto" or one of `models.attention.IMPLEMENTATIONS`.
      decode_attention: to the past, "auto" or one of `models.cached_attention_paged.IMPLEMENTATIONS`.
    """

    slots: Annotated[int, count(1)]
    prefill_prompts: Annotated[int, count(1)]
    max_prompt_tokens: Annotated[int, token_count(1)]
    max_response_tokens: Annotated[int, token_count(1)]
    tokens_per_dispatch: Annotated[int, token_count(1)]
    stop_ids: tuple[Annotated[int, at_least(0)], ...]
    dtype: Any = jnp.float32
    kv_dtype: Any = None
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 0
    fewest_rows: Annotated[int, count(1)] = 8
    unroll: Annotated[int, at_least(1, at_most=MAX_LAYERS)] = 1
    attention: Annotated[str, one_of("auto", *IMPLEMENTATIONS)] = "auto"
    decode_attention: Annotated[str, one_of("auto", *DECODE_IMPLEMENTATIONS)] = "auto"
    context_tokens: Annotated[int, token_count(0)] = 0

    def __post_init__(self):
        check_fields(self)
        allowed = ("float32", "bfloat16", "int8")
        if self.cache_dtype.name not in allowed:
            raise UserError(
                f"kv_dtype {self.cache_dtype.name}: a cache is kept in one of {', '.join(allowed)}"
            )

    @property
    def cache_dtype(self) -> Any:
        """Type of the cache."""
        return jnp.dtype(self.kv_dtype if self.kv_dtype is not None else self.dtype)

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence."""
        return self.context_tokens or self.max_prompt_tokens + self.max_response_tokens

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one prefill program."""
        return self.prefill_chunk_tokens or self.max_context_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Sequences so far: all but their last token is cached, which the next step reads.

    Attributes:
      cache: keys and values [L, P, ..], of some capacity C; or, where layers are computed apart, a list of
        caches of one layer [1, P, ..].
      history: int32 [P, C], the cached tokens.
      length: int32 [P], how many.
      token: int32 [P], the last token.
    """

    cache: KVCache | list[KVCache]
    history: jax.Array
    length: jax.Array
    token: jax.Array

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.history.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignment:
    """What `insert` puts where; one entry per row.

    Attributes:
      source: int32 [n], index into the prefix, or -1 to leave the row alone.
      prompt_id, sample_index: int32 [n], what the sampling key is made of.
      limit: int32 [n], response tokens at which the row stops, at most R.
      count: int32 [n], response tokens that are already there.
    """

    source: jax.Array
    prompt_id: jax.Array
    sample_index: jax.Array
    limit: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All rows in flight.

    Attributes:
      context: the sequences so far; the newest token is not in its cache.
      key: uint32 [n, 2].
      temperature: float32 [n]; 0 is greedy.
      truncation: which tokens may be drawn, fields [n].
      count: int32 [n], response tokens so far.
      limit: int32 [n].
      active: bool [n], still decoding.
      out_count: int32 [n], tokens drawn by the last dispatch.
      out_token: int32 [n, W]; out_logprob, out_entropy: float32 [n, W], of which `out_count` are real.
    """

    context: Prefix
    key: jax.Array
    temperature: jax.Array
    truncation: Truncation
    count: jax.Array
    limit: jax.Array
    active: jax.Array
    out_count: jax.Array
    out_token: jax.Array
    out_logprob: jax.Array
    out_entropy: jax.Array

    @property
    def rows(self) -> int:
        """n."""
        return self.active.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.context.capacity

    def replace(self, **changes) -> DecodeState:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


class _Step(NamedTuple):
    """What changes within a dispatch, of which every row that is still active has drawn `i` tokens.

    Attributes:
      i: int32 scalar.
      recent: keys and values of these tokens, as `Engine._by_layer` has them.
      token, active, out_count, out_token, out_logprob, out_entropy: as of the state.
    """

    i: jax.Array
    recent: Any
    token: jax.Array
    active: jax.Array
    out_count: jax.Array
    out_token: jax.Array
    out_logprob: jax.Array
    out_entropy: jax.Array


class Engine:
    """Prefill, insert and generate for one model on one mesh. Each compiles once per size it meets.

    The sequence of a run, `load_params` aside, is: prefill some prompts, insert them into idle rows,
    generate until a row falls idle, read it, repeat; `resize` where more or fewer rows, or longer ones, are
    needed. On a mesh the rows are shared out in equal runs, and a row stays on its shard.
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
        self._compute = Compute(
            dtype=config.dtype,
            constrain=self._constrain,
            experts=expert_parallel(apply_experts, mesh, GENERATE_RULES),
            layers=pipeline(scan_layers, mesh, GENERATE_RULES),
            unroll=config.unroll,
        )
        platform = platform_of(mesh)
        implementation = pick_implementation(platform, config.dtype, config.attention)
        self._attention = attention_parallel(
            functools.partial(attention, implementation=implementation), mesh, GENERATE_RULES
        )
        one_stage = shards_of("layers", GENERATE_RULES, mesh) == 1
        self._past_attention = _kernel_of_past(model, mesh, config)
        all_unrolled = config.unroll >= model.num_layers and one_stage
        self._layers_apart = all_unrolled and self._past_attention is None
        # A pipeline hands every layer its cache; else a kernel finds a layer's part by its number.
        self._past_by_number = self._past_attention is not None and one_stage
        keys_last = "length" if platform in (None, "cpu") else "head_dim"
        self._cache_form: Any = {"dtype": config.cache_dtype, "keys_last": keys_last}
        self._cache_of = functools.partial(cache_of, **self._cache_form)
        self.shards = shards_of("batch", GENERATE_RULES, mesh)
        self.slot_sizes = self._shared_out(config.slots, config.fewest_rows)
        # Few: each is compiled for every prompt size, and so is inserting from it.
        prompts = max(1, config.prefill_prompts // self.shards)
        self.batch_sizes = tuple(n * self.shards for n in sorted({-(-prompts // 4), prompts}))
        longest = config.max_context_tokens + config.tokens_per_dispatch
        if self._past_attention is not None:
            longest += -longest % _PAGE
        self.cache_sizes = ladder(longest, _SHORTEST_CACHE)
        self.prompt_sizes = ladder(config.chunk_tokens, _SHORTEST_PROMPT)
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
        each = ladder(max(1, largest // self.shards), max(1, smallest // self.shards))
        return tuple(size * self.shards for size in each)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self.config.slots

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt in tokens."""
        return self.config.max_prompt_tokens

    def init_decode_state(self, rows: int = 0, capacity: int = 0) -> DecodeState:
        """A state with every row idle, born sharded.

        Args:
          rows: n, one of `slot_sizes`; 0 is all slots.
          capacity: C, one of `cache_sizes`; 0 is the longest.
        """
        return self._idle(rows or self.slot_sizes[-1], capacity or self.cache_sizes[-1])

    def abstract_decode_state(self) -> DecodeState:
        """Shapes and shardings of the slots at their largest, nothing allocated."""
        shapes = jax.eval_shape(self.init_decode_state)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings(_axes_of(shapes), shapes, GENERATE_RULES, self.mesh),
        )

    def _empty_cache(self, n: int, capacity: int) -> KVCache | list[KVCache]:
        m = self.model

        def empty(layers: int) -> KVCache:
            return empty_cache(layers, n, m.num_kv_heads, m.head_dim, capacity, **self._cache_form)

        if self._layers_apart:
            return [empty(1) for _ in range(m.num_layers)]
        return empty(m.num_layers)

    def _idle_state(self, n: int, capacity: int) -> DecodeState:
        W = self.config.tokens_per_dispatch
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        cache = self._empty_cache(n, capacity)
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

    # Where rows lie

    def _place(self, tree: Any) -> Any:
        """Pins every field to where its logical axes lie."""
        return jax.tree.map(self._constrain, tree, _axes_of(tree))

    def _on_own_rows(
        self, function: Callable[..., Any], tree: Any, *others: Any, whole: Any = None
    ) -> Any:
        """`function(tree, *others)`, each device with its own rows.

        Args:
          function: returns something of the structure and axes of `tree`.
          tree, others: rows of states or prefixes, or arrays of one entry per row.
          whole: a last argument, of which every device gets the rows of all.
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
            return partition_spec(axes, leaf.shape, GENERATE_RULES, sizes, "rows")

        return jax.tree.map(spec, tree, _axes_of(tree))

    # Prefill

    def _prefill(self, params: Params, tokens_PT: jax.Array, length_P: jax.Array) -> Prefix:
        """Runs P sequences of `length_P` tokens, padded on the right, and keeps keys and values."""
        model: Decoder = nnx.merge(self._graph, params)
        P, T = tokens_PT.shape
        positions_PT = jnp.broadcast_to(jnp.arange(T), (P, T))
        # Padding sits after the prompt, so causality alone hides it from real tokens.
        one_segment_PT = jnp.ones((P, T), jnp.int32)

        def attend(q, k, v, _, segment_ids):
            return self._attention(q, k, v, segment_ids), self._cache_of(k, v)

        _, cache, _ = model(
            tokens_PT,
            positions_PT,
            attend,
            compute=self._compute,
            per_row=one_segment_PT,
            live_BT=positions_PT < length_P[:, None],
        )
        if self._layers_apart:
            layers = range(self.model.num_layers)
            cache = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], cache) for i in layers]
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
        live_P = length_P > 0

        def attend(q, k, v, cache, cached_P):
            new = self._cache_of(k, v)
            return extending_attention(q, k, v, cache, cached_P), new

        _, new, _ = model(
            fed_PT,
            prefix.length[:, None] + offset_PT,
            attend,
            compute=self._compute_of(model),
            per_layer=self._by_layer(prefix.cache),
            per_row=prefix.length,
            live_BT=offset_PT < length_P[:, None],
        )
        # With padding there may be no room, which would move what is written: there is for a moment.
        wide = rows.with_capacity(prefix, _axes_of(prefix), prefix.capacity + fed_PT.shape[1])
        cache, history = self._append(wide, self._kept(new), fed_PT, live_P)
        kept = (cache, history)
        cache, history = rows.with_capacity(kept, _axes_of(kept), prefix.capacity)
        token_P = jnp.where(live_P, _last(tokens_PT, length_P), prefix.token)
        return self._place(Prefix(cache, history, prefix.length + length_P, token_P))

    def _append(
        self, context: Prefix, new: Any, tokens_nW: jax.Array, live_n: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Cache and history of `context`, with W tokens more in the live rows."""
        kept = (context.cache, context.history)

        def append(kept, new, length_n, live_n):
            return rows.written(kept, _axes_of(kept), new, length_n, live_n)

        return self._on_own_rows(append, kept, (new, tokens_nW), context.length, live_n)

    def _widen(self, prefix: Prefix, *, capacity: int) -> Prefix:
        """A copy of the prefix with room for `capacity` tokens."""
        return self._place(rows.with_capacity(prefix, _axes_of(prefix), capacity))

    # Rows

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
        """Starts samples in the assigned rows, whose capacity is at least the prefix's."""
        new_n = assignment.source >= 0

        def put(old, new):
            return jnp.where(new_n.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

        def copy(context, source_n, prefix):
            return rows.copied(context, _axes_of(context), prefix, source_n)

        key_n2 = sample_keys(seed, step, assignment.prompt_id, assignment.sample_index)
        return self._place(
            state.replace(
                context=self._on_own_rows(copy, state.context, assignment.source, whole=prefix),
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
        self, state: DecodeState, row_P: jax.Array, length_P: jax.Array, token_P: jax.Array
    ) -> Prefix:
        """The sequences in some rows, or the beginnings of them, to be extended and inserted again.

        Args:
          state: not consumed.
          row_P: int32 [P], P rows in equal runs from every shard, each counted within its shard.
          length_P, token_P: as of `Prefix`: where each is to end.
        """

        def take(context, row):
            return rows.taken(context, _axes_of(context), row)

        context = self._on_own_rows(take, state.context, row_P)
        return dataclasses.replace(context, length=length_P, token=token_P)

    def _resize(self, state: DecodeState, row_n: jax.Array, *, capacity: int) -> DecodeState:
        """A state of other rows and capacity; what the rows in use hold stays as it is.

        Args:
          state: the old one, not consumed: its arrays have other shapes.
          row_n: int32, for each new row the old one that it takes over, counted within its shard, or -1
            for an idle row.
          capacity: C, at least W more than the longest sequence of an active row.
        """

        def move(idle, row_n, state):
            return rows.copied(idle, _axes_of(idle), state, row_n)

        idle = self._idle_state(row_n.shape[0], capacity)
        return self._on_own_rows(move, idle, row_n, state)

    def _release(self, state: DecodeState, keep_n: jax.Array) -> DecodeState:
        """Retires the active rows where `keep_n`, bool, is False."""
        return state.replace(active=state.active & keep_n)

    # Decoding

    def _generate(
        self, params: Params, state: DecodeState, least_active: jax.Array | int = 0
    ) -> DecodeState:
        """Decodes up to W tokens in every active row; stops early when no more rows than that are active.

        Args:
          params: weights in the generation layout.
          state: consumed. Its capacity is at least W more than the longest active sequence.
          least_active: int32 scalar, see above; 0 goes on while any row is active.
        """
        model: Decoder = nnx.merge(self._graph, params)
        W, start = self.config.tokens_per_dispatch, state.context
        recent = self._empty_cache(state.rows, W)
        step = _Step(
            jnp.int32(0),
            self._by_layer(self._place(recent)),
            start.token,
            state.active,
            jnp.zeros_like(state.count),
            jnp.zeros_like(state.out_token),
            jnp.zeros_like(state.out_logprob),
            jnp.zeros_like(state.out_entropy),
        )
        past = self._by_layer(self._past(start.cache))
        compute = self._compute_of(model)

        def unfinished(step: _Step):
            return (step.i < W) & (step.active.sum() > least_active)

        def decode(step: _Step):
            return self._decode(model, compute, past, state, step)

        step = jax.lax.while_loop(unfinished, decode, step)
        recent = self._kept(step.recent)
        fed_nW = jnp.concatenate([start.token[:, None], step.out_token[:, :-1]], axis=1)
        cache, history = self._append(start, recent, fed_nW, state.active)
        context = Prefix(cache, history, start.length + step.out_count, step.token)
        return self._place(
            state.replace(
                context=context,
                count=state.count + step.out_count,
                active=step.active,
                out_count=step.out_count,
                out_token=step.out_token,
                out_logprob=step.out_logprob,
                out_entropy=step.out_entropy,
            )
        )

    def _past(self, cache: Any) -> Any:
        """What the layers get of the past: their part of it, or their number, int32 [L, n]."""
        if not self._past_by_number:
            return cache
        L, n = cache.v.shape[:2]
        return jnp.broadcast_to(jnp.arange(L)[:, None], (L, n))

    def _compute_of(self, model: Decoder) -> Compute:
        """How layers are run that get what `_by_layer` returns."""
        if not self._layers_apart:
            return self._compute
        return dataclasses.replace(self._compute, layers=layers_apart(model))

    def _by_layer(self, cache: Any) -> Any:
        """A cache as the layers take it: stacked for a scan, or without L one by one."""
        if not self._layers_apart:
            return cache
        return tuple(jax.tree.map(lambda leaf: leaf[0], layer) for layer in cache)

    def _kept(self, caches: Any) -> Any:
        """The inverse of `_by_layer`."""
        if not self._layers_apart:
            return caches
        return [jax.tree.map(lambda leaf: leaf[None], layer) for layer in caches]

    def _put_token(self, recent: Any, new: Any, i: jax.Array) -> Any:
        """`recent` with token `i` of the dispatch, both as `_by_layer` has them."""
        if not self._layers_apart:
            return put_token(recent, new, i)
        return tuple(put_token(old, one, i) for old, one in zip(recent, new, strict=True))

    def _decode(
        self, model: Decoder, compute: Compute, past: Any, state: DecodeState, step: _Step
    ) -> _Step:
        """One token for every active row."""
        i, length_n = step.i, state.context.length
        past_length_n = length_n
        if self._past_attention is not None:
            # A kernel reads nothing of an empty row, and nobody reads what an idle one gives.
            past_length_n = jnp.where(step.active, length_n, 0)

        def attend(q_n1QH, k_n1KH, v_n1KH, caches, lengths):
            q, k, v = q_n1QH[:, 0], k_n1KH[:, 0], v_n1KH[:, 0]
            new = self._cache_of(k_n1KH, v_n1KH)
            past, recent = zip(caches, lengths, strict=True)
            if self._past_attention is None:
                return cached_attention(q, k, v, [past, recent])[:, None], new
            of_past = self._attend_to_past(q, *past, state.context.cache)
            return cached_attention(q, k, v, [recent], of_past)[:, None], new

        per_layer: Any = (past, step.recent)
        if self._layers_apart:
            per_layer = tuple(zip(*per_layer, strict=True))
        hidden_n1D, new, _ = model(
            step.token[:, None],
            (length_n + i)[:, None],
            attend,
            compute=compute,
            per_layer=per_layer,
            per_row=(past_length_n, jnp.full_like(length_n, i)),
            live_BT=step.active[:, None],
        )
        logits_nV = model.logits(hidden_n1D[:, 0], compute=compute)
        token_n, logprob_n, entropy_n = self._sample(logits_nV, state, step)
        stopped_n = jnp.isin(token_n, jnp.array(self.config.stop_ids, jnp.int32))
        stopped_n |= state.count + i + 1 >= state.limit

        def at_i(all_nW, new_n):
            new_n = jnp.where(step.active, new_n, jnp.zeros_like(new_n))
            return jax.lax.dynamic_update_slice_in_dim(all_nW, new_n[:, None], i, 1)

        return _Step(
            i + 1,
            self._put_token(step.recent, new, i),
            jnp.where(step.active, token_n, step.token),
            step.active & ~stopped_n,
            step.out_count + step.active.astype(jnp.int32),
            at_i(step.out_token, token_n),
            at_i(step.out_logprob, logprob_n),
            at_i(step.out_entropy, entropy_n),
        )

    def _attend_to_past(
        self, q_nQH: jax.Array, past: Any, length_n: jax.Array, cache: Any
    ) -> PartialAttention:
        """Attention to what a layer got by `_past`; `cache` is that of all layers."""
        assert self._past_attention is not None, "asked for the kernel of an engine that has none"
        if self._past_by_number:
            return self._past_attention(q_nQH, cache, past[0], length_n)
        stack = jax.tree.map(lambda leaf: leaf[None], past)
        return self._past_attention(q_nQH, stack, jnp.int32(0), length_n)

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
        token_n = sample_tokens(
            truncate(choice_nV, state.truncation), jnp.where(greedy_n[:, None], 0.0, noise_nV)
        )
        logprobs_nV, entropy_n = log_softmax_entropy(scaled_nV)
        return token_n, jnp.take_along_axis(logprobs_nV, token_n[:, None], axis=-1)[:, 0], entropy_n


def _kernel_of_past(model: ModelConfig, mesh: Mesh, config: EngineConfig) -> PastAttention | None:
    """The kernel that attends to the past, or None where that is left to XLA."""
    implementation = pick_decode_implementation(
        platform_of(mesh), config.dtype, config.cache_dtype, model.head_dim, config.decode_attention
    )
    if implementation == "xla":
        return None
    return past_attention(KERNELS[implementation], mesh, GENERATE_RULES)


def _seen(vocab_size: int, state: DecodeState, step: _Step) -> jax.Array:
    """Bool [n, V]: the token occurs in the row's sequence so far."""
    context = state.context
    row_n1 = jnp.arange(state.rows)[:, None]
    place_1C = jnp.arange(context.capacity)[None]
    # Places that are not in use point outside of the vocabulary, which JAX drops.
    past_nC = jnp.where(place_1C < context.length[:, None], context.history, vocab_size)
    drawn_1W = jnp.arange(step.out_token.shape[1])[None] < step.i
    drawn_nW = jnp.where(drawn_1W, step.out_token, vocab_size)
    seen_nV = jnp.zeros((state.rows, vocab_size), bool)
    for tokens in (past_nC, drawn_nW, context.token[:, None]):
        seen_nV = seen_nV.at[row_n1, tokens].set(True, mode="drop")
    return seen_nV


def _last(tokens_PT: jax.Array, length_P: jax.Array) -> jax.Array:
    """The last real token of each sequence, the first of an empty one."""
    return jnp.take_along_axis(tokens_PT, jnp.maximum(length_P - 1, 0)[:, None], axis=1)[:, 0]


def _axes_of(tree: Any) -> Any:
    """Logical axes of every leaf: rows over the data-like and micro axes, kv heads over tensor_gen."""
    if isinstance(tree, KVCache):
        return cache_axes(tree)
    if isinstance(tree, list):
        return [cache_axes(layer) for layer in tree]
    if isinstance(tree, Prefix):
        per_row: Any = ("batch",)
        history: Any = ("batch", "length")
        return Prefix(_axes_of(tree.cache), history, per_row, per_row)
    if isinstance(tree, DecodeState):
        rest = tree.replace(context=None)
        per_row = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), rest)
        return per_row.replace(context=_axes_of(tree.context))
    if isinstance(tree, tuple):
        return _axes_of(tree[0]), ("batch", "length")
    return ("batch",)


def host_inputs(mesh: Mesh, *arrays: Any) -> tuple[jax.Array, ...]:
    """Small host arrays, replicated over `mesh`."""
    return tuple(put(a, replicated(mesh)) for a in arrays)
