"""The program that decodes a few slots by speculation: several tokens in one forward pass.

A token is the arg-max of logits plus noise, and the noise depends only on the sample and the position. So a
draft is right or wrong: if it is the token that would have been drawn, it is kept, and no probability is
compared. The tokens are those of `generate`, but for rounding (Daliri, Musco and Suresh, arXiv 2408.07978).

A round drafts k tokens for each row, runs the newest token and the drafts in one pass, draws a token after
each, and keeps the draws up to the first that differs from its draft. Example, k = 3, newest token "a":

    drafted     b  c  x
    run      a  b  c  x
    drawn    b  c  d  .         b c d are kept: two drafts were right, and d follows from them

Drafts continue the newest earlier place that agrees with the end of the sample over the most tokens. Places
are searched in the sample's own text and in `reference`, other answers to the prompt.

The rows are slots taken out of the state into a small contiguous cache, and put back at the end. A round
writes k + 1 entries; only accepted ones advance the length. Paged caches need no special case.

    n slots   m rows   k drafted tokens   T = k + 1   S reference tokens   W tokens of a dispatch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.decoder import Decoder, Params
from jaxrl.rollout.decode_state import DecodedTokens, DecodeState, Prefix
from jaxrl.rollout.generate_program import ModelPrograms, sample, seen_tokens
from jaxrl.rollout.speculation import COMPARED


@dataclasses.dataclass(frozen=True, eq=False)
class SpeculatingPrograms(ModelPrograms):
    """The programs of one model that may speculate; `speculate` may be traced.

    Attributes:
      num_drafted: k.
    """

    num_drafted: int

    def speculate(
        self,
        params: Params,
        state: DecodeState,
        slot_m: jax.Array,
        source_n: jax.Array,
        reference_mS: jax.Array,
        least_active: jax.Array | int = 0,
    ) -> tuple[DecodeState, jax.Array]:
        """Decodes up to W tokens in every active slot, in rounds; slots may get different numbers.

        A dispatch ends when a row has no room for another round, or at `least_active` active slots.

        Args:
          params: weights in the generation layout.
          state: state of the slots; consumed. Its capacity exceeds the longest active sequence by W or more.
          slot_m: int32, slot of each row, counted within its shard; all active slots. -1 for unused rows.
          source_n: int32, row of each slot, counted within its shard; -1 for none.
          reference_mS: int32, other answers to each row's prompt; negative between them and for none.
          least_active: int32 scalar, as in `generate`.

        Returns:
          The state, and the number of rounds of all rows, an int32 scalar.
        """
        model: Decoder = nnx.merge(self.graph, params)
        state = state.replace(decoded=jax.tree.map(jnp.zeros_like, state.decoded))
        rows = self.slots.taken(state, slot_m)
        # Made outside of the loop, because some caches split the weights of all layers here.
        on_top = self.slots.cache.extend(model, rows.context.cache, rows.context.length)
        layers = on_top.layers

        def unfinished(progress: tuple[DecodeState, jax.Array]):
            rows, _ = progress
            longest = jnp.where(rows.active, rows.decoded.count, 0).max()
            room = longest + self.num_drafted + 1 <= self.slots.tokens_per_dispatch
            return room & (rows.active.sum() > least_active)

        rows, rounds = jax.lax.while_loop(
            unfinished,
            lambda progress: (
                self._round(model, layers, progress[0], reference_mS),
                progress[1] + progress[0].active.sum(dtype=jnp.int32),
            ),
            (rows, jnp.int32(0)),
        )
        return self.slots.layout.place(self.slots.put_back(state, source_n, rows)), rounds

    def _round(
        self,
        model: Decoder,
        layers: Callable[..., Any] | None,
        rows: DecodeState,
        reference_mS: jax.Array,
    ) -> DecodeState:
        """Decodes 1 to T tokens in every active row."""
        context = rows.context
        drafts_mk = draft(context, reference_mS, self.num_drafted)
        fed_mT = jnp.concatenate([context.token[:, None], drafts_mk], axis=1)
        m, T = fed_mT.shape
        positions_mT = context.length[:, None] + jnp.arange(T)[None]
        live_mT = jnp.broadcast_to(rows.active[:, None], (m, T))
        on_top = self.slots.cache.extend(model, context.cache, context.length)
        hidden_mTD, new = on_top._replace(layers=layers).run(
            model, fed_mT, positions_mT, live_mT, self.compute
        )
        drawn, active_m = self._verified(model, rows, fed_mT, hidden_mTD)
        kept_m = drawn.count
        # Entries of drafts that were wrong lie beyond the new length, and the next round overwrites them.
        context = self.slots.append(context, new, fed_mT, rows.active)
        last_m1 = jnp.maximum(kept_m - 1, 0)[:, None]
        token_m = jnp.take_along_axis(drawn.token, last_m1, axis=1)[:, 0]
        context = dataclasses.replace(
            context,
            length=context.length + kept_m,
            token=jnp.where(rows.active, token_m, context.token),
        )

        def at_end(all_mW, new_mT):
            written = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(
                all_mW, new_mT, rows.decoded.count, 0
            )
            # Rows that have ended may have no room, and the write would be shifted backwards.
            return jnp.where((kept_m > 0)[:, None], written, all_mW)

        decoded = DecodedTokens(
            rows.decoded.count + kept_m,
            at_end(rows.decoded.token, drawn.token),
            at_end(rows.decoded.logprob, drawn.logprob),
            at_end(rows.decoded.entropy, drawn.entropy),
        )
        count_m = rows.count + kept_m
        return self.slots.layout.place(
            rows.replace(context=context, count=count_m, active=active_m, decoded=decoded)
        )

    def _verified(
        self, model: Decoder, rows: DecodeState, fed_mT: jax.Array, hidden_mTD: jax.Array
    ) -> tuple[DecodedTokens, jax.Array]:
        """Draws a token after each one that was run, and counts those that follow from right drafts.

        Returns:
          T drawn tokens of each row, of which the first `count` stay, 1 to T; 0 for idle rows. And whether
          the row decodes on, bool [m].
        """
        m, T = fed_mT.shape
        logits_NV = model.logits(hidden_mTD.reshape(m * T, -1), compute=self.compute)
        V = logits_NV.shape[-1]
        # Repeated T times without what `sample` does not read, most of all the cache.
        each = rows.replace(context=None, decoded=None)
        each = jax.tree.map(lambda leaf: jnp.repeat(leaf, T, axis=0), each)
        position_mT = rows.count[:, None] + jnp.arange(T)[None]

        def seen():
            """Bool [m * T, V], whether the token occurs in the row's sequence up to each fed token."""
            of_fed = [seen_tokens(V, rows.context, fed_mT[:, :t]) for t in range(1, T + 1)]
            return jnp.stack(of_fed, axis=1).reshape(-1, V)

        drawn = sample(logits_NV, each, position_mT.reshape(-1), self.stop_ids, seen, self.compute)
        token_mT, logprob_mT, entropy_mT = (x.reshape(m, T) for x in drawn)
        right_mk = fed_mT[:, 1:] == token_mT[:, :-1]
        # The first draw follows the newest token, which is right.
        count_m = 1 + jnp.cumprod(right_mk, axis=1, dtype=jnp.int32).sum(axis=1)
        ends_mT = jnp.isin(token_mT, jnp.array(self.stop_ids, jnp.int32)) & rows.stops[:, None]
        ends_mT |= position_mT + 1 >= rows.limit[:, None]
        # Without an end it is behind all draws.
        before_end_m = 1 + jnp.where(ends_mT.any(axis=1), ends_mT.argmax(axis=1), T)
        kept_m = jnp.where(rows.active, jnp.minimum(count_m, before_end_m), 0).astype(jnp.int32)
        drawn = DecodedTokens(kept_m, token_mT, logprob_mT, entropy_mT)
        return drawn, rows.active & (count_m < before_end_m)


