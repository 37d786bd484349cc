"""The rows of an engine, for drivers whose requests come one by one, each with its own settings.

    prefilled(engine, params, sequences) -> Prefix     host sequences to keys and values
    Slots(engine, params)                              the decode state: rows come, decode, go

Host arrays in, host arrays out; which request is in which row is the driver's affair. Two drivers may share
an engine from two threads: on a mesh all devices must then get their programs in one order, so whoever
dispatches holds the lock that both were given.

    n rows   P sequences of a prefill   T tokens   W tokens of a dispatch
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
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
    """A sample that starts: its row, its place in the prefix, and what its sampling key is made of."""

    row: int
    place: int
    prompt_id: int
    sample_index: int
    max_tokens: int


# Seed, step, temperature and truncation, on the devices.
Settings: TypeAlias = tuple[Any, ...]


class Drawn(NamedTuple):
    """What a dispatch has drawn, on the host.

    Attributes:
      active: bool [n], still decoding.
      count: int32 [n], tokens drawn.
      token: int32 [n, W], of which `count` are real.
      logprob: float32 [n, W].
    """

    active: np.ndarray
    count: np.ndarray
    token: np.ndarray
    logprob: np.ndarray


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
    if longest > chunk:
        prefix = engine.widen(prefix, capacity=fit(engine.cache_sizes, longest))
    for start in range(chunk, longest, chunk):
        parts = [s[start : start + chunk] for s in sequences]
        parts += [np.zeros(0, np.int32)] * (P - len(sequences))
        prefix = engine.extend(params, prefix, *_padded(engine, parts))
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

    def _send_settings(self, temperature: float, truncation: Truncation) -> Settings:
        return settings_on_device(
            self.engine, seed=0, step=0, temperature=temperature, truncation=truncation
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
    ) -> None:
        """Starts samples that share their settings, with keys of seed 0 and step 0."""
        state, self._state = self._state, None
        assert state is not None, "make_room comes first"
        with self._lock:
            settings = self._settings(temperature, truncation)
            self._state = insert(self.engine, prefix, state, seats, settings)

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
        drawn = fetch((state.active, state.out_count, state.out_token, state.out_logprob))
        self._state = state
        return Drawn(*drawn)
