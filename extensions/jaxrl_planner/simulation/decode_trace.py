"""The decode trace: the samples in flight on a replica and the cache that they read, step by step.

Samples enter slots as these become free, and one replica stands for all. Replicas step in lockstep, so each
step waits for the one with the longest texts, whose load follows from the spread of one replica's texts.
There are no dispatches: a slot is refilled at once. A test compares the trace with the engine's own scheduler
and driver (tests/extensions/planner/simulation/test_decode_trace.py).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import statistics

import numpy as np

from jaxrl.rollout.engine_sizes import coarse_bucket_sizes
from jaxrl_planner.simulation.workload import LengthDistribution

# With thousands of samples, fewer stretches hardly change a result.
_MOST_STRETCHES = 512


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
    """

    steps: np.ndarray
    slots: np.ndarray
    cached: np.ndarray
    samples: float
    mean_cached: float
    dispatches: float

    def without_idle_slots(self, slots: int, tokens_per_dispatch: int) -> DecodeTrace:
        """The same tokens if all slots of all replicas were in use in every step.

        Args:
          slots: number of slots of a replica.
          tokens_per_dispatch: W.
        """
        steps = float(self.steps.sum())
        busy = self.samples * steps / slots
        cached = self.mean_cached * steps / busy
        one = np.ones(1)
        return DecodeTrace(
            *(busy * one, slots * one, cached * one),
            *(float(slots), cached, busy / tokens_per_dispatch),
        )


@functools.lru_cache(maxsize=4096)
def trace_decoding(
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
    # Random order, since lengths are not known beforehand.
    lengths = np.random.default_rng(0).permutation(responses.quantiles(samples))
    if not responses.is_constant:
        # A batch ends with the longest text that starts last, on whichever replica it is. Of `count` texts of
        # this length at random places in all replicas the last is expected behind count / (count + 1) of the
        # others.
        longest = int(lengths.max())
        count = int((responses.quantiles(samples * replicas) >= longest).sum())
        last = int(np.flatnonzero(lengths == longest)[-1])
        place = min(samples * count // (count + 1), samples - 1)
        lengths[[last, place]] = lengths[[place, last]]
    steps, running, cached, squares = _stretches(_starts(lengths, slots), lengths, prompt_tokens)
    whole = float(steps.sum())
    mean, mean_cached = (float((x * steps).sum()) / whole for x in (running, cached))
    if not responses.is_constant and replicas > 1:
        # The expected maximum of independent normal numbers (Blom's approximation), for the sum of n
        # independent texts: its variance is n variance(text) + variance(n) mean(text)^2, and n is binomial
        # once slots stay empty.
        above = statistics.NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))
        of_texts = np.maximum(squares - cached**2 / running, 0.0)
        of_number = np.maximum(1 - running / slots, 0.0) * cached**2 / running
        cached = cached + above * np.sqrt(of_texts + of_number)
    sizes = np.array(coarse_bucket_sizes(slots, min(slots, fewest_slots)))
    decoded = sizes[np.searchsorted(sizes, np.minimum(running, slots))]
    # Neighbouring stretches are averaged: the simulator works on arrays of this length.
    if len(steps) > _MOST_STRETCHES:
        firsts = np.arange(_MOST_STRETCHES) * len(steps) // _MOST_STRETCHES
        together = np.add.reduceat(steps, firsts)
        decoded, cached = (np.add.reduceat(steps * x, firsts) / together for x in (decoded, cached))
        steps = together
    return DecodeTrace(steps, decoded, cached, mean, mean_cached, whole / tokens_per_dispatch)


def _starts(lengths: np.ndarray, slots: int) -> np.ndarray:
    # The step in which each sample starts: as soon as an earlier one has ended.
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
    # Steps between each start or end and the next, and samples in flight with the sums of their cached
    # tokens and of the squares of these.
    ends = starts + lengths
    edges = np.unique(np.concatenate([starts, ends]))
    steps = np.diff(edges).astype(float)
    middle = (edges[:-1] + edges[1:]) / 2
    begun = np.searchsorted(np.sort(starts), middle)
    order = np.argsort(ends)
    ended = np.searchsorted(ends[order], middle)
    running = (begun - ended).astype(float)

    def sum_of_first(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])[counts]

    # A sample that started at step s has prompt + (step - s) tokens.
    first, second = (
        sum_of_first(np.sort(x), begun) - sum_of_first(x[order], ended)
        for x in (starts.astype(float), starts.astype(float) ** 2)
    )
    tokens = prompt_tokens + middle
    cached = running * tokens - first
    squares = running * tokens**2 - 2 * tokens * first + second
    busy = running > 0
    return steps[busy], running[busy], cached[busy], squares[busy]
