"""The slots of an engine as drivers see them: host arrays in, host arrays out.

    prefilled(engine, params, sequences) -> Prefix     host sequences to keys and values
    Slots(engine, params)                              the decode state: samples come, decode, go

Which sample is in which slot is the driver's affair. Two drivers may share an engine from two threads: on a
mesh all devices must then get their programs in one order, so whoever dispatches holds the lock that both
were given.

    n slots   P sequences of a prefill   T tokens   W tokens of a dispatch
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
from jaxrl.rollout.buckets import round_up
from jaxrl.rollout.decode_state import Assignment, DecodeState, Prefix
from jaxrl.rollout.engine import Engine, host_inputs
from jaxrl.rollout.sampling import Truncation

# Most requests differ in little but their prompts and seeds.
_KEPT_SETTINGS = 64


class SlotAssignment(NamedTuple):
    """A sample that starts, or goes on.

    Attributes:
      slot: its slot.
      place: of its sequence in the prefix.
      prompt_id, sample_index: what its sampling key is made of.
      max_tokens: of its response.
      response_tokens: of its response, that the prefix holds already.
    """

    slot: int
    place: int
    prompt_id: int
    sample_index: int
    max_tokens: int
    response_tokens: int = 0


class Extension(NamedTuple):
    """Tokens that come on top of the sequence in a slot.

    Attributes:
      slot: which.
      length: tokens of the sequence without them.
      last: the last of these.
      tokens: int32, the new ones.
    """

    slot: int
    length: int
    last: int
    tokens: np.ndarray


# Seed, step, temperature and truncation, on the devices.
Settings: TypeAlias = tuple[Any, ...]


class DecodedTokens(NamedTuple):
    """Tokens that a dispatch has decoded, on the host.

    Attributes:
      active: bool [n], still decoding.
      num_tokens: int32 [n], how many were decoded.
      token: int32 [n, W], of which `num_tokens` are real.
      logprob, entropy: float32 [n, W].
    """

    active: np.ndarray
    num_tokens: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray

    def of_slot(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, log-probabilities and entropies that were decoded in a slot."""
        n = self.num_tokens[slot]
        return self.token[slot, :n], self.logprob[slot, :n], self.entropy[slot, :n]


def prefilled(engine: Engine, params: Params, sequences: Sequence[np.ndarray]) -> Prefix:
    """A prefix of each sequence, in chunks where they are long.

    Args:
      engine, params: of the model.
      sequences: int32, one or more and no more than the largest prefill batch, none empty or too long.
    """
    chunk = engine.config.chunk_tokens
    P = round_up(engine.batch_sizes, len(sequences))
    longest = max(len(s) for s in sequences)
    # A place that is left over holds one token, which nobody reads.
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
    """The prefix with each part appended to its sequence, chunk by chunk."""
    chunk = engine.config.chunk_tokens
    for start in range(0, max(len(part) for part in parts), chunk):
        now = [part[start : start + chunk] for part in parts]
        prefix = engine.extend(params, prefix, *_padded(engine, now))
    return prefix


