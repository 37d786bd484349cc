"""An engine without a model: each sample has a length, and all else is what the host does.

It has the part of `rollout.engine.Engine` that a `DecodeLoop` uses, with arrays of the host. So scheduling,
slots, groups and unfinished samples are tested and measured at any size.

n slots   W tokens of a dispatch
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.rollout.decode_state import DecodedTokens
from jaxrl.rollout.engine_sizes import page_sizes, slot_sizes
from jaxrl.rollout.settings import EngineConfig

# Response lengths, int [n], of samples by the ids of their prompts and their indices, int [n] each.
Lengths: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]


class FakeCall(NamedTuple):
    """A dispatch.

    Attributes:
      begin, end: processor time of the thread before and after it, in seconds.
      steps: number of tokens that a slot decodes, if its sample does not end.
      active: number of slots that decode at its start.
      tokens: number of tokens of all slots.
      slots: number of slots, idle ones included.
    """

    begin: float
    end: float
    steps: int
    active: int
    tokens: int
    slots: int


@dataclasses.dataclass
class FakeState:
    """The slots of the fake engine, on the host.

    Attributes:
      left: int32 [n], tokens that each slot has still to decode.
      active: bool [n].
      decoded: tokens of the last dispatch.
      capacity: tokens per slot.
    """

    left: np.ndarray
    active: np.ndarray
    decoded: DecodedTokens
    capacity: int

    @property
    def num_slots(self) -> int:
        """n."""
        return len(self.active)


class FakeEngine:
    """Decodes W tokens in every active slot, until the sample has its length.

    A sample that was left unfinished continues to the same length.

    Attributes:
      calls: all dispatches.
      prefilled_tokens: number of tokens of all prefills.
      num_drafted: 0, as it does not speculate.
    """

    num_drafted = 0

    def __init__(
        self,
        config: EngineConfig,
        lengths: Lengths,
        *,
        vocabulary: int = 32_000,
        shards: int = 1,
        platform: str = "gpu",
        mesh: Mesh | None = None,
    ):
        """Args.

        config: settings, of which the first stop id ends every response.
        lengths: lengths of the responses.
        vocabulary: number of token ids.
        shards: number of shards of the slots.
        platform: platform that a paged cache has its pages for.
        mesh: devices that it stands for; None for one.
        """
        self.config = config
        self.mesh = jax.make_mesh((1,), ("data",)) if mesh is None else mesh
        self.shards = shards
        self.pages = page_sizes(config, shards=shards, kv_heads=1, platform=platform)
        self.slot_sizes = slot_sizes(config, shards, fixed=self.pages is not None)
        self.batch_sizes = (max(1, config.prefill_prompts // shards) * shards,)
        longest = config.max_context_tokens + config.tokens_per_dispatch
        self.prompt_sizes = self.prefix_sizes = self.cache_sizes = (longest,)
        self.calls: list[FakeCall] = []
        self.prefilled_tokens = 0
        self._lengths = lengths
        shape = (config.slots, config.tokens_per_dispatch)
        first = 1 + max(config.stop_ids)
        tokens = np.random.default_rng(0).integers(first, vocabulary, shape)
        self._tokens = tokens.astype(np.int32)
        self._floats = np.full(shape, -0.5, np.float32)

    def of_part(self, mesh: Mesh) -> FakeEngine:
        """Some of the replicas, each a device, with their part of the slots; they note the same calls."""
        slots = self.config.slots * mesh.size // self.mesh.size
        config = dataclasses.replace(self.config, slots=slots, smallest_bucket=slots)
        part = FakeEngine(config, self._lengths, shards=mesh.size, mesh=mesh)
        part.calls = self.calls
        return part

    def fetch(self, results: Any) -> Any:
        """`Engine.fetch`: they are on the host already."""
        return jax.device_get(results)

    def init_decode_state(self, num_slots: int, capacity: int) -> FakeState:
        """Idle slots."""
        zeros = np.zeros(num_slots, np.int32)
        nothing = DecodedTokens(zeros, self._tokens, self._floats, self._floats)
        return FakeState(zeros, np.zeros(num_slots, bool), nothing, capacity)

    def prefill(self, params: Any, tokens: Any, lengths: Any) -> object:
        """Nothing is computed."""
        self.prefilled_tokens += int(np.asarray(lengths).sum())
        return object()

    def insert(self, prefix: Any, state: FakeState, assignment: Any, *settings: Any) -> FakeState:
        """Starts samples."""
        ids, index, limit, count = (
            np.asarray(getattr(assignment, name))
            for name in ("prompt_id", "sample_index", "limit", "count")
        )
        new = np.flatnonzero(np.asarray(assignment.source) >= 0)
        left, active = state.left.copy(), state.active.copy()
        left[new] = np.minimum(self._lengths(ids[new], index[new]), limit[new]) - count[new]
        active[new] = True
        return dataclasses.replace(state, left=left, active=active)

    def release(self, state: FakeState, keep: Any) -> FakeState:
        """Stops slots."""
        return dataclasses.replace(state, active=state.active & np.asarray(keep))

    def resize(self, state: FakeState, slots: Any, capacity: int) -> FakeState:
        """Moves slots."""
        # Counted within the shard.
        each, now = state.num_slots // self.shards, len(slots) // self.shards
        kept = np.asarray(slots) >= 0
        old = np.asarray(slots) + np.repeat(np.arange(self.shards) * each, now)
        return FakeState(
            np.where(kept, state.left[old], 0), kept & state.active[old], state.decoded, capacity
        )

    def with_pages(self, state: FakeState, table: np.ndarray, shared: np.ndarray) -> FakeState:
        """Nothing is read from pages."""
        return state

    def for_decoding(self, params: Any) -> Any:
        """The same weights."""
        return params

    def generate(self, params: Any, state: FakeState, least_active: Any) -> FakeState:
        """Decodes until fewer slots than wanted are active, W tokens at most."""
        begin = time.thread_time()
        W, least = self.config.tokens_per_dispatch, int(least_active)
        left = np.sort(np.where(state.active, state.left, 0))[::-1]
        # Steps after which no more than `least` slots are active.
        steps = min(W, max(1, int(left[least])))
        count = np.where(state.active, np.minimum(state.left, steps), 0).astype(np.int32)
        rest = state.left - count
        n = state.num_slots
        tokens, ended = self._tokens[:n].copy(), np.flatnonzero(state.active & (rest == 0))
        tokens[ended, count[ended] - 1] = self.config.stop_ids[0]
        decoded = DecodedTokens(count, tokens, self._floats[:n], self._floats[:n])
        state = FakeState(rest, state.active & (rest > 0), decoded, state.capacity)
        call = FakeCall(
            begin, time.thread_time(), steps, int((count > 0).sum()), int(count.sum()), n
        )
        self.calls.append(call)
        return state


def lognormal_lengths(mean_tokens: float, *, sigma: float = 0.9, seed: int = 0) -> Lengths:
    """Log-normal lengths, as in reasoning: most are short, and a few are ten times as long as the mean.

    A length depends on nothing but the prompt's id, the sample's index and the seed.
    """

    def lengths(ids: np.ndarray, index: np.ndarray) -> np.ndarray:
        of_sample = _hashed(
            _hashed(ids.astype(np.uint64) + np.uint64(seed << 32)) + index.astype(np.uint64)
        )
        uniform, angle = (_fraction(_hashed(of_sample + np.uint64(i))) for i in (1, 2))
        normal = np.sqrt(-2 * np.log(uniform)) * np.cos(2 * np.pi * angle)
        return np.ceil(np.exp(np.log(mean_tokens) - sigma**2 / 2 + sigma * normal)).astype(np.int64)

    return lengths


def _hashed(x: np.ndarray) -> np.ndarray:
    """The splitmix64 hash of each number, uint64: unlike a generator per sample it takes no Python loop."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _fraction(x: np.ndarray) -> np.ndarray:
    """Numbers above 0 and at most 1."""
    return ((x >> np.uint64(11)) + np.uint64(1)) / 2.0**53
