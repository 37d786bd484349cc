"""The rows of an engine as drivers see them: host arrays in, host arrays out.

    prefilled(engine, params, sequences) -> Prefix     host sequences to keys and values
    Slots(engine, params)                              the decode state: rows come, decode, go

Which request is in which row is the driver's affair. Two drivers may share an engine from two threads: on a
mesh all devices must then get their programs in one order, so whoever dispatches holds the lock that both
were given.

    n rows   P sequences of a prefill   T tokens   W tokens of a dispatch
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxrl.mesh.hosts import fetch
from jaxrl.models.decoder import Params
from jaxrl.rollout.buckets import fit
from jaxrl.rollout.engine import Assignment, DecodeState, Engine, Prefix, host_inputs
from jaxrl.rollout.sampling import Truncation

# Most requests differ in little but their prompts and seeds.
_KEPT_SETTINGS = 64


class Seat(NamedTuple):
    """A sample that starts, or goes on.

    Attributes:
      row: its row.
      place: of its sequence in the prefix.
      prompt_id, sample_index: what its sampling key is made of.
      max_tokens: of its response.
      count: tokens of its response that the prefix holds.
    """

    row: int
    place: int
    prompt_id: int
    sample_index: int
    max_tokens: int
    count: int = 0


class Append(NamedTuple):
    """Tokens that come on top of the sequence in a row.

    Attributes:
      row: which.
      length: tokens of the sequence without them.
      last: the last of these.
      tokens: int32, the new ones.
    """

    row: int
    length: int
    last: int
    tokens: np.ndarray


# Seed, step, temperature and truncation, on the devices.
Settings: TypeAlias = tuple[Any, ...]


class Drawn(NamedTuple):
    """What a dispatch has drawn, on the host.

    Attributes:
      active: bool [n], still decoding.
      count: int32 [n], tokens drawn.
      token: int32 [n, W], of which `count` are real.
      logprob, entropy: float32 [n, W].
    """

    active: np.ndarray
    count: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray

    def of_row(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, log-probabilities and entropies that were drawn in a row."""
        count = self.count[row]
        return self.token[row, :count], self.logprob[row, :count], self.entropy[row, :count]


def prefilled(engine: Engine, params: Params, sequences: Sequence[np.ndarray]) -> Prefix:
    """A prefix of each sequence, in chunks where they are long.

    Args:
      engine, params: of the model.
      sequences: int32, one or more and no more than the largest prefill batch, none empty or too long.
    """
    chunk = engine.config.chunk_tokens
    P = fit(engine.batch_sizes, len(sequences))
    longest = max(len(s) for s in sequences)
    # A place that is left over holds one token, which nobody reads.
    heads = [s[:chunk] for s in sequences] + [np.zeros(1, np.int32)] * (P - len(sequences))
    prefix = engine.prefill(params, *_padded(engine, heads))
    if longest <= chunk:
        return prefix
    prefix = engine.widen(prefix, capacity=fit(engine.cache_sizes, longest))
    rests = [s[chunk:] for s in sequences] + [np.zeros(0, np.int32)] * (P - len(sequences))
    return _extended(engine, params, prefix, rests)


def _extended(
    engine: Engine, params: Params, prefix: Prefix, parts: Sequence[np.ndarray]
) -> Prefix:
    """The prefix with each part appended to its sequence, chunk by chunk."""
    chunk = engine.config.chunk_tokens
    for start in range(0, max(len(part) for part in parts), chunk):
        now = [part[start : start + chunk] for part in parts]
        prefix = engine.extend(params, prefix, *_padded(engine, now))
    return prefix


