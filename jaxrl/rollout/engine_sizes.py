"""The bucket sizes that an engine compiles its programs for."""

from __future__ import annotations

import dataclasses

from jaxrl.models.cache.interface import CacheKind
from jaxrl.rollout.buckets import bucket_sizes
from jaxrl.rollout.settings import EngineConfig

# Compiling a program for a smaller size does not pay off.
_SHORTEST_CACHE, _SHORTEST_PROMPT = 64, 64


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """Bucket sizes, each ascending. Slots and batches are multiples of the number of shards.

    Example: 16 slots in 4 shards and a prefill of 8 prompts: slots (4, 8, 16), batches (4, 8).

    Attributes:
      slots: numbers of slots of a state.
      batches: numbers of sequences of a prefix.
      prompts: numbers of tokens of a prefill program.
      prefixes: capacities of a prefix.
      caches: capacities of a state.
    """

    slots: tuple[int, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    prefixes: tuple[int, ...]
    caches: tuple[int, ...]


def engine_sizes(config: EngineConfig, cache: CacheKind, shards: int) -> EngineSizes:
    """The bucket sizes of an engine with this cache and number of shards."""
    # On accelerators a single state lasts for the whole run: a resize would need memory for two states.
    fixed = cache.reads_own_length
    longest = config.max_context_tokens + config.tokens_per_dispatch
    longest += -longest % cache.capacity_multiple
    prefixes = bucket_sizes(longest, _SHORTEST_CACHE)
    slots = max(1, config.slots // shards)
    fewest = slots if fixed else max(1, config.fewest_slots // shards)
    # Only two: prefill is compiled for each pair of capacity and prompt size, and insert for each capacity.
    prompts = max(1, config.prefill_prompts // shards)
    return EngineSizes(
        slots=tuple(n * shards for n in bucket_sizes(slots, fewest)),
        batches=tuple(n * shards for n in sorted({-(-prompts // 4), prompts})),
        prompts=bucket_sizes(config.chunk_tokens, _SHORTEST_PROMPT),
        prefixes=prefixes,
        caches=(longest,) if fixed else prefixes,
    )
