"""Decode traces: the samples in flight on a replica and the cache that they read, step by step.

There are two ways to make a trace, both without a model:

    quick_trace     samples enter slots as these become free, one replica stands for all; fast, for searches
    engine_replay   the engine's own scheduler and pages, all replicas in lockstep, dispatch by dispatch

`quick_trace` has no dispatches and refills a slot at once. Replicas step in lockstep, so each step waits for
the one with the longest texts: `quick_trace` estimates its load from the spread of one replica's texts. For
the flagship's four clusters both give the same seconds within 5% (tests/planner/test_expected_step.py).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.planner.simulation.workload import LengthDistribution
from jaxrl.rollout.engine_sizes import coarse_bucket_sizes, round_up

_MOST_STRETCHES = 512


class PrefillSizes(NamedTuple):
    """Numbers of sequences and of tokens that prefills are compiled for, each ascending."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]

    def padded(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(sequences, tokens of each) that a prefill of these lengths computes: long ones in chunks."""
        chunks, rest = divmod(max(lengths), self.prompts[-1])
        tokens = chunks * self.prompts[-1] + (round_up(self.prompts, rest) if rest else 0)
        return round_up(self.batches, len(lengths)), tokens


class PrefillWork(NamedTuple):
    """Work of all prefills, padding included.

    Attributes:
      batches: number of prefills.
      sequences: number of prefilled sequences.
      tokens, squares: sums of their lengths, and of the squares of these.
      inserts: number of times that a batch is inserted into slots.
      inserted: sum of the tokens of the inserted batches.
    """

    batches: int
    sequences: float
    tokens: float
    squares: float
    inserts: float
    inserted: float

    @staticmethod
    def of(
        prefills: Sequence[Sequence[int]], sizes: PrefillSizes, inserts: Sequence[int]
    ) -> PrefillWork:
        """The work of prefills.

        Args:
          prefills: lengths of the sequences of each prefill, at least one.
          sizes: sizes that they are padded to.
          inserts: index of the prefill of each insertion.
        """
        rows, tokens = np.array([sizes.padded(batch) for batch in prefills], float).T
        return PrefillWork(
            *(len(prefills), float(rows.sum()), float((rows * tokens).sum())),
            *(float((rows * tokens**2).sum()), len(inserts)),
            float((rows * tokens)[list(inserts)].sum()),
        )


@dataclasses.dataclass(frozen=True)
class DecodeTrace:
    """Decoding as a sequence of stretches; in each, the busiest replica has the same samples.

    Attributes:
      steps: float64 [stretches], decoding steps of each stretch.
      slots: slots that the program decodes, idle ones included.
      cached: mean number of tokens that attention reads per step, summed over the busiest replica's samples.
      samples: mean number of samples in flight on a replica.
      mean_cached: mean of `cached` over replicas and steps.
      dispatches: number of dispatches of the engine.
      prefill: work of all prefills; None if it is not part of the trace.
      preempted: number of times that a sample lost its pages and was prefilled again.
    """

    steps: np.ndarray
    slots: np.ndarray
    cached: np.ndarray
    samples: float
    mean_cached: float
    dispatches: float
    prefill: PrefillWork | None = None
    preempted: int = 0

    def without_idle_slots(self, slots: int, tokens_per_dispatch: int) -> DecodeTrace:
        """The same tokens if all slots of all replicas were in use in every step.

        Args:
          slots: number of slots of a replica.
          tokens_per_dispatch: W.
        """
        steps = float(self.steps.sum())
        busy = self.samples * steps / slots
        cached = self.mean_cached * steps / busy
        return DecodeTrace(
            np.array([busy]),
            np.array([float(slots)]),
            np.array([cached]),
            float(slots),
            cached,
            busy / tokens_per_dispatch,
        )


@functools.lru_cache(maxsize=4096)
def quick_trace(
    prompt_tokens: float,
    responses: LengthDistribution,
    samples: int,
    slots: int,
    tokens_per_dispatch: int,
    replicas: int = 1,
    fewest_slots: int = 1,
) -> DecodeTrace:
    """Traces one replica, which stands for all.

    Args:
      prompt_tokens: mean prompt length, cached from the start.
      responses: response lengths.
      samples: total number of samples of the replica.
      slots: number of slots of the replica.
      tokens_per_dispatch: W.
      replicas: number of replicas; a step takes as long as the busiest of them.
      fewest_slots: smallest number of slots of a replica that a program decodes.
    """
    lengths = responses.quantiles(samples)
    # Random order, since lengths are not known beforehand.
    lengths = np.random.default_rng(0).permutation(lengths)
    if not responses.is_constant:
        longest = int(lengths.max())
        count = int((responses.quantiles(samples * replicas) >= longest).sum())
        _place_last_longest(lengths, longest, count)
    starts = _starts(lengths, slots)
    steps, running, cached, squares = _stretches(starts, lengths, prompt_tokens)
    whole = float(steps.sum())
    mean, mean_cached = (float((x * steps).sum()) / whole for x in (running, cached))
    if not responses.is_constant:
        cached = cached + _above_mean(replicas) * _spread(running, cached, squares, slots)
    together = _together(steps, _round_up(running, slots, fewest_slots), cached)
    return DecodeTrace(*together, mean, mean_cached, whole / tokens_per_dispatch)


def _place_last_longest(lengths: np.ndarray, longest: int, count: int) -> None:
    """Moves the last text of the longest length to its expected place, in place.

    A batch ends with the text of this length that starts last, on whichever replica it is. Of `count` such
    texts at random places in all replicas the last is expected behind count / (count + 1) of the others.
    """
    last = int(np.flatnonzero(lengths == longest)[-1])
    place = min(len(lengths) * count // (count + 1), len(lengths) - 1)
    lengths[[last, place]] = lengths[[place, last]]


def _above_mean(replicas: int) -> float:
    """Expected maximum of independent standard normal numbers (Blom's approximation)."""
    if replicas == 1:
        return 0.0
    return statistics.NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))


