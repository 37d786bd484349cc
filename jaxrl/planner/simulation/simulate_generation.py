"""Simulates seconds and bytes of generation, which memory bandwidth bounds (as in HybridFlow).

    a step   = max(weights read, matmuls) + max(cache read, scores) + all-reduces + fixed overhead
    seconds  = resharding + prefill + all steps of the busiest replica + dispatches
    bytes    = weights of generation + slots x bytes of a slot

Matmuls and attention of a layer run one after the other, so their maxima add up. The cache is contiguous:
every slot has room for the longest sample. Not covered: prefix sharing,
speculative decoding, concurrent grading.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.collective_times import Collectives
from jaxrl.planner.simulation.cost_breakdown import CostBreakdown
from jaxrl.planner.simulation.decode_trace import DecodeTrace, quick_trace, replayed_trace
from jaxrl.planner.simulation.model_numbers import mean_attention_flops, model_numbers
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, Workload


class SlotTimes(NamedTuple):
    """Seconds of generation by the number of slots that fit; fewer slots may be faster.

    Attributes:
      room: int64 [K], numbers of slots that fit, ascending.
      slots: int64 [K], the best number of slots up to `room`.
      seconds: float64 [K], seconds with the best number.
    """

    room: np.ndarray
    slots: np.ndarray
    seconds: np.ndarray


# Up to here every number of slots is tried: there a single slot more or less matters.
_EVERY_NUMBER = 64


def slot_counts(most: int) -> tuple[int, ...]:
    """Numbers of slots to try, ascending: all up to 64, then eight per doubling, and `most` itself."""
    found, octave = {most, *range(1, min(most, _EVERY_NUMBER) + 1)} - {0}, _EVERY_NUMBER
    while octave <= most:
        found |= {n for n in (octave * k // 8 for k in range(8, 16)) if n <= most}
        octave *= 2
    return tuple(sorted(found))


class GenerationSimulator:
    """Simulates the generation of a step's samples, on one cluster."""

    def __init__(self, cluster: Cluster, workload: Workload, assumptions: Assumptions):
        """Args are the devices, the work of a step, and the assumptions."""
        self._cluster = cluster
        self._work = workload
        self._assume = assumptions
        self._collectives = Collectives(cluster, assumptions)
        kind = cluster.accelerator
        self._flops = kind.roof.tflops(assumptions.dtype) * 1e12 * assumptions.flops_rate
        self._weights_rate = kind.memory_gbs * 1e9 * assumptions.weights_rate
        self._cache_rate = kind.memory_gbs * 1e9 * assumptions.cache_rate
        is_torus = kind.arrangement == "torus"
        self._step_s = assumptions.torus_step_s if is_torus else assumptions.hosts_step_s

    def generation(
        self,
        model: ModelConfig,
        strategy: Strategy,
        generation: GenerationStrategy,
        *,
        greedy: bool = False,
        replay: bool = False,
    ) -> CostBreakdown:
        """Cost of generating all responses of a step.

        Args:
          model: model of the actor.
          strategy: strategy of training.
          generation: p_g, t_g and slots.
          greedy: whether each prompt also gets a greedy answer (ReMax).
          replay: whether to replay the engine's scheduler for all replicas; else one replica stands for all.
        """
        p_g, t_g = generation.p_g, generation.t_g
        devices = strategy.num_devices
        slots = generation.slots
        trace = (self._replayed if replay else self._trace)(devices, p_g, t_g, slots, greedy)
        replicas = devices // (p_g * t_g)
        decoding = self._decoding_s(model, p_g, t_g, trace, replicas)
        used = min(slots, self._samples_per_replica(devices, p_g, t_g, greedy))
        full = trace.without_idle_slots(used, self._work.tokens_per_dispatch)
        busy_s = sum(self._decoding_s(model, p_g, t_g, full, replicas).values())
        seconds = {
            "resharding": self.resharding_s(model, strategy, p_g, t_g),
            "prefill": self._prefill_s(model, devices, p_g),
            **decoding,
        }
        cache = slots * self.slot_bytes(model, p_g, t_g)
        weights = self.weight_bytes(model, p_g, t_g)
        transient = {"weights of generation": weights, "cache": cache}
        idle_s = max(0.0, sum(decoding.values()) - busy_s)
        return CostBreakdown(seconds, {}, transient, idle_s)

    def best_seconds(
        self,
        model: ModelConfig,
        devices: int,
        p_g: int,
        t_g: int,
        *,
        budget: float,
        greedy: bool = False,
    ) -> SlotTimes:
        """Seconds without resharding, by the number of slots that fit.

        Args:
          model: model of the actor.
          devices: n, number of devices.
          p_g, t_g: sizes of generation.
          budget: maximum bytes per device for weights of generation and cache.
          greedy: whether each prompt also gets a greedy answer.

        Returns:
          The times; K is 0 if no slot fits.
        """
        samples = self._samples_per_replica(devices, p_g, t_g, greedy)
        left = budget - self.weight_bytes(model, p_g, t_g)
        fitting = int(max(0.0, left) // self.slot_bytes(model, p_g, t_g))
        slots = slot_counts(min(samples, self._work.max_slots, fitting))
        found = [self.seconds_of(model, devices, p_g, t_g, n, greedy=greedy) for n in slots]
        room, seconds = np.array(slots), np.minimum.accumulate(found)
        # The first of the fastest: fewer slots for the same seconds.
        best = room[np.searchsorted(-seconds, -seconds)]
        return SlotTimes(room, best, seconds)

    def seconds_of(
        self,
        model: ModelConfig,
        devices: int,
        p_g: int,
        t_g: int,
        slots: int,
        *,
        greedy: bool = False,
    ) -> float:
        """Seconds without resharding, with exactly this many slots per replica."""
        trace = self._trace(devices, p_g, t_g, slots, greedy)
        decoding = self._decoding_s(model, p_g, t_g, trace, devices // (p_g * t_g))
        return self._prefill_s(model, devices, p_g) + sum(decoding.values())

    def weight_bytes(self, model: ModelConfig, p_g: int, t_g: int) -> float:
        """Bytes per device of the weights of generation."""
        return model_numbers(model).params_of_shard(p_g, t_g) * self._assume.compute_bytes

    def slot_bytes(self, model: ModelConfig, p_g: int, t_g: int) -> float:
        """Bytes per device of a slot's contiguous cache."""
        values = model_numbers(model).cache_values_of_shard(p_g, t_g)
        # The last dispatch may run past the longest sample.
        tokens = self._work.longest_tokens + self._work.tokens_per_dispatch
        return tokens * values * self._assume.cache_bytes

    def resharding_s(self, model: ModelConfig, strategy: Strategy, p_g: int, t_g: int) -> float:
        """Seconds of resharding from the training to the generation layout.

        HybridFlow Table 2: a device lacks (t p - t_g p_g) / (t_g p_g t p) of the model, and gathers it inside
        its micro data-parallel group, whose members are neighbours. With FSDP it first gathers its training
        shard inside its FSDP group.
        """
        numbers, size = model_numbers(model), self._assume.compute_bytes
        shard = numbers.params_of_shard(strategy.p, strategy.t) * size
        whole = numbers.params_of_shard(p_g, t_g) * size
        stride = strategy.p * strategy.t
        fsdp = self._collectives.gather_s(shard, strategy.fsdp, stride)
        members = stride // (p_g * t_g)
        # If only stages are gathered, members are one stage (t devices) apart.
        apart = 1 if strategy.t > t_g else strategy.t
        return fsdp + self._collectives.gather_s(whole, members, apart)

    def _samples(self, greedy: bool) -> int:
        work = self._work
        prompts = math.ceil(work.prompts * work.sampled_per_kept)
        return prompts * (work.samples + greedy)

    def _samples_per_replica(self, devices: int, p_g: int, t_g: int, greedy: bool) -> int:
        return math.ceil(self._samples(greedy) / (devices // (p_g * t_g)))

    def _trace(self, devices: int, p_g: int, t_g: int, slots: int, greedy: bool) -> DecodeTrace:
        work = self._work
        samples = self._samples_per_replica(devices, p_g, t_g, greedy)
        return quick_trace(
            work.prompt_lengths.mean,
            work.response_lengths,
            samples,
            min(slots, samples),
            work.tokens_per_dispatch,
            devices // (p_g * t_g),
        )

    def _replayed(self, devices: int, p_g: int, t_g: int, slots: int, greedy: bool) -> DecodeTrace:
        work, samples = self._work, self._samples(greedy)
        lengths = np.random.default_rng(0).permutation(work.response_lengths.quantiles(samples))
        return replayed_trace(
            work.prompt_lengths.mean,
            lengths,
            samples_per_prompt=work.samples + greedy,
            replicas=devices // (p_g * t_g),
            slots=slots,
            tokens_per_dispatch=work.tokens_per_dispatch,
            prefill_prompts=work.prefill_prompts,
        )

    def _prefill_s(self, model: ModelConfig, devices: int, p_g: int) -> float:
        """Seconds of prefilling each prompt once, spread over all devices, with a pipeline bubble.

        Each prefill batch calls two programs: prefill, and the insertion into the slots.
        """
        lengths = self._work.prompt_lengths
        attention = mean_attention_flops(model, lengths.mean, lengths.mean_square)
        flops = lengths.mean * model_numbers(model).token_flops + attention
        prompts = math.ceil(self._work.prompts * self._work.sampled_per_kept)
        calls = 2 * math.ceil(prompts / self._work.prefill_prompts) * self._assume.call_s
        return calls + prompts * flops / devices / self._flops * (2 * p_g - 1) / p_g

    def _decoding_s(
        self, model: ModelConfig, p_g: int, t_g: int, trace: DecodeTrace, replicas: int
    ) -> dict[str, float]:
        """Seconds of all decoding steps, by cause.

        A pipeline decodes its slots in p_g parts, in 2 p_g - 1 ticks; in each tick a stage reads all of its
        weights for one part.
        """
        assume, numbers = self._assume, model_numbers(model)
        ticks = 2 * p_g - 1
        slots, cached = trace.slots / p_g, trace.cached / p_g
        shard = numbers.params_of_shard(p_g, t_g)
        weights_s = shard * assume.compute_bytes / self._weights_rate
        matmuls_s = slots * numbers.token_flops / (p_g * t_g) / self._flops
        cache = numbers.cache_values_of_shard(p_g, t_g) * assume.cache_bytes
        cache_s = cached * cache / self._cache_rate
        scores_s = cached * numbers.pair_flops / (p_g * t_g) / self._flops
        times = trace.steps * ticks
        read = float(times.sum()) * weights_s
        attended = float((times * cache_s).sum())
        found = {
            "weights read": read,
            "matmuls beyond that": float((times * np.maximum(matmuls_s - weights_s, 0)).sum()),
            "cache read": attended,
            "scores beyond that": float((times * np.maximum(scores_s - cache_s, 0)).sum()),
            "overhead of each step": float(trace.steps.sum()) * self._step_s,
            "host between dispatches": self._host_s(trace, replicas),
        }
        if t_g > 1:
            size = slots * numbers.width * assume.compute_bytes
            each = self._collectives.reduce_s(size, t_g, 1)
            found["tensor all-reduces"] = 2 * numbers.layers / p_g * float((times * each).sum())
        if p_g > 1:
            hop = self._collectives.pass_on_s(0.0, t_g)
            found["between stages"] = float(times.sum()) * hop
        return found

    def _host_s(self, trace: DecodeTrace, replicas: int) -> float:
        """Seconds of the host in all dispatches: a program call each, and its work for every slot."""
        assume = self._assume
        visits = float((trace.steps * trace.slots).sum()) / self._work.tokens_per_dispatch
        each_slot = assume.slot_host_s + replicas * assume.host_s
        return trace.dispatches * assume.call_s + visits * each_slot
