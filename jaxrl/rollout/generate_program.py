"""The programs that run the model: over known sequences, and to decode up to W tokens in every active slot.

While decoding, the past is only read. The keys and values of the new tokens go to a buffer, at the same index
for all slots, and join the cache at the end.

    n slots   P sequences of a prefix   T tokens   W tokens of a dispatch   C capacity in tokens
    D model width   V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.algos.logprobs import log_softmax_entropy, of_tokens
from jaxrl.algos.truncation import kept_tokens
from jaxrl.models.cache.cache_kind import Attention, Cache, DecodeStep
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import Decoder, Params
from jaxrl.rollout.decode_state import (
    DecodedTokens,
    DecodeState,
    Prefix,
    TokenScores,
    TopTokens,
)
from jaxrl.rollout.sampling import (
    MOST_TOP_LOGPROBS,
    draw,
    draw_whole,
    forbid,
    gumbel_noise,
    largest,
    penalize,
)
from jaxrl.rollout.slot_programs import SlotPrograms

# Places of which a scoring program has logits at the same time: 156 MB with 152k tokens.
_SCORED_ROWS = 256


class DecodeProgress(NamedTuple):
    """The part of a state that changes during a dispatch.

    Attributes:
      i: int32 scalar, number of tokens decoded so far in every slot that is still active.
      recent: keys and values of these tokens but the newest, in a buffer of the `CacheKind`.
      newest: keys and values of the newest of these tokens; the next iteration writes them to the buffer.
        None if they are in it, as with `CacheKind.lists_buffers`.
      token, active, decoded: as in `DecodeState`.
      top: the most probable tokens; None if they are not asked for.
    """

    i: jax.Array
    recent: Cache
    newest: Cache
    token: jax.Array
    active: jax.Array
    decoded: DecodedTokens
    top: TopTokens | None


@dataclasses.dataclass(frozen=True, eq=False)
class ModelPrograms:
    """The programs of one model; `prefill`, `extend` and `generate` may be traced.

    Attributes:
      graph, compute: graph of the model, and how it computes on the mesh.
      attention: attention within a prompt.
      slots: slot programs over the same cache; they do not run the model.
      stop_ids: token ids that end a response.
    """

    graph: nnx.GraphDef
    compute: Compute
    attention: Attention
    slots: SlotPrograms
    stop_ids: tuple[int, ...]

    def _compute_of(self, adapter_B: jax.Array | None) -> Compute:
        """How the model computes for rows with these adapters, int32; None without a stack of adapters."""
        return dataclasses.replace(self.compute, adapter_B=adapter_B)

    def prefill(
        self,
        params: Params,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        adapter_P: jax.Array | None = None,
    ) -> Prefix:
        """Runs P sequences of `length_P` tokens, padded on the right, and returns their keys and values."""
        return self._prefill(params, tokens_PT, length_P, adapter_P)[0]

    def prefill_scored(
        self,
        params: Params,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        adapter_P: jax.Array | None = None,
    ) -> tuple[Prefix, TokenScores]:
        """`prefill` with the scores of all tokens but the first: entry t is about token t + 1."""
        prefix, hidden_PTD = self._prefill(params, tokens_PT, length_P, adapter_P)
        return prefix, self._scores(params, hidden_PTD, jnp.roll(tokens_PT, -1, axis=1))

    def _prefill(
        self,
        params: Params,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        adapter_P: jax.Array | None,
    ) -> tuple[Prefix, jax.Array]:
        model: Decoder = nnx.merge(self.graph, params)
        P, T = tokens_PT.shape
        positions_PT = jnp.broadcast_to(jnp.arange(T), (P, T))
        # Padding follows the prompt, so the causal mask alone hides it from real tokens.
        one_segment_PT = jnp.ones((P, T), jnp.int32)
        # The last token is run by the next decode step, so a state must not have it. Its own results are not
        # used: they are the only ones that depend on whether it is live.
        live_PT = positions_PT < length_P[:, None] - 1
        new = self.slots.cache.prefill(self.attention, one_segment_PT)
        compute = self._compute_of(adapter_P)
        hidden_PTD, cache = new.run(model, tokens_PT, positions_PT, live_PT, compute)
        prefix = Prefix(cache, tokens_PT, length_P - 1, _last(tokens_PT, length_P))
        return self.slots.layout.place(prefix), hidden_PTD

    def _scores(self, params: Params, hidden_PTD: jax.Array, target_PT: jax.Array) -> TokenScores:
        """Scores of the tokens `target_PT`, each after the place of the same index."""
        model: Decoder = nnx.merge(self.graph, params)
        P, T = target_PT.shape
        # A block at a time: logits of all places at once may be larger than the weights.
        block = min(T, max(1, _SCORED_ROWS // P))
        padded = ((0, 0), (0, -T % block))
        hidden = jnp.pad(hidden_PTD, (*padded, (0, 0))).reshape(P, -1, block, hidden_PTD.shape[-1])
        target = jnp.pad(target_PT, padded).reshape(P, -1, block)

        def scores(given: tuple[jax.Array, jax.Array]) -> TokenScores:
            hidden_PBD, target_PB = given
            logits_NV = model.logits(hidden_PBD.reshape(P * block, -1), compute=self.compute)
            logits_NV = self.compute.constrain(logits_NV, ("batch", "vocab"))
            logprobs_NV, _ = log_softmax_entropy(logits_NV)
            logprob_N = of_tokens(logprobs_NV, target_PB.reshape(-1))
            rank_N = 1 + (logprobs_NV > logprob_N[:, None]).sum(axis=1, dtype=jnp.int32)
            token_NK = largest(logprobs_NV, min(MOST_TOP_LOGPROBS, logprobs_NV.shape[1]))
            top = TopTokens(token_NK, jnp.take_along_axis(logprobs_NV, token_NK, axis=1))
            return TokenScores(logprob_N, rank_N, top)

        found = jax.lax.map(scores, (jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(target, 1, 0)))

        def in_order(of_blocks: jax.Array) -> jax.Array:
            blocks = of_blocks.reshape(-1, P, block, *of_blocks.shape[2:])
            return jnp.moveaxis(blocks, 0, 1).reshape(P, -1, *blocks.shape[3:])[:, :T]

        return jax.tree.map(in_order, found)

    def extend(
        self,
        params: Params,
        prefix: Prefix,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        adapter_P: jax.Array | None = None,
    ) -> Prefix:
        """Appends tokens to sequences that have room for them.

        The model runs the prefix's last token and all new tokens but the newest (see `Prefix`).

        Args:
          params: weights in the generation layout.
          prefix: sequences to extend; consumed.
          tokens_PT: int32 [P, T], padded on the right.
          length_P: int32 [P], number of new tokens; 0 leaves a sequence unchanged.
          adapter_P: see `_compute_of`.
        """
        return self._extend(params, prefix, tokens_PT, length_P, adapter_P)[0]

    def extend_scored(
        self,
        params: Params,
        prefix: Prefix,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        adapter_P: jax.Array | None = None,
    ) -> tuple[Prefix, TokenScores]:
        """`extend` with the scores of the new tokens."""
        prefix, hidden_PTD = self._extend(params, prefix, tokens_PT, length_P, adapter_P)
        return prefix, self._scores(params, hidden_PTD, tokens_PT)

    def _extend(
        self,
        params: Params,
        prefix: Prefix,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        adapter_P: jax.Array | None,
    ) -> tuple[Prefix, jax.Array]:
        model: Decoder = nnx.merge(self.graph, params)
        fed_PT = jnp.concatenate([prefix.token[:, None], tokens_PT[:, :-1]], axis=1)
        offset_PT = jnp.broadcast_to(jnp.arange(fed_PT.shape[1]), fed_PT.shape)
        positions_PT, live_PT = prefix.length[:, None] + offset_PT, offset_PT < length_P[:, None]
        on_top = self.slots.cache.extend(model, prefix.cache, prefix.length)
        compute = self._compute_of(adapter_P)
        hidden_PTD, new = on_top.run(model, fed_PT, positions_PT, live_PT, compute)
        live_P = length_P > 0
        # Padding may exceed the capacity; JAX would then shift the write backwards. So widen the cache first.
        wide = self.slots.with_capacity(prefix, prefix.capacity + fed_PT.shape[1])
        wide = self.slots.append(wide, new, fed_PT, live_P)
        prefix = self.slots.with_capacity(wide, prefix.capacity)
        token_P = jnp.where(live_P, _last(tokens_PT, length_P), prefix.token)
        prefix = dataclasses.replace(prefix, length=prefix.length + length_P, token=token_P)
        return self.slots.layout.place(prefix), hidden_PTD

    def generate(
        self,
        params: Params,
        state: DecodeState,
        least_active: jax.Array | int = 0,
        adapter_n: jax.Array | None = None,
    ) -> DecodeState:
        """Decodes up to W tokens in every active slot; stops early at `least_active` active slots.

        Args:
          params: weights in the generation layout.
          state: state of the slots; consumed. Its capacity exceeds the longest active sequence by W or more.
          least_active: int32 scalar, number of active slots at which to stop; 0 decodes while any is active.
          adapter_n: see `_compute_of`.
        """
        steps = self.slots.tokens_per_dispatch
        return self._generate(params, state, least_active, steps, adapter_n=adapter_n)[0]

    def generate_edited(
        self,
        params: Params,
        state: DecodeState,
        least_active: jax.Array,
        steps: jax.Array,
        row_n: jax.Array,
        rows_EV: jax.Array,
    ) -> tuple[DecodeState, TopTokens]:
        """`generate` with other logits in some slots; finds the most probable tokens, too.

        Args:
          params, state, least_active: as for `generate`.
          steps: int32 scalar, number of tokens to decode, 1 to W; with rows that change with every token it
            is 1.
          row_n: int32, row of each slot; -1 for none.
          rows_EV: float32, values added to the logits, before temperature and truncation. Log-probabilities
            and entropies stay those without them.
        """
        rows_nV = jnp.where(row_n[:, None] < 0, 0.0, rows_EV[jnp.maximum(row_n, 0)])
        n, W = state.decoded.token.shape
        K = min(MOST_TOP_LOGPROBS, rows_nV.shape[1])
        top = TopTokens(jnp.zeros((n, W, K), jnp.int32), jnp.zeros((n, W, K)))
        return self._generate(params, state, least_active, steps, rows_nV, top)

    def _generate(
        self,
        params: Params,
        state: DecodeState,
        least_active: jax.Array | int,
        steps: jax.Array | int,
        rows_nV: jax.Array | None = None,
        top: TopTokens | None = None,
        adapter_n: jax.Array | None = None,
    ) -> tuple[DecodeState, Any]:
        """See `generate_edited`; `top` has room for what is found, or is None."""
        model: Decoder = nnx.merge(self.graph, params)
        cache, W = self.slots.cache, self.slots.tokens_per_dispatch
        past = cache.decoding(model, state.context.cache, state.context.length)
        # For all new keys and values, and for the newest: the loop never scatters into the large cache
        # arrays.
        held = state.context.cache
        buffers = (cache.buffer_after(held, state.num_slots, tokens) for tokens in (W, 1))
        recent, newest = (
            jax.tree.map(self.slots.layout.constrain, b, cache.axes(b)) for b in buffers
        )
        if cache.lists_buffers:
            recent, newest = cache.apart(recent), None
        progress = DecodeProgress(
            jnp.int32(0),
            recent,
            newest,
            state.context.token,
            state.active,
            jax.tree.map(jnp.zeros_like, state.decoded),
            top,
        )
        progress = jax.lax.while_loop(
            lambda progress: (progress.i < steps) & (progress.active.sum() > least_active),
            lambda progress: self._decode(model, past, state, progress, rows_nV, adapter_n),
            progress,
        )
        return self.slots.layout.place(self._end(state, progress)), progress.top

    def _end(self, state: DecodeState, progress: DecodeProgress) -> DecodeState:
        """The state after a dispatch: all tokens but the newest of each slot are in the cache."""
        start, decoded = state.context, progress.decoded
        # This dispatch ran the newest token of the last one first, and did not run its own newest token.
        fed_nW = jnp.concatenate([start.token[:, None], decoded.token[:, :-1]], axis=1)
        # The loop has left the newest of them outside the buffer.
        cache, recent = self.slots.cache, progress.recent
        if progress.newest is None:
            recent = cache.stacked(recent)
        else:
            recent = cache.put(recent, progress.newest, progress.i - 1)
        context = self.slots.append(start, recent, fed_nW, state.active)
        return state.replace(
            context=dataclasses.replace(
                context, length=start.length + decoded.count, token=progress.token
            ),
            count=state.count + decoded.count,
            active=progress.active,
            decoded=decoded,
        )

    def _decode(
        self,
        model: Decoder,
        past: DecodeStep,
        state: DecodeState,
        progress: DecodeProgress,
        rows_nV: jax.Array | None,
        adapter_n: jax.Array | None,
    ) -> DecodeProgress:
        i, active, decoded = progress.i, progress.active, progress.decoded
        # Keys and values of all tokens so far. Before the first, index 0 is overwritten later. Written before
        # the buffer is read: XLA on CPU copies a buffer that is written after it was read.
        cache, recent = self.slots.cache, progress.recent
        if progress.newest is not None:
            recent = cache.put(recent, progress.newest, i - 1)
        hidden_n1D, new = past(recent, i, active).run(
            model,
            progress.token[:, None],
            (state.context.length + i)[:, None],
            active[:, None],
            self._compute_of(adapter_n),
        )
        if progress.newest is None:
            recent, new = cache.put(recent, new, i), None
        # Without adapters, which the head does not have.
        logits_nV = model.logits(hidden_n1D[:, 0], compute=self.compute)

        def seen():
            decoded_1W = jnp.arange(decoded.token.shape[1])[None] < i
            vocab_size = logits_nV.shape[-1]
            decoded_nW = jnp.where(decoded_1W, decoded.token, vocab_size)
            return seen_tokens(vocab_size, state.context, decoded_nW)

        token_n, logprob_n, entropy_n = sample(
            logits_nV, state, state.count + i, self.stop_ids, seen, self.compute, rows_nV
        )
        stopped_n = jnp.isin(token_n, jnp.array(self.stop_ids, jnp.int32)) & state.stops
        stopped_n |= state.count + i + 1 >= state.limit

        def at_i(all_nW, new_n):
            new_n = jnp.where(active, new_n, jnp.zeros_like(new_n))
            return jax.lax.dynamic_update_slice_in_dim(all_nW, new_n[:, None], i, 1)

        top = progress.top
        if top is not None:
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i, axis=1)
            found = top_tokens(logits_nV, state.temperature, top.token.shape[2])
            top = TopTokens(*(put(old, new[:, None]) for old, new in zip(top, found, strict=True)))

        return DecodeProgress(
            i + 1,
            recent,
            new,
            jnp.where(active, token_n, progress.token),
            active & ~stopped_n,
            DecodedTokens(
                decoded.count + active.astype(jnp.int32),
                at_i(decoded.token, token_n),
                at_i(decoded.logprob, logprob_n),
                at_i(decoded.entropy, entropy_n),
            ),
            top,
        )


def sample(
    logits_nV: jax.Array,
    state: DecodeState,
    position_n: jax.Array,
    stop_ids: tuple[int, ...],
    seen: Callable[[], jax.Array],
    compute: Compute,
    rows_nV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token per slot.

    Args:
      logits_nV: logits of the next token.
      state: sampling keys, temperatures and truncations of the slots; nothing else of it is read.
      position_n: int32, number of response tokens before the next one.
      stop_ids: token ids that end a response.
      seen: function that returns bool [n, V], the tokens that a repetition penalty applies to.
      compute: implementation choices of the model; nothing but `constrain` of it is used.
      rows_nV: float32, values added to the logits that a token is drawn by; None for none.

    Returns:
      int32 [n] tokens, and float32 [n] log-probabilities and entropies under the tempered distribution. They
      are of the whole vocabulary. Log-probabilities of slots with `Truncation.renormalized` are of the tokens
      that top-k, top-p and min-p keep of it.
    """
    limits, temperature_n = state.truncation, state.temperature
    scaled_nV = _scaled(logits_nV, temperature_n)

    def choice_of(x_nV: jax.Array) -> jax.Array:
        """The logits that a token is drawn by."""
        if rows_nV is not None:
            x_nV = x_nV + _scaled(rows_nV, temperature_n)
        return forbid(x_nV, limits, position_n, stop_ids)

    def noise() -> jax.Array:
        noise_nV = gumbel_noise(state.key, position_n, logits_nV.shape[-1])
        return jnp.where((temperature_n == 0)[:, None], 0.0, noise_nV)

    is_limited = (limits.keeps_some | (limits.repetition_penalty != 1)).any()
    drawn = draw_whole(scaled_nV, lambda: choice_of(scaled_nV), noise, ~is_limited)
    # What is subtracted from a log-probability to renormalise it; 0 for slots that are not renormalised.
    wanted_n = limits.renormalized & limits.keeps_some

    def limited() -> tuple[jax.Array, jax.Array]:
        # The compiler does not see through the conditional and would gather the vocabulary on every device:
        # 156 MB a token for 256 slots of a 32B model (docs/decoding.md).
        axes = ("batch", "vocab")
        x_nV = compute.constrain(logits_nV, axes)
        penalized_nV = penalize(_scaled(x_nV, temperature_n), limits, seen)
        penalized_nV = compute.constrain(penalized_nV, axes)
        token_n = draw(choice_of(penalized_nV), noise(), limits)

        def log_mass() -> jax.Array:
            scaled_nV = _scaled(x_nV, temperature_n)
            logprobs_nV = scaled_nV - drawn.largest[:, None] - drawn.log_total[:, None]
            kept = kept_tokens(logprobs_nV, jax.tree.map(lambda x: x[:, None], limits))
            return jnp.where(wanted_n, kept.log_mass[:, 0], 0.0)

        # `cond`: finding the last token that top-p keeps takes some 30 sums over V.
        log_mass_n = jax.lax.cond(wanted_n.any(), log_mass, lambda: jnp.zeros(wanted_n.shape))
        logit_n1 = _scaled(of_tokens(x_nV, token_n)[:, None], temperature_n)
        return token_n, drawn._replace(logit=logit_n1[:, 0]).logprob - log_mass_n

    # One conditional around all that few samples need. Its branch scales logits and makes noise again: what
    # it were given would be written to memory for every token.
    plain = lambda: (drawn.token, drawn.logprob)  # noqa: E731
    token_n, logprob_n = jax.lax.cond(is_limited, limited, plain)
    return token_n, logprob_n, drawn.entropy


