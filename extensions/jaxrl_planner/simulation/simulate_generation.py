"""Simulates seconds and bytes of generation, which memory bandwidth bounds (as in HybridFlow).

    a step   = max(weights read, matmuls) + max(cache read, scores) + all-reduces + kernels, copies, host
    seconds  = resharding + prefill + all steps of the busiest replica + dispatches
    bytes    = weights of generation + slots x bytes of a slot, or the pages of a paged cache

Matmuls and attention of a layer run one after the other, so their maxima add up. Not covered: speculative
decoding, concurrent grading.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models.experts import MOST_TOKENS_TO_ALL
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.engine_sizes import prefill_sizes, round_up
from jaxrl.rollout.settings import EngineConfig, fewest_slots
from jaxrl_planner.hardware.cluster import Cluster, Ring
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.collective_times import Collectives
from jaxrl_planner.simulation.decode_trace import DecodeTrace, trace_decoding
from jaxrl_planner.simulation.model_numbers import mean_attention_flops, model_numbers
from jaxrl_planner.simulation.step_costs import CostBreakdown, SlotUse
from jaxrl_planner.simulation.workload import Workload


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


class GenerationGroups(NamedTuple):
    """What decoding depends on, besides the slots of a replica.

    Attributes:
      devices: n, number of devices.
      p_g, t_g: sizes of generation.
      tensor, stages: links of the tensor groups and between the stages of generation.
      copies: links between the replicas of generation.
      experts: links of the replicas that split the experts of a mixture.
    """

    devices: int
    p_g: int
    t_g: int
    tensor: Ring
    stages: Ring
    copies: Ring
    experts: Ring

    @property
    def replicas(self) -> int:
        return self.devices // (self.p_g * self.t_g)


# Up to here every number of slots is tried: there a single slot more or less matters.
_EVERY_NUMBER = 64


def slot_counts(most: int, *, equal_samples: int = 0) -> tuple[int, ...]:
    """Numbers of slots to try, ascending: all up to 64, then eight per doubling, and `most` itself.

    Args:
      most: maximum number of slots.
      equal_samples: number of samples of a replica if all are equally long, else 0. All slots then end
        together, so the fewest slots for each number of rounds are tried too: no other number is faster.
    """
    found, octave = {most, *range(1, min(most, _EVERY_NUMBER) + 1)} - {0}, _EVERY_NUMBER
    if most:
        rounds = range(-(-equal_samples // most), equal_samples // _EVERY_NUMBER + 1)
        found |= {-(-equal_samples // k) for k in rounds if k}
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
        # The kernel of decoding reads the cache at a rate of its own; XLA's attention does not.
        by_kernel = assumptions.fixed_slots and not kind.measured and assumptions.kernels.cache_rate
        self._cache_rate = kind.memory_gbs * 1e9 * (by_kernel or assumptions.cache_rate)

    def generation(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        slots: int,
        cache_tokens: int = 0,
        *,
        greedy: bool = False,
    ) -> CostBreakdown:
        """Cost of generating all responses of a step.

        Args:
          model: model of the actor.
          layout: layout of its mesh.
          slots: number of slots per replica.
          cache_tokens: tokens of a paged cache per replica; 0 if every slot has room for the longest sample.
          greedy: whether each prompt also gets a greedy answer (ReMax).
        """
        groups = self.groups(layout)
        trace = self._trace(groups.replicas, slots, greedy)
        decoding = self._decoding_s(model, groups, trace)
        # What the same tokens would take with no slot idle and all replicas equally busy: the difference
        # to the trace is what plans call idle.
        used = min(slots, self._samples_per_replica(groups.replicas, greedy))
        full = trace.without_idle_slots(used, self.workload.tokens_per_dispatch)
        busy_s = sum(self._decoding_s(model, groups, full).values())
        seconds = {
            "resharding": self.resharding_s(model, layout),
            **self._prefill_s(model, groups, trace),
            **decoding,
        }
        tokens = cache_tokens or slots * self.workload.slot_tokens
        cache = tokens * self._token_bytes(model, layout.p_g, layout.t_g)
        weights = self.weight_bytes(model, layout.p_g, layout.t_g, layout.expert)
        transient = {"weights of generation": weights, "cache": cache}
        # Full slots decode in fewer steps, so rounding alone could make this negative.
        idle_s = max(0.0, sum(decoding.values()) - busy_s)
        busy = float(trace.samples) * groups.replicas
        use = SlotUse(busy, slots * groups.replicas, trace.dispatches)
        return CostBreakdown(seconds, {}, transient, idle_s, use)

    def groups(self, layout: ParallelLayout) -> GenerationGroups:
        # The same mesh as a run has, so a group that crosses hosts there crosses them here too.
        axes = GENERATE_RULES["heads"], ("stage_gen",), GENERATE_RULES["batch"], ("expert",)
        rings = (self._collectives.ring(layout, *each) for each in axes)
        return GenerationGroups(layout.num_devices, layout.p_g, layout.t_g, *rings)

    def best_seconds(
        self, model: ModelConfig, groups: GenerationGroups, *, budget: float, greedy: bool = False
    ) -> SlotTimes:
        """Seconds without resharding, by the number of slots that fit.

        Args:
          model: model of the actor.
          groups: devices that decode together.
          budget: maximum bytes per device for weights of generation and cache.
          greedy: whether each prompt also gets a greedy answer.

        Returns:
          The times; K is 0 if no slot fits.
        """
        samples = self._samples_per_replica(groups.replicas, greedy)
        fitting = int(self.fitting_slots(model, groups, np.array(budget)))
        # More slots than samples would never be filled.
        most = min(samples, self.workload.max_slots, fitting)
        are_equal = self.workload.response_lengths.is_constant
        slots = slot_counts(most, equal_samples=samples if are_equal else 0)
        found = [self.seconds_of(model, groups, n, greedy=greedy) for n in slots]
        room, seconds = np.array(slots), np.minimum.accumulate(found)
        # The first of the fastest: fewer slots for the same seconds.
        best = room[np.searchsorted(-seconds, -seconds)]
        return SlotTimes(room, best, seconds)

    def seconds_of(
        self, model: ModelConfig, groups: GenerationGroups, slots: int, *, greedy: bool = False
    ) -> float:
        """Seconds without resharding, with exactly this many slots per replica."""
        trace = self._trace(groups.replicas, slots, greedy)
        decoding = self._decoding_s(model, groups, trace)
        prefill = self._prefill_s(model, groups, trace)
        return sum(prefill.values()) + sum(decoding.values())

    def weight_bytes(self, model: ModelConfig, p_g: int, t_g: int, expert: int = 1) -> float:
        """Bytes per device of the weights in the types of generation, in p_g stages and t_g tensor shards.

        A decoding step reads all of them. In a mixture it does so if its tokens choose every expert: with 8
        of 128 experts for each, 99% are chosen by 72 tokens.
        """
        outside = model_numbers(model).outside * self._assume.compute_bytes / t_g
        return self._layer_bytes(model, p_g, t_g, expert) + outside

    def _layer_bytes(self, model: ModelConfig, p_g: int, t_g: int, expert: int) -> float:
        numbers, assume = model_numbers(model), self._assume
        layers = (numbers.dense + numbers.experts / expert) / (p_g * t_g)
        return layers * (assume.sampled_bytes or assume.compute_bytes)

    def slot_bytes(self, model: ModelConfig, p_g: int, t_g: int) -> float:
        return self.workload.slot_tokens * self._token_bytes(model, p_g, t_g)

    def fitting_slots(
        self, model: ModelConfig, groups: GenerationGroups, budget: np.ndarray
    ) -> np.ndarray:
        """The number of slots that fit beside the weights of generation into bytes per device, any shape."""
        p_g, t_g = groups.p_g, groups.t_g
        weights = self.weight_bytes(model, p_g, t_g, groups.experts.members)
        left = np.maximum(budget - weights, 0.0)
        slots = left // self.slot_bytes(model, p_g, t_g)
        # A slot of a contiguous cache has its whole memory from the start.
        if not self.workload.paged:
            return slots
        # A paged pool that cannot hold one sample of full length would never finish it.
        least = self.workload.least_pool_tokens * self._token_bytes(model, p_g, t_g)
        return np.where(left < least, 0.0, slots)

    def _token_bytes(self, model: ModelConfig, p_g: int, t_g: int) -> float:
        # Bytes per device of the keys and values of a token.
        return model_numbers(model).cache_values_of_shard(p_g, t_g) * self._assume.cache_bytes

    def resharding_s(self, model: ModelConfig, layout: ParallelLayout) -> float:
        """Seconds of resharding from the training to the generation layout.

        HybridFlow Table 2: a device lacks (t p - t_g p_g) / (t_g p_g t p) of the model, and gathers it inside
        its micro data-parallel group. First it gathers its training shard from those that split the weights.
        """
        whole = self.weight_bytes(model, layout.p_g, layout.t_g, layout.expert)
        micro = self._collectives.ring(layout, "stage_micro", "tensor_micro")
        return self.unshard_s(model, layout) + self._collectives.gather_s(whole, micro)

    def unshard_s(self, model: ModelConfig, layout: ParallelLayout) -> float:
        """Seconds in which replicas gather their training shards, the first part of resharding."""
        shard = self.weight_bytes(model, layout.p, layout.t, layout.expert)
        # Of shards that generation splits further, a device receives its part alone.
        received = shard / layout.fsdp_gen
        shards = self._collectives.ring(layout, *state_rules(layout.sharding).weights["embed"])
        return self._collectives.gather_s(received, shards)

    def _samples_per_replica(self, replicas: int, greedy: bool) -> int:
        work = self.workload
        prompts = math.ceil(work.prompts * work.sampled_per_kept)
        return math.ceil(prompts * (work.samples + greedy) / replicas)

    def _trace(self, replicas: int, slots: int, greedy: bool) -> DecodeTrace:
        work = self.workload
        samples = self._samples_per_replica(replicas, greedy)
        fewest = fewest_slots(slots * replicas, work.response_lengths.longest) // replicas
        trace = trace_decoding(
            work.prompt_lengths.mean,
            work.response_lengths,
            samples,
            min(slots, samples),
            work.tokens_per_dispatch,
            replicas,
            slots if self._assume.fixed_slots or work.paged else max(1, fewest),
        )
        if not work.always_full:
            return trace
        return trace.without_idle_slots(min(slots, samples), work.tokens_per_dispatch)

    def _prefill_s(
        self, model: ModelConfig, groups: GenerationGroups, trace: DecodeTrace
    ) -> dict[str, float]:
        # Seconds of all prefills, spread over all devices, with a pipeline bubble; and of the insertions.
        #
        # A device may insert any sequence of a batch into its slots, so all of them gather the batch.
        batches, rows, tokens, squares, inserts, inserted = _prefill_work(
            self.workload, groups.replicas, trace.dispatches, trace.samples
        )
        attention = rows * mean_attention_flops(model, tokens / rows, squares / rows)
        flops = tokens * model_numbers(model).token_flops + attention
        p_g, call_s = groups.p_g, self._assume.call_s
        computed = flops / groups.devices / self._flops * (2 * p_g - 1) / p_g
        own = tokens / groups.replicas
        computed += sum(self._exchanges_s(model, groups, own, batches).values())
        size = inserted * self._token_bytes(model, p_g, groups.t_g)
        moved = self._collectives.gather_s(size, groups.copies, calls=inserts)
        return {
            "prefill": batches * call_s + computed,
            "prompts to slots": inserts * call_s + moved,
        }

    def _decoding_s(
        self, model: ModelConfig, groups: GenerationGroups, trace: DecodeTrace
    ) -> dict[str, float]:
        # Seconds of all decoding steps, by cause.
        #
        # A pipeline decodes its slots in p_g parts, in 2 p_g - 1 ticks; in each tick a stage reads all of its
        # weights for one part.
        assume, numbers = self._assume, model_numbers(model)
        p_g, t_g = groups.p_g, groups.t_g
        slots, cached = trace.slots / p_g, trace.cached / p_g
        weights = self.weight_bytes(model, p_g, t_g, groups.experts.members)
        weights_s = weights / self._weights_rate
        flops = slots * numbers.token_flops
        if model.num_experts:
            # All experts are applied to every token (`models.experts.apply_all_experts`).
            others = 2 * numbers.experts * (1 - model.experts_per_token / model.num_experts)
            most = MOST_TOKENS_TO_ALL.get(self._cluster.accelerator.platform, 0)
            flops += slots * others * (slots * groups.experts.members <= most)
        matmuls_s = flops / (p_g * t_g) / self._flops
        cache_s = cached * self._token_bytes(model, p_g, t_g) / self._cache_rate
        scores_s = cached * numbers.pair_flops / (p_g * t_g) / self._flops
        times = trace.steps * (2 * p_g - 1)
        read = float(times.sum()) * weights_s
        attended = float((times * cache_s).sum())
        visits = float((trace.steps * trace.slots).sum()) / self.workload.tokens_per_dispatch
        each_slot = groups.replicas * assume.host_s
        found = {
            "weights read": read,
            "matmuls beyond that": float((times * np.maximum(matmuls_s - weights_s, 0)).sum()),
            "cache read": attended,
            "scores beyond that": float((times * np.maximum(scores_s - cache_s, 0)).sum()),
            "overhead of each step": float(trace.steps.sum()) * assume.step_s,
            # A program call for each dispatch, and the host's work for every slot in it.
            "host between dispatches": trace.dispatches * assume.call_s + visits * each_slot,
        }
        for cause, each in (
            self._exchanges_s(model, groups, slots, 1.0) | self._others_s(model, groups, slots)
        ).items():
            found[cause] = float((times * each).sum())
        if p_g > 1:
            hop = self._collectives.pass_on_s(0.0, groups.stages)
            found["between stages"] = float(times.sum()) * hop
        return found

    def _others_s(
        self, model: ModelConfig, groups: GenerationGroups, rows: np.ndarray
    ) -> dict[str, Any]:
        # Seconds of a step beside products and reads of weights and cache.
        p_g, t_g, assume, work = groups.p_g, groups.t_g, self._assume, self.workload
        counts = assume.token
        # A compiled loop has the ticks of all parts of the slots in it.
        if counts is None or p_g > 1:
            # Stages scan their layers; without them weights are a list of layers on GPUs.
            scans = assume.kernels.copies_layers and p_g > 1
            copied = scans * self._layer_bytes(model, p_g, t_g, groups.experts.members)
            counts = assume.kernels.token(model_numbers(model), p_g, t_g, copied)
        gbs = self._cluster.accelerator.memory_gbs
        return assume.kernels.token_s(counts, rows, work.tokens_per_dispatch, gbs)

    def _exchanges_s(
        self, model: ModelConfig, groups: GenerationGroups, tokens: Any, calls: float
    ) -> dict[str, Any]:
        # Seconds of a stage's exchanges of `tokens` tokens, in as many passes as `calls`.
        #
        # In each layer two all-reduces, and a group of experts gathers its tokens and scatters the sums: as
        # training does, but always of all tokens.
        found, experts = {}, groups.experts
        for cause, ring, each, replicas in (
            ("tensor all-reduces", groups.tensor, 2, 1),
            ("tokens to experts", experts, 1, experts.members),
        ):
            times = each * model.num_layers / groups.p_g
            size = times * replicas * tokens * model.d_model * self._assume.compute_bytes
            if ring.members > 1:
                found[cause] = self._collectives.reduce_s(size, ring, calls=times * calls)
        return found


@functools.lru_cache(maxsize=4096)
def _prefill_work(
    work: Workload, replicas: int, dispatches: float, samples: float
) -> tuple[int, float, float, float, float, float]:
    """The work of all prefills, padding included: each prompt is prefilled once.

    Each dispatch ends samples so that others start, and a batch is inserted in it. With slots that are always
    full, prompts are drawn at each dispatch, and samples that were unfinished are prefilled again.

    Args:
      work: work of a step.
      replicas: number of replicas.
      dispatches, samples: number of dispatches, and mean number of samples in flight on a replica.

    Returns:
      Number of prefills, and of their sequences; sums of the tokens of these, and of their squares; number of
      insertions of a batch into slots, and sum of the tokens of these batches.
    """
    config = EngineConfig(
        prefill_prompts=work.prefill_prompts,
        prefill_chunk_tokens=work.prefill_chunk_tokens,
        max_prompt_tokens=work.prompt_lengths.longest,
        max_response_tokens=work.response_lengths.longest,
        stop_ids=(),
    )
    batch_sizes, prompt_sizes = prefill_sizes(config, replicas)
    lengths, _ = work.lengths_of(math.ceil(work.prompts * work.sampled_per_kept), 1)
    each = most = batch_sizes[-1]
    again: list[int] = []
    if work.always_full:
        each = min(most, math.ceil(len(lengths) / dispatches))
        live = work.prompt_lengths.mean + work.response_lengths.mean_in_flight
        again = [round(live)] * round(samples * replicas)
    prefills = [lengths[i : i + each].tolist() for i in range(0, len(lengths), each)]
    prefills += [again[i : i + most] for i in range(0, len(again), most)]
    padded = []
    for prefill in prefills:
        # Long prompts are prefilled in chunks.
        chunks, rest = divmod(max(prefill), prompt_sizes[-1])
        tokens = chunks * prompt_sizes[-1] + (round_up(prompt_sizes, rest) if rest else 0)
        padded.append((round_up(batch_sizes, len(prefill)), tokens))
    rows, tokens = np.array(padded, float).T
    inserts = max(float(len(prefills)), dispatches)
    total = float((rows * tokens).sum())
    return (
        *(len(prefills), float(rows.sum()), total, float((rows * tokens**2).sum())),
        *(inserts, inserts / len(prefills) * total),
    )