def _padded(engine: Engine, parts: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
    """Tokens [P, T] of the smallest size that holds all parts, and their lengths [P]."""
    T = fit(engine.prompt_sizes, max(len(part) for part in parts))
    tokens_PT = np.zeros((len(parts), T), np.int32)
    for row, part in zip(tokens_PT, parts, strict=True):
        row[: len(part)] = part
    length_P = np.array([len(part) for part in parts], np.int32)
    return host_inputs(engine.mesh, tokens_PT, length_P)


def assignment(engine: Engine, rows: int, seats: Sequence[Seat]) -> Assignment:
    """The device's form of `seats` in a state of so many rows."""
    source_n, id_n, index_n, limit_n, count_n = (np.zeros(rows, np.int32) for _ in range(5))
    source_n[:] = -1
    for seat in seats:
        source_n[seat.row], limit_n[seat.row] = seat.place, seat.max_tokens
        count_n[seat.row] = seat.count
        id_n[seat.row], index_n[seat.row] = seat.prompt_id, seat.sample_index
    return Assignment(*host_inputs(engine.mesh, source_n, id_n, index_n, limit_n, count_n))


def settings_on_device(
    engine: Engine, *, seed: int, step: int, temperature: float, truncation: Truncation
) -> Settings:
    """Settings of samples as `Engine.insert` takes them; to be kept, since sending them takes a while."""
    scalars = host_inputs(engine.mesh, np.uint32(seed), np.int32(step), np.float32(temperature))
    limits, structure = jax.tree.flatten(truncation)
    return *scalars, jax.tree.unflatten(structure, host_inputs(engine.mesh, *limits))


def insert(
    engine: Engine, prefix: Prefix, state: DecodeState, seats: Sequence[Seat], settings: Settings
) -> DecodeState:
    """`Engine.insert` of samples that share their settings; `state` is consumed."""
    return engine.insert(prefix, state, assignment(engine, state.rows, seats), *settings)


class Slots:
    """A decode state that grows and shrinks with its work. For one thread."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """No memory is taken before the first rows are.

        Args:
          engine, params: of the model.
          lock: held while something is dispatched.
        """
        self.engine = engine
        self._params = params
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._state: DecodeState | None = None
        self._settings = functools.lru_cache(_KEPT_SETTINGS)(self._send_settings)

    def _send_settings(
        self, seed: int, step: int, temperature: float, truncation: Truncation
    ) -> Settings:
        return settings_on_device(
            self.engine, seed=seed, step=step, temperature=temperature, truncation=truncation
        )

    def clear(self) -> None:
        """Forgets all rows, and frees their memory."""
        self._state = None

    def make_room(self, rows: int, moves: list[int] | None, longest: int) -> None:
        """Makes so many rows, with capacity for another dispatch of a sequence of `longest` tokens.

        Args:
          rows: of `Scheduler.num_rows`.
          moves: as `Scheduler.resize` has returned it.
          longest: tokens of the longest sequence that is in a row or comes into one.
        """
        engine = self.engine
        capacity = fit(engine.cache_sizes, longest + engine.config.tokens_per_dispatch)
        state = self._state
        if state is None:
            with self._lock:
                self._state = engine.init_decode_state(rows, capacity)
            return
        # Less capacity is worth a copy if rows move anyway, or if it is much less.
        if moves is None and state.capacity // 2 < capacity <= state.capacity:
            return
        if moves is None:
            moves = list(range(state.rows // engine.shards)) * engine.shards
        self._state = None
        with self._lock:
            (row_n,) = host_inputs(engine.mesh, np.array(moves, np.int32))
            self._state = engine.resize(state, row_n, capacity=capacity)

    def prefill(self, sequences: Sequence[np.ndarray]) -> Prefix:
        """See `prefilled`."""
        with self._lock:
            return prefilled(self.engine, self._params, sequences)

    def insert(
        self,
        prefix: Prefix,
        seats: Sequence[Seat],
        *,
        temperature: float,
        truncation: Truncation,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        """Starts samples that share their settings; seed and step are parts of their keys."""
        state, self._state = self._state, None
        assert state is not None, "make_room comes first"
        with self._lock:
            settings = self._settings(seed, step, temperature, truncation)
            self._state = insert(self.engine, prefix, state, seats, settings)

    def append(self, appends: Sequence[Append]) -> Iterator[tuple[Prefix, dict[int, Append]]]:
        """What is in rows, with tokens on top: prefixes, to be inserted in these rows again.

        Yields:
          A prefix and, for its places in use, what was appended to which row. Only the new tokens are run.
        """
        engine = self.engine
        state, shards = self._state, engine.shards
        assert state is not None, "there are no rows"
        per_shard = engine.batch_sizes[-1] // shards
        rows_of_shard = state.rows // shards
        # A prefix takes as many sequences from every shard.
        waiting = [[a for a in appends if a.row // rows_of_shard == s] for s in range(shards)]
        while any(waiting):
            places = {
                s * per_shard + seat: append
                for s, of_shard in enumerate(waiting)
                for seat, append in enumerate(of_shard[:per_shard])
            }
            waiting = [of_shard[per_shard:] for of_shard in waiting]
            yield self._appended(places), places

    def _appended(self, places: dict[int, Append]) -> Prefix:
        engine, state = self.engine, self._state
        assert state is not None, "there are no rows"
        P = engine.batch_sizes[-1]
        row_P, length_P, token_P = (np.zeros(P, np.int32) for _ in range(3))
        parts = [np.zeros(0, np.int32)] * P
        for place, append in places.items():
            row_P[place] = append.row % (state.rows // engine.shards)
            length_P[place], token_P[place] = append.length - 1, append.last
            parts[place] = append.tokens
        with self._lock:
            prefix = engine.extract(state, *host_inputs(engine.mesh, row_P, length_P, token_P))
            return _extended(engine, self._params, prefix, parts)

    def release(self, rows: Sequence[int]) -> None:
        """Ends what is in `rows`."""
        state, self._state = self._state, None
        assert state is not None, "there are no rows"
        keep_n = np.ones(state.rows, bool)
        keep_n[list(rows)] = False
        with self._lock:
            self._state = self.engine.release(state, *host_inputs(self.engine.mesh, keep_n))

    def generate(self, least_active: int) -> Drawn:
        """Decodes up to W tokens in every active row, and waits for them; see `Engine.generate`."""
        state, self._state = self._state, None
        assert state is not None, "make_room comes first"
        with self._lock:
            (least,) = host_inputs(self.engine.mesh, np.int32(least_active))
            state = self.engine.generate(self._params, state, least)
        drawn = (state.active, state.out_count, state.out_token, state.out_logprob)
        drawn = fetch((*drawn, state.out_entropy))
        self._state = state
        return Drawn(*drawn)
