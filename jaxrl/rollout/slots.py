"""The slots of an engine, with host arrays as inputs and results.

    prefilled(engine, params, sequences) -> Prefix     runs host sequences, returns their keys and values
    Slots(engine, params)                              the decode state: insert, extend, generate, release

The caller decides which sample is in which slot. Two threads may use the same engine. On a mesh all devices
must receive their programs in the same order, so both threads must hold the same lock while they dispatch.

    n slots   P sequences of a prefill   T tokens   W tokens of a dispatch
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxrl.mesh.hosts import fetch
from jaxrl.models.decoder import Params
from jaxrl.rollout.buckets import round_up
from jaxrl.rollout.decode_state import Assignment, DecodedTokens, DecodeState, Prefix
from jaxrl.rollout.engine import Engine, host_inputs
from jaxrl.rollout.sampling import Truncation, untruncated
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.speculation import Rows

# Number of settings, and of scalars, cached on the devices. Most requests differ only in prompts and seeds.
_KEPT_SETTINGS = 64
# Number of dispatches that fit into the cache when slots become fewer, besides the next one.
_DISPATCHES_AHEAD = 3


@dataclasses.dataclass(frozen=True)
class DrawSettings:
    """How the tokens of a sample are drawn. Samples with equal settings are inserted in one call.

    Attributes:
      seed, step: parts of the sampling key, besides the prompt's id and the sample's index.
      temperature: sampling temperature; 0 is greedy.
      truncation: limits on the tokens that can be drawn, as scalars.
    """

    seed: int = 0
    step: int = 0
    temperature: float = 0.0
    truncation: Truncation = dataclasses.field(default_factory=untruncated)


class SlotAssignment(NamedTuple):
    """A sample that starts or continues in a slot.

    Attributes:
      slot: index of the slot.
      batch_index: index of its sequence in the prefix.
      prompt_id, sample_index: parts of its sampling key.
      max_tokens: response length at which the slot stops.
      response_tokens: number of response tokens that the prefix already holds.
    """

    slot: int
    batch_index: int
    prompt_id: int
    sample_index: int
    max_tokens: int
    response_tokens: int = 0


class Extension(NamedTuple):
    """Tokens to append to the sequence in a slot.

    Attributes:
      length: number of tokens of the sequence before.
      last: last token of the sequence before.
      tokens: int32 [T], new tokens.
    """

    length: int
    last: int
    tokens: np.ndarray


class KnownBeginning(NamedTuple):
    """A sequence that begins with pages that hold their tokens.

    Attributes:
      shard: shard of the pages.
      pages: numbers of the pages within their shard; they hold less than the sequence.
      tokens: int32 [T], the whole sequence.
    """

    shard: int
    pages: list[int]
    tokens: np.ndarray


# The fields of `DrawSettings` on the devices, in the form that `Engine.insert` takes.
DeviceSettings: TypeAlias = tuple[Any, ...]


def prefilled(engine: Engine, params: Params, sequences: Sequence[np.ndarray]) -> Prefix:
    """Prefills sequences; long ones in chunks.

    Args:
      engine, params: engine and weights of the model.
      sequences: int32 arrays, none empty or too long; at least one and at most the largest prefill batch.
    """
    chunk = engine.config.chunk_tokens
    P = round_up(engine.batch_sizes, len(sequences))
    longest = max(len(s) for s in sequences)
    # An unused batch entry holds one token, because prefill accepts no empty sequence; it is never read.
    heads = [s[:chunk] for s in sequences] + [np.zeros(1, np.int32)] * (P - len(sequences))
    prefix = engine.prefill(params, *_padded(engine, heads))
    if longest <= chunk:
        return prefix
    prefix = engine.widen(prefix, capacity=round_up(engine.prefix_sizes, longest))
    rests = [s[chunk:] for s in sequences] + [np.zeros(0, np.int32)] * (P - len(sequences))
    return _extended(engine, params, prefix, rests)


def _extended(
    engine: Engine, params: Params, prefix: Prefix, parts: Sequence[np.ndarray]
) -> Prefix:
    """Appends each part to its sequence, chunk by chunk; returns the new prefix."""
    chunk = engine.config.chunk_tokens
    for start in range(0, max(len(part) for part in parts), chunk):
        now = [part[start : start + chunk] for part in parts]
        prefix = engine.extend(params, prefix, *_padded(engine, now))
    return prefix


def _padded(engine: Engine, parts: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
    """Tokens [P, T], padded to the smallest size that holds all parts, and their lengths [P]."""
    T = round_up(engine.prompt_sizes, max(len(part) for part in parts))
    tokens_PT = np.zeros((len(parts), T), np.int32)
    for row, part in zip(tokens_PT, parts, strict=True):
        row[: len(part)] = part
    length_P = np.array([len(part) for part in parts], np.int32)
    return host_inputs(engine.mesh, tokens_PT, length_P)


def on_device(engine: Engine, num_slots: int, assignments: Sequence[SlotAssignment]) -> Assignment:
    """`assignments` as arrays with one entry per slot, on the devices."""
    fields = np.zeros((len(SlotAssignment._fields) - 1, num_slots), np.int32)
    fields[0] = -1
    slots, *values = np.array(assignments, np.int32).T
    fields[:, slots] = values
    return Assignment(*host_inputs(engine.mesh, *fields))


def settings_on_device(engine: Engine, settings: DrawSettings) -> DeviceSettings:
    """Sends `settings` to the devices. The transfer is slow, so callers should reuse the result."""
    scalars = host_inputs(
        engine.mesh,
        np.uint32(settings.seed),
        np.int32(settings.step),
        np.float32(settings.temperature),
    )
    limits, structure = jax.tree.flatten(settings.truncation)
    return *scalars, jax.tree.unflatten(structure, host_inputs(engine.mesh, *limits))


def insert(
    engine: Engine,
    prefix: Prefix,
    state: DecodeState,
    assignments: Sequence[SlotAssignment],
    settings: DeviceSettings,
) -> DecodeState:
    """Calls `Engine.insert` for samples with equal settings; `state` is consumed."""
    return engine.insert(prefix, state, on_device(engine, state.num_slots, assignments), *settings)


class Slots:
    """A decode state that grows and shrinks with its samples. Not thread-safe.

    Attributes:
      pages: pages of the slots, for the caller to assign; None if the cache is contiguous.
      params: weights of the next programs; the caller may set others between two programs.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params | None,
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """Starts with no state; `make_room` allocates it.

        Args:
          engine, params: engine and weights of the model.
          lock: context manager that is held during each dispatch; None if no other thread uses the devices.
        """
        self.engine = engine
        self.params = params
        self._lock = contextlib.nullcontext() if lock is None else lock
        self.clear()
        # Made per instance: a cache on the method would hold a reference to `self`. The decode state, which
        # may fill most of a device's memory, would then survive until Python's cycle collection.
        self._settings = functools.lru_cache(_KEPT_SETTINGS)(
            functools.partial(settings_on_device, engine)
        )
        self._scalar = functools.lru_cache(_KEPT_SETTINGS)(
            lambda value: host_inputs(engine.mesh, np.int32(value))[0]
        )

    @property
    def params(self) -> Params | None:
        """Weights of the next programs. Setting them drops the copies made of the old ones."""
        return self._params

    @params.setter
    def params(self, params: Params | None) -> None:
        self._params = params
        self._for_decoding: Params | None = None

    def clear(self) -> None:
        """Drops all slots and frees their memory."""
        self._state: DecodeState | None = None
        self._rounds: jax.Array | None = None
        # A copy of weights on CPU.
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
        self._resize(num_slots, moves, longest)
        if self.pages is not None:
            # Copies, because a CPU device uses the memory of a host array as it is.
            pool = self.pages.pool
            table_nP, shared_n = pool.table_nP.copy(), pool.shared_n.copy()
            self._state = self.engine.with_pages(self._taken_state(), table_nP, shared_n)

    def _resize(self, num_slots: int, moves: list[int] | None, longest: int) -> None:
        engine = self.engine
        need = longest + engine.config.tokens_per_dispatch
        capacity = round_up(engine.cache_sizes, need)
        state = self._state
        if state is None:
            with self._lock:
                self._state = engine.init_decode_state(num_slots, capacity)
            return
        # Shrink the cache only when slots move anyway or when capacity at least halves.
        if moves is None and state.capacity // 2 < capacity <= state.capacity:
            return
        if moves is None:
            moves = list(range(state.num_slots // engine.shards)) * engine.shards
        elif num_slots < state.num_slots:
            # Room for some more dispatches, so that fewer slots seldom meet two capacities, each a program.
            ahead = need + _DISPATCHES_AHEAD * engine.config.tokens_per_dispatch
            capacity = round_up(engine.cache_sizes, min(ahead, engine.cache_sizes[-1]))
        self._state = None
        with self._lock:
            (slot_n,) = host_inputs(engine.mesh, np.array(moves, np.int32))
            self._state = engine.resize(state, slot_n, capacity=capacity)

    def _taken_state(self) -> DecodeState:
        """Takes the state out for a program that consumes it. If that fails, no state is left."""
        state, self._state = self._state, None
        assert state is not None, "make_room comes first"
        return state

    def prefill(self, sequences: Sequence[np.ndarray]) -> Prefix:
        """See `prefilled`."""
        with self._lock:
            return prefilled(self.engine, self.params, sequences)

    def insert(
        self,
        prefix: Prefix,
        assignments: Sequence[SlotAssignment],
        settings: DrawSettings,
    ) -> None:
        """Starts samples that have the same settings."""
        state = self._taken_state()
        with self._lock:
            on_devices = self._settings(settings)
            self._state = insert(self.engine, prefix, state, assignments, on_devices)

    def extend(
        self, extensions: Mapping[int, Extension]
    ) -> Iterator[tuple[Prefix, dict[int, int]]]:
        """Appends tokens to sequences in slots; the model runs only the new tokens.

        Args:
          extensions: new tokens by slot.

        Yields:
          A prefix to insert into these slots again, and the slot of each of its batch indices in use.
        """
        if not extensions:
            return
        state = self._state
        assert state is not None, "there are no slots"
        slots_per_shard = state.num_slots // self.engine.shards
        shard_of = {slot: slot // slots_per_shard for slot in extensions}
        for P, slot_of in self._batches(shard_of):
            yield self._extended(P, slot_of, extensions), slot_of

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

    def reuse(self, known: Mapping[int, KnownBeginning]) -> Iterator[tuple[Prefix, dict[int, int]]]:
        """Prefills sequences of which the pages hold the beginning; the model runs only the rest.

        Args:
          known: the sequences, by any number.

        Yields:
          A prefix, and the number of the sequence of each of its batch indices in use.
        """
        for P, number_of in self._batches({i: each.shard for i, each in known.items()}):
            yield self._reused(P, {row: known[i] for row, i in number_of.items()}), number_of

    def _reused(self, P: int, known: Mapping[int, KnownBeginning]) -> Prefix:
        engine, state = self.engine, self._state
        assert state is not None and engine.pages is not None, "there are no pages"
        page = engine.pages.page_tokens
        longest = max(len(each.tokens) for each in known.values())
        pages = -(-round_up(engine.prefix_sizes, longest) // page)
        table_Pp, history_PC = np.zeros((P, pages), np.int32), np.zeros((P, pages * page), np.int32)
        length_P, token_P = np.zeros(P, np.int32), np.zeros(P, np.int32)
        rests = [np.zeros(0, np.int32)] * P
        for row, (_, held, tokens) in known.items():
            length = len(held) * page
            table_Pp[row, : len(held)], history_PC[row, :length] = held, tokens[:length]
            length_P[row], token_P[row] = length, tokens[length]
            rests[row] = tokens[length + 1 :]
        with self._lock:
            given = host_inputs(engine.mesh, table_Pp, history_PC, length_P, token_P)
            return _extended(engine, self.params, engine.reuse(state, *given), rests)

    def _extended(
        self, P: int, slot_of: dict[int, int], extensions: Mapping[int, Extension]
    ) -> Prefix:
        engine, state = self.engine, self._state
        assert state is not None, "there are no slots"
        slot_P, length_P, token_P = (np.zeros(P, np.int32) for _ in range(3))
        parts = [np.zeros(0, np.int32)] * P
        for index, slot in slot_of.items():
            extension = extensions[slot]
            slot_P[index] = slot % (state.num_slots // engine.shards)
            length_P[index], token_P[index] = extension.length - 1, extension.last
            parts[index] = extension.tokens
        with self._lock:
            prefix = engine.extract(state, *host_inputs(engine.mesh, slot_P, length_P, token_P))
            return _extended(engine, self.params, prefix, parts)

    def release(self, slots: Sequence[int]) -> None:
        """Stops decoding in `slots`."""
        state = self._taken_state()
        keep_n = np.ones(state.num_slots, bool)
        keep_n[list(slots)] = False
        with self._lock:
            self._state = self.engine.release(state, *host_inputs(self.engine.mesh, keep_n))

    def generate(self, least_active: int) -> None:
        """Starts to decode up to W tokens in every active slot; `decoded` waits for them."""
        state = self._taken_state()
        with self._lock:
            params = self._decoding_params()
            self._state = self.engine.generate(params, state, self._scalar(least_active))

    def speculate(
        self,
        rows: Rows,
        reference_mS: np.ndarray,
        *,
        enough: float,
        credit: float,
        least_active: int,
    ) -> None:
        """Starts to decode up to W tokens in the slots of `rows`; `decoded` waits for them.

        Args:
          rows: rows of the dispatch.
          reference_mS: int32, other answers to the prompt of each row.
          enough, credit, least_active: see `SpeculateProgram.speculate`.
        """
        state = self._taken_state()
        with self._lock:
            limits = np.float32(enough), np.float32(credit)
            given = host_inputs(self.engine.mesh, rows.slot_m, rows.source_n, reference_mS, *limits)
            least = self._scalar(least_active)
            params = self._decoding_params()
            self._state, self._rounds = self.engine.speculate(params, state, *given, least)

    def _decoding_params(self) -> Params | None:
        if self._for_decoding is None and self._params is not None:
            self._for_decoding = self.engine.for_decoding(self._params)
        return self._for_decoding

    def rounds(self) -> np.ndarray:
        """The number of rounds of each row in the last `speculate`, int32 [m]."""
        return fetch(self._rounds)

    def decoded(self) -> tuple[np.ndarray, DecodedTokens]:
        """Whether each slot is still active, bool [n], and the tokens of the last `generate`, on the host."""
        state = self._taken_state()
        with self._lock:
            fetched = fetch((state.active, state.decoded))
        self._state = state
        return fetched