def top_tokens(logits_nV: jax.Array, temperature_n: jax.Array, count: int) -> TopTokens:
    """The most probable tokens of each slot, [n, K]."""
    logprobs_nV, _ = log_softmax_entropy(_scaled(logits_nV, temperature_n))
    token_nK = largest(logprobs_nV, count)
    return TopTokens(token_nK, jnp.take_along_axis(logprobs_nV, token_nK, axis=1))


def _scaled(logits_nV: jax.Array, temperature_n: jax.Array) -> jax.Array:
    """Logits divided by the temperature; unchanged for greedy slots."""
    return logits_nV / jnp.where(temperature_n == 0, 1.0, temperature_n)[:, None]


def seen_tokens(vocab_size: int, context: Prefix, decoded_nW: jax.Array) -> jax.Array:
    """Bool [n, V], whether the token occurs in the slot's sequence so far.

    Args:
      vocab_size: V.
      context: sequences of the slots.
      decoded_nW: int32, tokens decoded since; `vocab_size` for none.
    """
    slot_n1 = jnp.arange(len(context.token))[:, None]
    index_1C = jnp.arange(context.capacity)[None]
    # Unused entries get an index outside of the vocabulary; JAX drops such updates.
    past_nC = jnp.where(index_1C < context.length[:, None], context.history, vocab_size)
    seen_nV = jnp.zeros((len(context.token), vocab_size), bool)
    for tokens in (past_nC, decoded_nW, context.token[:, None]):
        seen_nV = seen_nV.at[slot_n1, tokens].set(True, mode="drop")
    return seen_nV


def _last(tokens_PT: jax.Array, length_P: jax.Array) -> jax.Array:
    """The last real token of each sequence; the first token of an empty one."""
    return jnp.take_along_axis(tokens_PT, jnp.maximum(length_P - 1, 0)[:, None], axis=1)[:, 0]