def _spread(running: np.ndarray, cached: np.ndarray, squares: np.ndarray, slots: int) -> np.ndarray:
    """Standard deviation between replicas of the sum of n independent texts, where n may vary too.

    variance = n variance(text) + variance(n) mean(text)^2, and n is binomial once slots stay empty
    """
    of_texts = np.maximum(squares - cached**2 / running, 0.0)
    of_number = np.maximum(1 - running / slots, 0.0) * cached**2 / running
    return np.sqrt(of_texts + of_number)


def _together(
    steps: np.ndarray, slots: np.ndarray, cached: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Averages neighbouring stretches into fewer; with thousands of samples the result hardly changes."""
    if len(steps) <= _MOST_STRETCHES:
        return steps, slots, cached
    firsts = np.arange(_MOST_STRETCHES) * len(steps) // _MOST_STRETCHES
    whole = np.add.reduceat(steps, firsts)
    slots, cached = (np.add.reduceat(steps * x, firsts) / whole for x in (slots, cached))
    return whole, slots, cached


def _starts(lengths: np.ndarray, slots: int) -> np.ndarray:
    """The step in which each sample starts: as soon as an earlier one has ended."""
    count = len(lengths)
    if slots >= count:
        return np.zeros(count, np.int64)
    if (lengths == lengths[0]).all():
        return np.arange(count) // slots * lengths[0]
    free = [0] * slots
    starts = np.empty(count, np.int64)
    for i, length in enumerate(lengths.tolist()):
        starts[i] = free[0]
        heapq.heapreplace(free, free[0] + length)
    return starts


def _stretches(
    starts: np.ndarray, lengths: np.ndarray, prompt_tokens: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps between each start or end and the next, and samples in flight with the sums of their cached
    tokens and of the squares of these.
    """
    ends = starts + lengths
    edges = np.unique(np.concatenate([starts, ends]))
    steps = np.diff(edges).astype(float)
    middle = (edges[:-1] + edges[1:]) / 2
    begun = np.searchsorted(np.sort(starts), middle)
    order = np.argsort(ends)
    ended = np.searchsorted(ends[order], middle)
    running = (begun - ended).astype(float)
    # A sample that started at step s has prompt + (step - s) tokens.
    first, second = (
        _running_sum(np.sort(x), begun) - _running_sum(x[order], ended)
        for x in (starts.astype(float), starts.astype(float) ** 2)
    )
    tokens = prompt_tokens + middle
    cached = running * tokens - first
    squares = running * tokens**2 - 2 * tokens * first + second
    busy = running > 0
    return steps[busy], running[busy], cached[busy], squares[busy]


def _running_sum(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sum of the first `counts` values, for each count."""
    return np.concatenate([[0.0], np.cumsum(values)])[counts]


def _round_up(running: np.ndarray, slots: int, fewest: int) -> np.ndarray:
    sizes = np.array(coarse_bucket_sizes(slots, min(slots, fewest)))
    return sizes[np.searchsorted(sizes, np.minimum(running, slots))]
