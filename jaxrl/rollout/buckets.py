"""Bucket sizes: the few sizes that programs are compiled for."""

from __future__ import annotations

from collections.abc import Sequence


def bucket_sizes(largest: int, smallest: int) -> tuple[int, ...]:
    """Bucket sizes from about `smallest` to exactly `largest`, ascending: 2^n and 3 * 2^(n-1).

    Rounding up to the next bucket adds at most two thirds. There are at most
    2 * log2(largest / smallest) + 3 buckets; only `largest` if it is below `smallest`. Sizes above three
    quarters of `largest` are left out: they save too little to pay for compiling another program.
    """
    powers = _powers_of_two(largest)
    return _among({*powers, *(power + power // 2 for power in powers)}, largest, smallest)


def coarse_bucket_sizes(largest: int, smallest: int) -> tuple[int, ...]:
    """Half as many bucket sizes from about `smallest` to exactly `largest`, ascending: 2^n.

    Rounding up to the next bucket less than doubles, or less than triples up to `largest`.
    """
    return _among(set(_powers_of_two(largest)), largest, smallest)


def _powers_of_two(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length())]


def _among(sizes: set[int], largest: int, smallest: int) -> tuple[int, ...]:
    """`largest`, and those of the sizes that are worth a program."""
    return *sorted(s for s in sizes if smallest <= s <= largest * 3 // 4), largest


def round_up(sizes: Sequence[int], need: int) -> int:
    """The smallest of the ascending `sizes` that is at least `need`."""
    return next(size for size in sizes if size >= need)


def next_below(sizes: Sequence[int], size: int) -> int:
    """The largest of the ascending `sizes` below `size`; 0 if there is none."""
    return max((s for s in sizes if s < size), default=0)
