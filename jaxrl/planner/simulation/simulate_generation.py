"""Simulates seconds and bytes of generation, which memory bandwidth bounds (as in HybridFlow).

    a step   = max(weights read, matmuls) + max(cache read, scores) + all-reduces + fixed overhead
    seconds  = resharding + prefill + all steps of the busiest replica + dispatches
    bytes    = weights of generation + slots x bytes of a slot, or the pages of a paged cache

Matmuls and attention of a layer run one after the other, so their maxima add up. Not covered: speculative
decoding, concurrent grading.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.collective_times import Collectives
from jaxrl.planner.simulation.cost_breakdown import CostBreakdown, SlotUse
from jaxrl.planner.simulation.decode_trace import (
    FEWEST_SLOTS,
    DecodeTrace,
    PrefillWork,
    quick_trace,
)
from jaxrl.planner.simulation.engine_replay import EngineReplay, ReplayedEngine
from jaxrl.planner.simulation.model_numbers import mean_attention_flops, model_numbers
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, Workload
from jaxrl.rollout.engine_sizes import page_sizes, slot_sizes
from jaxrl.rollout.settings import EngineConfig

# Steps of always full slots that are replayed; the last one counts. The first one begins without unfinished
# groups and takes longer; in the second there are as many as in the fifth, for the 32B recipe.
_STEPS = 2


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
    """Simulates the generation of a step's samples, on one cluster.

    Attributes:
      workload: work of a step.
    """

    def __init__(self, cluster: Cluster, workload: Workload, assumptions: Assumptions):
        """Args are the devices, the work of a step, and the assumptions."""
        self._cluster = cluster
        self.workload = workload
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
        if replay:
            trace = self.replayed(model, devices, generation, greedy=greedy)
        else:
            trace = self._trace(devices, p_g, t_g, slots, greedy)
        replicas = devices // (p_g * t_g)
        decoding = self._decoding_s(model, p_g, t_g, trace, replicas)
        used = min(slots, self._samples_per_replica(devices, p_g, t_g, greedy))
        full = trace.without_idle_slots(used, self.workload.tokens_per_dispatch)
        busy_s = sum(self._decoding_s(model, p_g, t_g, full, replicas).values())
        seconds = {
            "resharding": self.resharding_s(model, strategy, p_g, t_g),
            "prefill": self._prefill_s(model, devices, p_g, trace.prefill),
            **decoding,
        }
        tokens = generation.cache_tokens or slots * self.workload.slot_tokens
        cache = tokens * self._token_bytes(model, p_g, t_g)
        weights = self.weight_bytes(model, p_g, t_g)
        transient = {"weights of generation": weights, "cache": cache}
        idle_s = max(0.0, sum(decoding.values()) - busy_s)
        use = None
        if replay:
            busy = float(trace.samples) * replicas
            use = SlotUse(busy, slots * replicas, trace.dispatches, trace.preempted)
        return CostBreakdown(seconds, {}, transient, idle_s, use)

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
        fitting = int(self.fitting_slots(model, p_g, t_g, np.array(budget)))
        slots = slot_counts(min(samples, self.workload.max_slots, fitting))
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
        """Bytes per device of the weights in the types of generation, in p_g stages and t_g tensor shards."""
        numbers, assume = model_numbers(model), self._assume
        layers = numbers.stacked / p_g * (assume.sampled_bytes or assume.compute_bytes)
        return (layers + numbers.outside * assume.compute_bytes) / t_g

    def slot_bytes(self, model: ModelConfig, p_g: int, t_g: int) -> float:
        """Bytes per device of a slot's cache."""
        return self.workload.slot_tokens * self._token_bytes(model, p_g, t_g)

    def fitting_slots(
        self, model: ModelConfig, p_g: int, t_g: int, budget: np.ndarray
    ) -> np.ndarray:
        """The number of slots that fit beside the weights of generation into bytes per device, any shape."""
        left = np.maximum(budget - self.weight_bytes(model, p_g, t_g), 0.0)
        slots = left // self.slot_bytes(model, p_g, t_g)
        if not self.workload.paged:
            return slots
        least = self.workload.least_pool_tokens * self._token_bytes(model, p_g, t_g)
        return np.where(left < least, 0.0, slots)

    def _token_bytes(self, model: ModelConfig, p_g: int, t_g: int) -> float:
        """Bytes per device of the keys and values of a token."""
        return model_numbers(model).cache_values_of_shard(p_g, t_g) * self._assume.cache_bytes

    def resharding_s(self, model: ModelConfig, strategy: Strategy, p_g: int, t_g: int) -> float:
        """Seconds of resharding from the training to the generation layout.

        HybridFlow Table 2: a device lacks (t p - t_g p_g) / (t_g p_g t p) of the model, and gathers it inside
        its micro data-parallel group, whose members are neighbours. With FSDP it first gathers its training
        shard inside its FSDP group.
        """
        shard = self.weight_bytes(model, strategy.p, strategy.t)
        whole = self.weight_bytes(model, p_g, t_g)
        stride = strategy.p * strategy.t
        fsdp = self._collectives.gather_s(shard, strategy.fsdp, stride)
        members = stride // (p_g * t_g)
        # If only stages are gathered, members are one stage (t devices) apart.
        apart = 1 if strategy.t > t_g else strategy.t
        return fsdp + self._collectives.gather_s(whole, members, apart)

    def _samples(self, greedy: bool) -> int:
        work = self.workload
        prompts = math.ceil(work.prompts * work.sampled_per_kept)
        return prompts * (work.samples + greedy)

    def _samples_per_replica(self, devices: int, p_g: int, t_g: int, greedy: bool) -> int:
        return math.ceil(self._samples(greedy) / (devices // (p_g * t_g)))

    def _trace(self, devices: int, p_g: int, t_g: int, slots: int, greedy: bool) -> DecodeTrace:
        work = self.workload
        samples = self._samples_per_replica(devices, p_g, t_g, greedy)
        trace = quick_trace(
            work.prompt_lengths.mean,
            work.response_lengths,
            samples,
            min(slots, samples),
            work.tokens_per_dispatch,
            devices // (p_g * t_g),
            slots if self._assume.fixed_slots or work.paged else FEWEST_SLOTS,
        )
        if not work.always_full:
            return trace
        return trace.without_idle_slots(min(slots, samples), work.tokens_per_dispatch)

    def replayed(
        self, model: ModelConfig, devices: int, generation: GenerationStrategy, *, greedy: bool
    ) -> DecodeTrace:
        """The trace of the engine's own scheduler and pages; args as of `generation`."""
        work = self.workload
        G, samples = work.samples + greedy, self._samples(greedy)
        lengths = np.random.default_rng(0).permutation(work.response_lengths.quantiles(samples))
        prompts = np.random.default_rng(1).permutation(work.prompt_lengths.quantiles(samples // G))
        engine = self._engine(model, devices, generation)
        replay = EngineReplay(engine, prompts, lengths.reshape(-1, G))
        if not work.always_full:
            return replay.drained().trace(engine.replicas)
        batch = len(prompts)
        steps = [
            replay.always_full(
                groups=batch, prompts_per_batch=batch, max_staleness=work.max_staleness
            )
            for _ in range(_STEPS)
        ]
        return steps[-1].trace(engine.replicas)

    def _engine(
        self, model: ModelConfig, devices: int, generation: GenerationStrategy
    ) -> ReplayedEngine:
        work, replicas = self.workload, devices // (generation.p_g * generation.t_g)
        config = EngineConfig(
            slots=generation.slots * replicas,
            prefill_prompts=work.prefill_prompts,
            tokens_per_dispatch=work.tokens_per_dispatch,
            cache="paged" if generation.cache_tokens else "contiguous",
            cache_tokens=generation.cache_tokens * replicas,
            max_prompt_tokens=work.prompt_lengths.longest,
            max_response_tokens=work.response_lengths.longest,
            stop_ids=(),
        )
        kv_heads = max(1, model.num_kv_heads // generation.t_g)
        platform = self._cluster.accelerator.platform
        pages = page_sizes(config, shards=replicas, kv_heads=kv_heads, platform=platform)
        fixed = self._assume.fixed_slots or pages is not None
        return ReplayedEngine(
            slot_sizes(config, replicas, fixed=fixed),
            max(1, work.prefill_prompts // replicas) * replicas,
            replicas,
            work.tokens_per_dispatch,
            config.max_response_tokens,
            pages,
        )

    def _prefill_s(
        self, model: ModelConfig, devices: int, p_g: int, work: PrefillWork | None = None
    ) -> float:
        """Seconds of all prefills, spread over all devices, with a pipeline bubble.

        Each prefill calls two programs: prefill, and the insertion into the slots. Without `work` each prompt
        is prefilled once.
        """
        lengths = self.workload.prompt_lengths
        if work is None:
            n = math.ceil(self.workload.prompts * self.workload.sampled_per_kept)
            batches = math.ceil(n / self.workload.prefill_prompts)
            work = PrefillWork(batches, n, n * lengths.mean, n * lengths.mean_square)
        mean, square = work.tokens / work.sequences, work.squares / work.sequences
        attention = work.sequences * mean_attention_flops(model, mean, square)
        flops = work.tokens * model_numbers(model).token_flops + attention
        calls = 2 * work.batches * self._assume.call_s
        return calls + flops / devices / self._flops * (2 * p_g - 1) / p_g

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
        weights_s = self.weight_bytes(model, p_g, t_g) / self._weights_rate
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
        visits = float((trace.steps * trace.slots).sum()) / self.workload.tokens_per_dispatch
        each_slot = assume.slot_host_s + replicas * assume.host_s
        return trace.dispatches * assume.call_s + visits * each_slot