def draft(context: Prefix, reference_mS: jax.Array, count: int) -> jax.Array:
    """Guesses the next tokens of each row: int32 [m, count].

    They follow the place in the row's own sequence or in `reference_mS` that agrees with the end of the
    sequence over the most tokens. Of several the last one counts, and the own sequence follows the reference.
    A text that repeats itself is continued with its period.

    Args:
      context: sequences of the rows.
      reference_mS: int32, other texts; negative where there is none.
      count: number of guessed tokens.
    """
    m, S = reference_mS.shape
    index_1C = jnp.arange(context.capacity)[None]
    length_m1 = context.length[:, None]
    # The history does not have the newest token yet (`Prefix`).
    own_mC = jnp.where(index_1C == length_m1, context.token[:, None], context.history)
    own_mC = jnp.where(index_1C <= length_m1, own_mC, -1)
    gap_m1 = jnp.full((m, 1), -1, jnp.int32)
    text = jnp.concatenate([reference_mS, gap_m1, own_mC], axis=1)
    end_m1 = S + 1 + length_m1
    agrees, run = text >= 0, jnp.zeros(text.shape, jnp.int32)
    for back in range(COMPARED):
        newest_m1 = jnp.take_along_axis(text, end_m1 - back, axis=1)
        agrees &= (jnp.roll(text, back, axis=1) == newest_m1) & (newest_m1 >= 0)
        run += agrees.astype(jnp.int32)
    index = jnp.arange(text.shape[1])[None]
    followed = jnp.roll(text, -1, axis=1) >= 0
    run = jnp.where(followed & (index < end_m1), run, 0)
    # The longest run first, then the last place: an index is below the factor.
    place_m1 = (run * text.shape[1] + index).argmax(axis=1, keepdims=True)
    # From the place again once the text ends, which repeats its period.
    ahead = jnp.arange(count)[None] % (end_m1 - place_m1)
    # Where no text follows, any token will do.
    return jnp.maximum(jnp.take_along_axis(text, place_m1 + 1 + ahead, axis=1), 0)