def _padded(engine: Engine, parts: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
    """Tokens [P, T] of the smallest size that holds all parts, and their lengths [P]."""
    T = round_up(engine.prompt_sizes, max(len(part) for part in parts))
    tokens_PT = np.zeros((len(parts), T), np.int32)
    for row, part in zip(tokens_PT, parts, strict=True):
        row[: len(part)] = part
    length_P = np.array([len(part) for part in parts], np.int32)
    return host_inputs(engine.mesh, tokens_PT, length_P)


def on_device(engine: Engine, num_slots: int, assignments: Sequence[SlotAssignment]) -> Assignment:
    """The device's form of `assignments` in a state of so many slots."""
    source_n, id_n, index_n, limit_n, count_n = (np.zeros(num_slots, np.int32) for _ in range(5))
    source_n[:] = -1
    for each in assignments:
        source_n[each.slot], limit_n[each.slot] = each.place, each.max_tokens
        count_n[each.slot] = each.response_tokens
        id_n[each.slot], index_n[each.slot] = each.prompt_id, each.sample_index
    return Assignment(*host_inputs(engine.mesh, source_n, id_n, index_n, limit_n, count_n))


def settings_on_device(
    engine: Engine, *, seed: int, step: int, temperature: float, truncation: Truncation
) -> Settings:
    """Settings of samples as `Engine.insert` takes them; to be kept, since sending them takes a while."""
    scalars = host_inputs(engine.mesh, np.uint32(seed), np.int32(step), np.float32(temperature))
    limits, structure = jax.tree.flatten(truncation)
    return *scalars, jax.tree.unflatten(structure, host_inputs(engine.mesh, *limits))


def insert(
    engine: Engine,
    prefix: Prefix,
    state: DecodeState,
    assignments: Sequence[SlotAssignment],
    settings: Settings,
) -> DecodeState:
    """`Engine.insert` of samples that share their settings; `state` is consumed."""
    return engine.insert(prefix, state, on_device(engine, state.num_slots, assignments), *settings)


class Slots:
    """A decode state that grows and shrinks with its work. For one thread."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """No memory is taken before there are slots.

        Args:
          engine, params: of the model.
          lock: held while something is dispatched.
        """
        self.engine = engine
        self._params = params
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._state: DecodeState | None = None
        # Not of a method: a cache that refers to its owner would keep the decode state, which may be
        # most of a device's memory, until Python looks for cycles.
        send = functools.partial(settings_on_device, engine)
        self._settings = functools.lru_cache(_KEPT_SETTINGS)(send)

    def clear(self) -> None:
        """Forgets all slots, and frees their memory."""
        self._state = None

    def make_room(self, num_slots: int, moves: list[int] | None, longest: int) -> None:
        """Makes so many slots, with capacity for another dispatch of a sequence of `longest` tokens.

        Args:
          num_slots: of `Scheduler.num_slots`.
          moves: as `Scheduler.resize` has returned it.
          longest: tokens of the longest sequence that is in a slot or comes into one.
        """
        engine = self.engine
        capacity = round_up(engine.cache_sizes, longest + engine.config.tokens_per_dispatch)
        state = self._state
        if state is None:
            with self._lock:
                self._state = engine.init_decode_state(num_slots, capacity)
            return
        # Less capacity is worth a copy if slots move anyway, or if it is much less.
        if moves is None and state.capacity // 2 < capacity <= state.capacity:
            return
        if moves is None:
            moves = list(range(state.num_slots // engine.shards)) * engine.shards
        self._state = None
        with self._lock:
            (slot_n,) = host_inputs(engine.mesh, np.array(moves, np.int32))
            self._state = engine.resize(state, slot_n, capacity=capacity)

    def prefill(self, sequences: Sequence[np.ndarray]) -> Prefix:
        """See `prefilled`."""
        with self._lock:
            return prefilled(self.engine, self._params, sequences)

    def insert(
        self,
        prefix: Prefix,
        assignments: Sequence[SlotAssignment],
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
            settings = self._settings(
                seed=seed, step=step, temperature=temperature, truncation=truncation
            )
            self._state = insert(self.engine, prefix, state, assignments, settings)

    def extend(
        self, extensions: Sequence[Extension]
    ) -> Iterator[tuple[Prefix, dict[int, Extension]]]:
        """Sequences of slots with tokens on top, as prefixes, to be inserted in these slots again.

        Yields:
          A prefix and, for its places in use, which extension it holds. Only the new tokens are run.
        """
        engine = self.engine
        state, shards = self._state, engine.shards
        assert state is not None, "there are no slots"
        per_shard = engine.batch_sizes[-1] // shards
        slots_of_shard = state.num_slots // shards
        # A prefix takes as many sequences from every shard.
        waiting = [[e for e in extensions if e.slot // slots_of_shard == s] for s in range(shards)]
        while any(waiting):
            places = {
                s * per_shard + place: extension
                for s, of_shard in enumerate(waiting)
                for place, extension in enumerate(of_shard[:per_shard])
            }
            waiting = [of_shard[per_shard:] for of_shard in waiting]
            yield self._extended(places), places

    def _extended(self, places: dict[int, Extension]) -> Prefix:
        engine, state = self.engine, self._state
        assert state is not None, "there are no slots"
        P = engine.batch_sizes[-1]
        slot_P, length_P, token_P = (np.zeros(P, np.int32) for _ in range(3))
        parts = [np.zeros(0, np.int32)] * P
        for place, extension in places.items():
            slot_P[place] = extension.slot % (state.num_slots // engine.shards)
            length_P[place], token_P[place] = extension.length - 1, extension.last
            parts[place] = extension.tokens
        with self._lock:
            prefix = engine.extract(state, *host_inputs(engine.mesh, slot_P, length_P, token_P))
            return _extended(engine, self._params, prefix, parts)

    def release(self, slots: Sequence[int]) -> None:
        """Ends what is in `slots`."""
        state, self._state = self._state, None
        assert state is not None, "there are no slots"
        keep_n = np.ones(state.num_slots, bool)
        keep_n[list(slots)] = False
        with self._lock:
            self._state = self.engine.release(state, *host_inputs(self.engine.mesh, keep_n))

    def generate(self, least_active: int) -> DecodedTokens:
        """Decodes up to W tokens in every active slot, and waits for them; see `Engine.generate`."""
        state, self._state = self._state, None
        assert state is not None, "make_room comes first"
        with self._lock:
            (least,) = host_inputs(self.engine.mesh, np.int32(least_active))
            state = self.engine.generate(self._params, state, least)
        decoded = (state.active, state.out_count, state.out_token, state.out_logprob)
        decoded = fetch((*decoded, state.out_entropy))
        self._state = state
        return DecodedTokens(*decoded)
