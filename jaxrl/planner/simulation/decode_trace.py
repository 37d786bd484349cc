"""Decode traces: the samples in flight on a replica and the cache that they read, step by step.

There are two ways to make a trace, both without a model:

    quick_trace     samples enter slots as these become free, one replica stands for all; fast, for searches
    replayed_trace  the engine's own scheduler (rollout/scheduler.py), all replicas in lockstep, dispatch by
                    dispatch, with its early ends, its refills and its smaller programs at the end

`quick_trace` has no dispatches and refills a slot at once, so it predicts slightly shorter times.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np

from jaxrl.planner.simulation.workload import LengthDistribution
from jaxrl.rollout.buckets import bucket_sizes
from jaxrl.rollout.scheduler import SampleRequest, Scheduler

_SMALLEST = 8
_MOST_STRETCHES = 512


@dataclasses.dataclass(frozen=True)
class DecodeTrace:
    """Decoding as a sequence of stretches; in each, the busiest replica has the same samples.

    Attributes:
      steps: float64 [stretches], decoding steps of each stretch.
      slots: slots that the program decodes, idle ones included.
      cached: mean number of tokens that attention reads per step, summed over samples.
      samples: mean number of samples in flight on all replicas.
      dispatches: number of dispatches of the engine.
    """

    steps: np.ndarray
    slots: np.ndarray
    cached: np.ndarray
    samples: float
    dispatches: float


@functools.lru_cache(maxsize=4096)
def quick_trace(
    prompt_tokens: float,
    responses: LengthDistribution,
    samples: int,
    slots: int,
    tokens_per_dispatch: int,
) -> DecodeTrace:
    """Traces one replica, which stands for all.

    Args:
      prompt_tokens: mean prompt length, cached from the start.
      responses: response lengths.
      samples: total number of samples of the replica.
      slots: number of slots of the replica.
      tokens_per_dispatch: W.
    """
    lengths = responses.quantiles(samples)
    # Random order, since lengths are not known beforehand; the longest sample must not start last.
    order = np.random.default_rng(0).permutation(samples)
    starts, lengths = _starts(lengths[order], slots), lengths[order]
    steps, running, cached = _stretches(starts, lengths, prompt_tokens)
    mean = float((running * steps).sum() / steps.sum())
    together = _together(steps, _round_up(running, slots), cached)
    return DecodeTrace(*together, mean, float(steps.sum()) / tokens_per_dispatch)


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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, samples in flight, mean cached tokens) between each start or end and the next."""
    ends = starts + lengths
    edges = np.unique(np.concatenate([starts, ends]))
    steps = np.diff(edges).astype(float)
    middle = (edges[:-1] + edges[1:]) / 2
    begun = np.searchsorted(np.sort(starts), middle)
    order = np.argsort(ends)
    ended = np.searchsorted(ends[order], middle)
    running = (begun - ended).astype(float)
    # A sample that started at step s has prompt + (step - s) tokens.
    started = np.concatenate([[0.0], np.cumsum(np.sort(starts))])[begun]
    finished = np.concatenate([[0.0], np.cumsum(starts[order])])[ended]
    cached = running * (prompt_tokens + middle) - (started - finished)
    busy = running > 0
    return steps[busy], running[busy], cached[busy]


def _round_up(running: np.ndarray, slots: int) -> np.ndarray:
    sizes = np.array(bucket_sizes(slots, min(slots, _SMALLEST)))
    return sizes[np.searchsorted(sizes, np.minimum(running, slots))]


def replayed_trace(
    prompt_tokens: float,
    lengths: Sequence[int] | np.ndarray,
    *,
    samples_per_prompt: int,
    replicas: int,
    slots: int,
    tokens_per_dispatch: int,
    prefill_prompts: int = 32,
) -> DecodeTrace:
    """Runs the engine's scheduler with known response lengths.

    Args:
      prompt_tokens: mean prompt length.
      lengths: length of each response, in the order of the requests.
      samples_per_prompt: G; this many neighbouring samples share a prefill.
      replicas: number of replicas that share the samples.
      slots: number of slots per replica.
      tokens_per_dispatch: W.
      prefill_prompts: number of prompts per prefill.
    """
    left = np.asarray(lengths, np.int64).copy()
    done = np.zeros_like(left)
    sizes = [n * replicas for n in bucket_sizes(slots, min(slots, _SMALLEST))]
    scheduler = Scheduler(
        [SampleRequest(i, i // samples_per_prompt) for i in range(len(left))],
        slot_sizes=sizes,
        prefill_batch=prefill_prompts,
        shards=replicas,
    )
    found, in_flight = [], 0.0
    while scheduler.unfinished:
        scheduler.resize()
        while scheduler.admit() is not None:
            pass
        running = scheduler.running
        places, ids = (np.fromiter(x, np.int64) for x in (running, running.values()))
        steps = _dispatch_steps(left[ids], scheduler.enough_active, tokens_per_dispatch)
        decoded = np.minimum(left[ids], steps)
        each = scheduler.num_slots // replicas
        reads = (prompt_tokens + done[ids] + decoded / 2) * decoded / steps
        busiest = np.bincount(places // each, reads, replicas).max()
        found.append((steps, each, busiest))
        in_flight += decoded.sum()
        left[ids] -= decoded
        done[ids] += decoded
        scheduler.finish(places[left[ids] == 0].tolist())
    steps, each, cached = np.array(found, float).T
    return DecodeTrace(steps, each, cached, in_flight / steps.sum(), len(found))


def _dispatch_steps(left: np.ndarray, enough_active: int, most: int) -> int:
    """Steps until few enough slots are active for the host to act, at most W."""
    ending = math.ceil(len(left) - enough_active)
    return int(min(most, np.partition(left, ending - 1)[ending - 1]))
