"""The slots of an engine, with host arrays as inputs and results.

    prefilled(engine, params, starts) -> Prefix        runs host sequences, returns their keys and values
    Slots(engine, params)                              the decode state: insert, generate, release

The caller decides which sample is in which slot. Only one thread may dispatch: on a mesh all devices must
receive their programs in the same order.

    n slots   P sequences of a prefill   T tokens   W tokens of a dispatch
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import (
    Assignment,
    DecodedTokens,
    DecodeState,
    Prefix,
    TokenScores,
    TopTokens,
)
from jaxrl.rollout.engine import Engine, host_inputs
from jaxrl.rollout.engine_sizes import round_up
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.sampling import SampleEdits, SamplingOptions
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.speculation import Rows

# Number of settings, and of scalars, cached on the devices. Most requests differ only in prompts and seeds.
_KEPT_SETTINGS = 64
# Number of dispatches that fit into the cache when slots become fewer, besides the next one.
_DISPATCHES_AHEAD = 3


def prefilled(engine: Engine, params: Params, starts: Sequence[Start]) -> Prefix:
    """Prefills sequences; long ones in chunks. Scores those that ask for it (`Start.scores`).

    Args:
      engine, params: engine and weights of the model.
      starts: sequences, none empty or too long; at least one and at most the largest prefill batch.
    """
    sequences, chunk = [start.tokens for start in starts], engine.config.chunk_tokens
    P = round_up(engine.batch_sizes, len(sequences))
    longest = max(len(s) for s in sequences)
    # An unused batch entry holds one token, because prefill accepts no empty sequence; it is never read.
    heads = [s[:chunk] for s in sequences] + [np.zeros(1, np.int32)] * (P - len(sequences))
    adapter_P = adapters_on_device(engine, [start.adapter for start in starts], P)
    scores: list[TokenScores] | None = None
    given = (params, *_padded(engine, heads), *adapter_P)
    if any(start.scores is not None for start in starts):
        prefix, first = engine.prefill_scored(*given)
        scores = [first]
    else:
        prefix = engine.prefill(*given)
    if longest > chunk:
        prefix = engine.widen(prefix, capacity=round_up(engine.prefix_sizes, longest))
        rests = [s[chunk:] for s in sequences] + [np.zeros(0, np.int32)] * (P - len(sequences))
        prefix = _extended(engine, params, prefix, rests, adapter_P, scores)
    if scores is not None:
        # The first program has no score of the first token, the others have scores of all of their tokens.
        ends = [chunk - 1, *[chunk] * (len(scores) - 1)]
        found = engine.fetch(scores)
        for row, start in enumerate(starts):
            if start.scores is not None:
                parts = [
                    jax.tree.map(lambda x, row=row, end=end: x[row, :end], part)
                    for part, end in zip(found, ends, strict=True)
                ]
                most = len(start.tokens) - 1
                joined = jax.tree.map(lambda *x, most=most: np.concatenate(x)[:most], *parts)
                start.scores[:] = [joined]
    return prefix


def adapters_on_device(engine: Engine, numbers: Sequence[int], rows: int) -> tuple[jax.Array, ...]:
    """Places of adapters, int32 [rows], as the last argument of programs; () without a stack."""
    places = engine.config.adapter_places
    if not places:
        return ()
    place_B = np.zeros(rows, np.int32)
    # Numbers go on, places are used again (`samples.Start`).
    place_B[: len(numbers)] = np.array(numbers) % places
    return host_inputs(engine.mesh, place_B)


def _extended(
    engine: Engine,
    params: Params,
    prefix: Prefix,
    parts: Sequence[np.ndarray],
    adapter_P: tuple[jax.Array, ...],
    scores: list[TokenScores] | None = None,
) -> Prefix:
    """Appends each part to its sequence, chunk by chunk; returns the new prefix.

    Adds the scores of each chunk to `scores`, if it is given.
    """
    chunk = engine.config.chunk_tokens
    for start in range(0, max(len(part) for part in parts), chunk):
        now = [part[start : start + chunk] for part in parts]
        given = (params, prefix, *_padded(engine, now), *adapter_P)
        if scores is None:
            prefix = engine.extend(*given)
        else:
            prefix, of_chunk = engine.extend_scored(*given)
            scores.append(of_chunk)
    return prefix


def _padded(engine: Engine, parts: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
    """Tokens [P, T], padded to the smallest size that holds all parts, and their lengths [P]."""
    T = round_up(engine.prompt_sizes, max(len(part) for part in parts))
    tokens_PT = np.zeros((len(parts), T), np.int32)
    for row, part in zip(tokens_PT, parts, strict=True):
        row[: len(part)] = part
    length_P = np.array([len(part) for part in parts], np.int32)
    return host_inputs(engine.mesh, tokens_PT, length_P)


def settings_on_device(engine: Engine, options: SamplingOptions) -> tuple[Any, ...]:
    """How tokens are drawn, on the devices, as the last arguments of `Engine.insert`."""
    # The transfer is slow, so callers should reuse the result.
    seed, step = np.uint32(options.seed), np.int32(options.step)
    stops = np.bool_(not options.ignores_stop_ids)
    scalars = host_inputs(engine.mesh, seed, step, np.float32(options.temperature), stops)
    limits, structure = jax.tree.flatten(options.truncation)
    return *scalars, jax.tree.unflatten(structure, host_inputs(engine.mesh, *limits))


def insert(
    engine: Engine,
    prefix: Prefix,
    state: DecodeState,
    starts: Sequence[tuple[int, int, Sample]],
    settings: tuple[Any, ...],
) -> DecodeState:
    """Starts or continues samples with equal options.

    Args:
      engine: engine of the state.
      prefix: prefilled sequences.
      state: state of the slots; consumed.
      starts: slot, batch index of the sequence in the prefix, and sample.
      settings: result of `settings_on_device` for the options.
    """
    # The fields of an `Assignment`; -1 leaves a slot unchanged.
    fields = np.zeros((5, state.num_slots), np.int32)
    fields[0] = -1
    placed = [(slot, row, s.prompt_id, s.index, s.limit, len(s)) for slot, row, s in starts]
    slots, *values = np.array(placed, np.int32).T
    fields[:, slots] = values
    return engine.insert(prefix, state, Assignment(*host_inputs(engine.mesh, *fields)), *settings)


class Slots:
    """A decode state that grows and shrinks with its samples. Not thread-safe.

    Attributes:
      pages: pages of the slots, for the caller to assign; None if the cache is contiguous.
      params: weights of the next programs; `load` sets them.
    """

    def __init__(self, engine: Engine, params: Params | None):
        """Starts with no state; `make_room` allocates it."""
        self.engine = engine
        self.load(params)
        self.clear()
        # Made per instance: a cache on the method would hold a reference to `self`. The decode state, which
        # may fill most of a device's memory, would then survive until Python's cycle collection.
        self._settings = functools.lru_cache(_KEPT_SETTINGS)(
            functools.partial(settings_on_device, engine)
        )
        self._adapters = functools.lru_cache(_KEPT_SETTINGS)(
            lambda numbers: adapters_on_device(engine, numbers, len(numbers))
        )
        self._scalar = functools.lru_cache(_KEPT_SETTINGS)(
            lambda value: host_inputs(engine.mesh, np.int32(value))[0]
        )

    def load(self, params: Params | None) -> None:
        """Takes the weights of the next programs, and drops the copies made of the old ones."""
        self.params = params
        self._for_decoding: Params | None = None

    def load_adapters(self, adapters: Params) -> None:
        """Takes another stack of adapters; all other weights stay."""
        self.params = self.engine.with_adapters(adapters, self.params)
        if self._for_decoding is not None:
            self._for_decoding = self.engine.with_adapters(adapters, self._for_decoding)

    def clear(self) -> None:
        """Drops all slots and frees their memory."""
        self._state: DecodeState | None = None
        self._rounds: jax.Array | None = None
        self._top: TopTokens | None = None
        # A copy of the layers (`Engine.splits_layers`).
        self._for_decoding = None
        self.pages: SlotPages | None = None
        if self.engine.pages is not None:
            self.pages = SlotPages(
                self.engine.pages,
                num_slots=self.engine.slot_sizes[-1],
                tokens_per_dispatch=self.engine.config.tokens_per_dispatch,
                most_response_tokens=self.engine.config.max_response_tokens,
            )

    def make_room(self, num_slots: int, moves: list[int] | None, longest: int) -> None:
        """Resizes the state for another dispatch, and tells the devices the pages of each slot.

        Args:
          num_slots: value of `Scheduler.num_slots`.
          moves: result of `Scheduler.resize`.
          longest: number of tokens of the longest sequence in a slot or about to enter one.
        """
        engine, state = self.engine, self._state
        need = longest + engine.config.tokens_per_dispatch
        capacity = round_up(engine.cache_sizes, need)
        if state is None:
            self._state = engine.init_decode_state(num_slots, capacity)
        # Shrink the cache only when slots move anyway or when capacity at least halves.
        elif moves is not None or not state.capacity // 2 < capacity <= state.capacity:
            if moves is None:
                moves = list(range(state.num_slots // engine.shards)) * engine.shards
            elif num_slots < state.num_slots:
                # Room for some more dispatches: fewer slots then seldom meet two capacities, each a program.
                ahead = need + _DISPATCHES_AHEAD * engine.config.tokens_per_dispatch
                capacity = round_up(engine.cache_sizes, min(ahead, engine.cache_sizes[-1]))
            self._state = None
            (slot_n,) = host_inputs(engine.mesh, np.array(moves, np.int32))
            # Old and new cache are in memory for a moment: a device cannot change the shape of an array in
            # place.
            self._state = engine.resize(state, slot_n, capacity=capacity)
        if self.pages is not None:
            # Copies, because a CPU device uses the memory of a host array as it is.
            pool = self.pages.pool
            table_nP, shared_n = pool.table_nP.copy(), pool.shared_n.copy()
            self._state = self.engine.with_pages(self._taken_state(), table_nP, shared_n)

    def _taken_state(self) -> DecodeState:
        """Takes the state out for a program that consumes it. If that fails, no state is left."""
        state, self._state = self._state, None
        assert state is not None, "make_room comes first"
        return state

    def insert(self, prefix: Prefix, starts: Sequence[tuple[int, int, Sample]]) -> None:
        """Starts samples, those with equal options in one call; see the function `insert`."""
        alike: dict[SamplingOptions, list[tuple[int, int, Sample]]] = collections.defaultdict(list)
        for start in starts:
            alike[start[2].options].append(start)
        for options, some in alike.items():
            state, settings = self._taken_state(), self._settings(options)
            self._state = insert(self.engine, prefix, state, some, settings)

    def _batches(self, shard_of: Mapping[int, int]) -> Iterator[tuple[int, dict[int, int]]]:
        """Prefixes of the same number of sequences from every shard.

        Args:
          shard_of: shard of each item.

        Yields:
          The number of sequences of a prefix, and the item of each of its batch indices in use.
        """
        shards = self.engine.shards
        waiting: list[list[int]] = [[] for _ in range(shards)]
        for item, shard in shard_of.items():
            waiting[shard].append(item)
        while any(waiting):
            # A batch has equal parts of all shards, so the shard with most items decides.
            most = shards * max(len(items) for items in waiting)
            P = round_up(self.engine.batch_sizes, min(most, self.engine.batch_sizes[-1]))
            per_shard = P // shards
            yield (
                P,
                {
                    shard * per_shard + i: item
                    for shard, items in enumerate(waiting)
                    for i, item in enumerate(items[:per_shard])
                },
            )
            waiting = [items[per_shard:] for items in waiting]

    def reuse(
        self, known: Mapping[int, tuple[int, list[int], Start]]
    ) -> Iterator[tuple[Prefix, dict[int, int]]]:
        """Prefills sequences of which the pages hold the beginning; the model runs only the rest.

        Args:
          known: by any number, the shard and the numbers of pages that hold less than a sequence, and the
            sequence.

        Yields:
          A prefix, and the number of the sequence of each of its batch indices in use.
        """
        if not known:
            return
        engine, state = self.engine, self._state
        assert state is not None and engine.pages is not None, "there are no pages"
        page = engine.pages.page_tokens
        for P, number_of in self._batches({i: shard for i, (shard, _, _) in known.items()}):
            longest = max(len(known[i][2].tokens) for i in number_of.values())
            # A size of few, because each is a program.
            pages = -(-round_up(engine.prefix_sizes, longest) // page)
            table_Pp = np.zeros((P, pages), np.int32)
            history_PC = np.zeros((P, pages * page), np.int32)
            length_P, token_P = np.zeros(P, np.int32), np.zeros(P, np.int32)
            rests, adapters = [np.zeros(0, np.int32)] * P, [0] * P
            for row, i in number_of.items():
                _, held, start = known[i]
                tokens, adapters[row] = start.tokens, start.adapter
                length = len(held) * page
                table_Pp[row, : len(held)], history_PC[row, :length] = held, tokens[:length]
                length_P[row], token_P[row] = length, tokens[length]
                # The token between is the last one of the prefix, which the next program runs.
                rests[row] = tokens[length + 1 :]
            given = host_inputs(engine.mesh, table_Pp, history_PC, length_P, token_P)
            prefix = engine.reuse(state, *given)
            adapter_P = adapters_on_device(engine, adapters, P)
            yield _extended(engine, self.params, prefix, rests, adapter_P), number_of

    def release(self, slots: Sequence[int]) -> None:
        state = self._taken_state()
        keep_n = np.ones(state.num_slots, bool)
        keep_n[list(slots)] = False
        self._state = self.engine.release(state, *host_inputs(self.engine.mesh, keep_n))

    def generate(self, least_active: int, adapters: tuple[int, ...] = ()) -> None:
        """Starts to decode up to W tokens in every active slot; `decoded` waits for them.

        Args:
          least_active: number of active slots at which to stop.
          adapters: number of each slot's adapter, if the engine has a stack of them.
        """
        state, params = self._taken_state(), self._decoding_params()
        given = (self._scalar(least_active), *self._adapters(adapters))
        self._state = self.engine.generate(params, state, *given)

    def generate_edited(
        self, edits: Mapping[int, SampleEdits | None], least_active: int, steps: int
    ) -> None:
        """Like `generate`, with the edits of some slots and up to `steps` tokens; finds `top`, too."""
        state, params = self._taken_state(), self._decoding_params()
        V = self.engine.model.vocab_size
        row_n = np.full(state.num_slots, -1, np.int32)
        edited = [(slot, each) for slot, each in edits.items() if each is not None]
        # Every number of rows is a program of its own, so there are few: 8, 64, 512 ...
        E = next(8**k for k in range(1, 8) if 8**k >= len(edited))
        rows_EV = np.zeros((min(E, len(row_n)), V), np.float32)
        for row, (slot, each) in enumerate(edited):
            row_n[slot] = row
            each.fill(rows_EV[row])
        given = host_inputs(self.engine.mesh, row_n, rows_EV)
        scalars = self._scalar(least_active), self._scalar(steps)
        self._state, self._top = self.engine.generate_edited(params, state, *scalars, *given)

    def top(self) -> TopTokens:
        """The most probable tokens of the last `generate_edited`, on the host."""
        return self.engine.fetch(self._top)

    def speculate(self, rows: Rows, reference_mS: np.ndarray, least_active: int) -> None:
        """Starts to decode up to W tokens in the slots of `rows`; `decoded` waits for them.

        Args:
          rows: rows of the dispatch.
          reference_mS: int32, other answers to the prompt of each row.
          least_active: see `SpeculatingPrograms.speculate`.
        """
        state = self._taken_state()
        given = host_inputs(self.engine.mesh, rows.slot_m, rows.source_n, reference_mS)
        params, least = self._decoding_params(), self._scalar(least_active)
        self._state, self._rounds = self.engine.speculate(params, state, *given, least)

    def _decoding_params(self) -> Params | None:
        if self._for_decoding is None and self.params is not None:
            self._for_decoding = self.engine.for_decoding(self.params)
        return self._for_decoding

    def routes(self, slots: Sequence[int]) -> dict[int, np.ndarray]:
        """The experts that the tokens of some slots took, int16 [C, L, A] each, by slot."""
        state = self._state
        assert state is not None, "the slots have samples"
        per_shard, found = state.num_slots // self.engine.shards, {}
        for P, slot_of in self._batches({slot: slot // per_shard for slot in slots}):
            slot_m = np.full(P, -1, np.int32)
            slot_m[list(slot_of)] = [slot % per_shard for slot in slot_of.values()]
            given = host_inputs(self.engine.mesh, slot_m)
            routes = self.engine.fetch(self.engine.routes(state, *given))
            found |= {slot: routes[row].swapaxes(0, 1) for row, slot in slot_of.items()}
        return found

    def rounds(self) -> int:
        """The number of rounds of all rows in the last `speculate`."""
        return int(self.engine.fetch(self._rounds))

    def decoded(self) -> tuple[np.ndarray, DecodedTokens]:
        """Whether each slot is still active, bool [n], and the tokens of the last `generate`, on the host."""
        state = self._taken_state()
        # The state is out meanwhile: a device that has failed fails here, and its slots must not be used.
        fetched = self.engine.fetch((state.active, state.decoded))
        self._state = state
        return fetched
