"""The bucket sizes that an engine compiles its programs for, and the size of its pool of pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl.errors import UserError
from jaxrl.rollout.settings import EngineConfig

# Compiling a program for a smaller size does not pay off.
SHORTEST_CACHE, _SHORTEST_PROMPT = 128, 64
# Tokens of a page. On CPU pages are gathered; small ones waste less.
_PAGE_ON_CPU = 16
# On accelerators the smallest of these whose table fits. Kernels read blocks of 64 (GPU) or 512 tokens (TPU).
_PAGES = (128, 256, 512)
MOST_PAGE_TOKENS = _PAGES[-1]
"""Tokens of the largest page on any platform; a multiple of all others."""
# Bytes of a TPU's scalar memory for the table of the kernel, which has a row for each slot and kv head. The
# memory has 1 MiB, and the kernel keeps the lengths of the slots there too.
_TABLE_BYTES = 7 * 2**17


def prefill_sizes(config: EngineConfig, shards: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of sequences, and of tokens, that prefill programs are compiled for."""
    # Only two: prefill is compiled for each pair of capacity and prompt size, and insert for each capacity.
    prompts = max(1, config.prefill_prompts // shards)
    batches = tuple(n * shards for n in sorted({-(-prompts // 4), prompts}))
    return batches, bucket_sizes(config.chunk_tokens, _SHORTEST_PROMPT)


def slot_sizes(config: EngineConfig, shards: int, *, fixed: bool) -> tuple[int, ...]:
    """The numbers of slots, on all shards, that programs are compiled for; one if they are fixed."""
    slots = max(1, config.slots // shards)
    # Which smaller number suffices depends on the mesh, and with it when a dispatch ends.
    fixed |= config.deterministic
    fewest = slots if fixed else max(1, config.fewest_slots // shards)
    return tuple(n * shards for n in coarse_bucket_sizes(slots, fewest))


@dataclasses.dataclass(frozen=True)
class PageSizes:
    """The sizes of a paged cache.

    Attributes:
      shards: number of shards of the slots.
      page_tokens: number of tokens of a page.
      num_pages: pages per shard, including page 0, a scratch page.
      pages_per_slot: maximum number of pages of a slot.
    """

    shards: int
    page_tokens: int
    num_pages: int
    pages_per_slot: int


def page_sizes(
    config: EngineConfig, *, shards: int, kv_heads: int, platform: str | None
) -> PageSizes | None:
    """The sizes of the paged cache of an engine; None if its cache is contiguous.

    Args:
      config: sizes of the engine.
      shards: number of shards of the slots.
      kv_heads: number of kv heads that a device uses.
      platform: platform of the devices; None for a plan without devices, which is one for accelerators.

    Raises:
      UserError: the pool of a shard is too small for a sample of full length, or the page table of a device
        is too large for a TPU.
    """
    if config.cache != "paged":
        return None
    slots = max(1, config.slots // shards)
    page = _page_tokens(config, slots * kv_heads, platform)
    per_slot = -(-(config.max_context_tokens + config.tokens_per_dispatch) // page)
    longest = -(-config.max_context_tokens // page)
    # More than the slots can fill keep the conversations of agents while their tools run.
    pages = config.cache_tokens // shards // page if config.cache_tokens else slots * per_slot
    if pages < longest:
        raise UserError(
            f"cache_tokens {config.cache_tokens:,} are {pages:,} pages of {page} tokens on each replica "
            f"({shards} in all), and a sample of {config.max_context_tokens:,} tokens needs {longest:,}; use "
            f"{longest * page * shards:,} or more, or shorter responses"
        )
    return PageSizes(shards, page, 1 + pages, per_slot)


def _page_tokens(config: EngineConfig, pairs: int, platform: str | None) -> int:
    """Tokens of a page, for as many pairs of a slot and a kv head on a device."""
    if platform == "cpu":
        return _PAGE_ON_CPU
    if platform != "tpu":
        return _PAGES[0]
    tokens = config.max_context_tokens + config.tokens_per_dispatch
    largest = MOST_PAGE_TOKENS
    # The kernel reads blocks of the largest page.
    least_bytes = 4 * pairs * -(-tokens // largest)
    for page in _PAGES:
        if least_bytes * (largest // page) <= _TABLE_BYTES:
            return page
    raise UserError(
        f"the page table of {pairs:,} pairs of a slot and a kv head, {tokens:,} tokens each, takes "
        f"{least_bytes:,} bytes of a device with pages of {largest} tokens, and a TPU has room for "
        f"{_TABLE_BYTES:,}; use fewer slots, shorter responses, or a larger t_g of mesh.generate"
    )


def bucket_sizes(largest: int, smallest: int) -> tuple[int, ...]:
    """Bucket sizes from about `smallest` to exactly `largest`, ascending: 2^n and 3 * 2^(n-1).

    Rounding up to the next bucket adds at most two thirds. There are at most
    2 * log2(largest / smallest) + 3 buckets; only `largest` if it is below `smallest`.
    """
    # Sizes above three quarters of the largest save too little to pay for compiling another program.
    sizes = {k * 2**n // 2 for n in range(largest.bit_length()) for k in (2, 3)}
    return *sorted(s for s in sizes if smallest <= s <= largest * 3 // 4), largest


def coarse_bucket_sizes(largest: int, smallest: int) -> tuple[int, ...]:
    """Half as many bucket sizes from about `smallest` to exactly `largest`, ascending: 2^n.

    Rounding up to the next bucket less than doubles, or less than triples up to `largest`.
    """
    powers = (2**n for n in range(largest.bit_length()))
    return *(s for s in powers if smallest <= s <= largest * 3 // 4), largest


def round_up(sizes: Sequence[int], need: int) -> int:
    """The smallest of the ascending `sizes` that is at least `need`."""
    return next(size for size in sizes if size >= need)


def next_below(sizes: Sequence[int], size: int) -> int:
    """The largest of the ascending `sizes` below `size`; 0 if there is none."""
    return max((s for s in sizes if s < size), default=0)
