"""Simulates seconds and bytes of forward passes and updates, which compute bounds (as in HybridFlow).

    rows of a minibatch --> microbatches of whole rows --> flushes of m microbatches through p stages
    seconds   matmuls and attention, remat, bubble, all-reduces of tensor parallelism, stages' permutes,
              weights gathered (FSDP), gradients summed, minus the part hidden by compute; optimiser reads
    bytes     weights, moments | gradients, cast weights, kept layer inputs, and the larger of one layer's
              activations and the logits

Replicas of the context axis share rows: each has a part of a row's tokens, and of its tiles in attention.
Replicas of the expert axis exchange their tokens, and each computes its own experts: the same operations, as
if all experts were chosen equally often.

Groups have the devices of a run's mesh (`mesh.layout`). Not covered: offloading, transfers between pools.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.ring import pick_split
from jaxrl.mesh.rules import TRAIN_RULES
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.mesh.token_exchange import exchange_pays, exchanged_share
from jaxrl.models.attention import pick_block_tokens
from jaxrl.models.model_config import ModelConfig
from jaxrl_planner.hardware.cluster import Cluster, Ring
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.collective_times import Collectives
from jaxrl_planner.simulation.filled_rows import (
    FilledRows,
    filled_rows,
    pairs_of_a_row,
    pairs_of_one_text,
)
from jaxrl_planner.simulation.model_numbers import mean_attention_flops, model_numbers
from jaxrl_planner.simulation.step_costs import CostBreakdown
from jaxrl_planner.simulation.workload import Workload

# All compute the scores again; splash does so in two kernels, one for the gradient of the queries and one for
# that of keys and values.
BACKWARD_ATTENTION = {"xla": 5, "cudnn": 5, "splash": 7}
"""Matmuls of the backward pass of attention, by implementation; the forward pass has two."""


@dataclasses.dataclass(frozen=True)
class _Flushes:
    """The split of a replica's rows into pipeline flushes. Each computes whole rows, padding included."""

    # Number of flushes in a pass over the sequences, a mean.
    count: float
    # M, number of microbatches per flush.
    microbatches: int
    # Tokens of a replica's rows in a microbatch; of its part of them with a context axis.
    microbatch_tokens: float
    # Number of rows in these microbatches, of the replicas that share them.
    rows: float


class PassSimulator:
    """Simulates passes over the sequences of a step, on one cluster."""

    def __init__(self, cluster: Cluster, workload: Workload, assumptions: Assumptions):
        """Args are the devices, the work of a step, and the assumptions."""
        self._cluster = cluster
        self._work = workload
        self._assume = assumptions
        self._collectives = Collectives(cluster, assumptions)
        kind = cluster.accelerator
        self._flops = kind.roof.tflops(assumptions.dtype) * 1e12 * assumptions.flops_rate
        self._read = kind.memory_gbs * 1e9 * assumptions.weights_rate

    @functools.cached_property
    def _filled(self) -> FilledRows:
        # The workload is hashed once: measured lengths are thousands of numbers.
        return filled_rows(self._work)

    def divides(self, layout: ParallelLayout) -> bool:
        """Whether rows divide over replicas and stages, and a row over the replicas that share it."""
        work = self._work
        divides = work.microbatch_rows % layout.row_parts == 0
        return divides and work.row_tokens % layout.context == 0

    def inference(
        self, model: ModelConfig, layout: ParallelLayout, *, share: float = 1.0
    ) -> CostBreakdown:
        """Cost of one forward pass over all sequences: values, log-probabilities or scores.

        Args:
          model: model of the role.
          layout: its layout; the sizes of generation do not matter.
          share: number of sequences relative to the trained ones; above 1 if greedy answers are scored too.
        """
        flushes = self._flush(layout, share=share)
        compute = self._forward_s(model, layout, flushes)
        seconds = {
            "compute": compute,
            "pipeline bubble": compute * (layout.p - 1) / flushes.microbatches,
            **self._exchanges_s(model, layout, flushes, passes=1),
            **self._gathers_s(model, layout, flushes, gathers=1, compute_s=compute),
            "program call": self._assume.call_s,
        }
        return CostBreakdown(
            seconds, self._weights(model, layout), self._at_work(model, layout, flushes)
        )

    def training(self, model: ModelConfig, layout: ParallelLayout) -> CostBreakdown:
        work, assume = self._work, self._assume
        flushes = self._flush(layout)
        repeats = work.epochs
        # Rematerialisation computes each layer once more before its backward pass.
        again = 0 if assume.remat == "none" else 1
        forward = self._forward_s(model, layout, flushes) * repeats
        # A gradient takes twice the matmuls of the weights, but more of those of attention.
        attention = BACKWARD_ATTENTION[assume.attention] / 2
        compute = forward + repeats * self._forward_s(
            model, layout, flushes, weights=2, attention=attention
        )
        # What can hide the exchanges of weights and gradients.
        down = model_numbers(model).down_flops / model_numbers(model).token_flops
        repeated = again * repeats * self._forward_s(model, layout, flushes, weights=1 - down)
        moved = self._moved_s(model, layout, flushes) * repeats
        busy = compute + repeated
        data = self._gathers_s(
            model, layout, flushes, gathers=2, compute_s=busy / repeats, gradients=True
        )
        exchanged = self._exchanges_s(model, layout, flushes, passes=2 + again)
        values = self._values(model, layout)
        summed = values / self._shards(layout, "gradients").members
        # Weights and moments are read and written, gradients read.
        read = 2 * (assume.master_bytes + assume.moments_bytes) + assume.reduced_bytes
        own = values / self._shards(layout, "optimizer").members
        seconds = {
            "compute": compute,
            "layers computed again": repeated,
            "activations, logits and casts": moved,
            "run side by side": assume.kernels.together_s(busy + moved) - busy - moved,
            "pipeline bubble": busy * (layout.p - 1) / flushes.microbatches,
            **{name: s * repeats for name, s in (exchanged | data).items()},
            "optimiser": work.updates * repeats * own * read / self._read,
            "program call": assume.call_s,
        }
        resident = self._weights(model, layout, trained=True)
        # The ticks of a flush have their own gradient sum, and the sum over replicas has another buffer.
        sums = 1 + (layout.p > 1) + (layout.d > self._shards(layout, "gradients").members)
        # Kept for the backward pass: inputs of all ticks of a flush, plus two copies for the recomputed tick,
        # which pass from one loop to another.
        numbers, ticks = model_numbers(model), flushes.microbatches + layout.p - 1
        tokens = flushes.microbatch_tokens * (ticks + 2 if layout.p > 1 else 1)
        kept = numbers.width * assume.compute_bytes
        if assume.remat == "none":
            kept = (numbers.kept_values + numbers.split_values / layout.t) * assume.compute_bytes
            # Norms compute in float32, and keep their inputs so too.
            kept += numbers.kept_values * 4 if assume.compute_bytes < 4 else 0
        layers = numbers.layers * numbers.part_of_stage(layout.p)
        kept *= tokens * layers
        if assume.remat == "offload_inputs":
            # Out and back for each flush. The device holds those of two layers at a time.
            copied = 2 * flushes.count * kept * repeats
            seconds["inputs of layers to the host"] = copied / (assume.offload_gbs * 1e9)
            kept *= 2 / layers
        transient = {
            "gradients": sums * assume.gradient_bytes * summed,
            "kept of the layers": kept,
            **self._at_work(model, layout, flushes, backward=True),
        }
        return CostBreakdown(seconds, resident, transient)

    def _flush(self, layout: ParallelLayout, *, share: float = 1.0) -> _Flushes:
        # The flushes of a pass over `share` times the sequences of all minibatches.
        work, filled, d = self._work, self._filled, layout.row_shards
        # With one microbatch a pipeline is no faster than one stage.
        wanted = (work.pipeline_microbatches or layout.p) if layout.p > 1 else 1
        if work.microbatch_rows:
            rows = work.microbatch_rows
            wanted = math.gcd(max(1, rows // d), wanted)
        else:
            if work.pipeline_microbatches:
                wanted = min(wanted, math.ceil(max(filled.rows_U) / d))
            rows = wanted * d
        micro = filled.microbatches(rows, fill_minibatches=work.fill_minibatches)
        each = rows / d / wanted
        size = each * work.row_tokens / layout.context
        return _Flushes(work.updates * micro * share, wanted, size, each)

    def _forward_s(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        flushes: _Flushes,
        *,
        weights: float = 1.0,
        attention: float = 1.0,
    ) -> float:
        # Seconds of matmuls and attention; with few tokens those of reading the weights.
        #
        # `weights` and `attention` are the operations of a pass, relative to those of a forward pass.
        numbers = model_numbers(model)
        tokens = flushes.count * flushes.microbatches * flushes.microbatch_tokens
        flops = weights * tokens * numbers.token_flops
        flops += attention * self._attention_flops(model, layout, flushes)
        read = weights * self._values(model, layout) * self._assume.compute_bytes
        reads = flushes.count * flushes.microbatches * read / self._read
        # Absent layers are computed too.
        return max(flops * numbers.part_of_stage(layout.p) / layout.t / self._flops, reads)

    def _moved_s(self, model: ModelConfig, layout: ParallelLayout, flushes: _Flushes) -> float:
        # Seconds of an update's kernels that read and write without multiplying, but for the optimiser's.
        numbers, table, t = model_numbers(model), self._assume.kernels, layout.t
        tokens, stage = flushes.microbatch_tokens, numbers.part_of_stage(layout.p)
        wide, split, logit = table.token_bytes
        each = stage * numbers.layers * (wide * numbers.width + split * numbers.split_values / t)
        moved = tokens * (each + logit * numbers.vocabulary / t)
        layers, head = table.weight_bytes
        moved += layers * stage * (numbers.dense + numbers.experts / layout.expert) / t
        chunks = math.ceil(tokens / self._assume.logits_tokens)
        moved += chunks * head * numbers.vocabulary * numbers.width / t
        number = flushes.count * flushes.microbatches
        return number * table.moved_s(moved, self._cluster.accelerator.memory_gbs)

    def _attention_flops(
        self, model: ModelConfig, layout: ParallelLayout, flushes: _Flushes
    ) -> float:
        # Operations of a replica's attention in a forward pass, for the pairs that its kernel computes.
        work, rows = self._work, flushes.count * flushes.microbatches * flushes.rows
        # Each replica of the context axis has a part of the heads, or of the tiles.
        rows /= layout.context
        kernel = self._assume.attention
        if kernel == "cudnn":
            # All pairs of a row up to each token: more than twice as many with several texts in a row.
            square, windows = work.row_tokens**2, all(model.sliding_layers)
            return rows * mean_attention_flops(model, work.row_tokens, square, windows=windows)
        block = pick_block_tokens(self._cluster.accelerator.platform, tree=work.shares_prompts)
        parts = flushes.microbatches
        of_replica = parts * max(1, round(flushes.rows))

        def pairs(reach: int | None) -> float:
            if kernel == "splash":
                return pairs_of_one_text(work.row_tokens, block, reach)
            shards = layout.row_shards
            return pairs_of_a_row(work, of_replica * shards, shards, block, reach, parts)

        numbers = model_numbers(model)
        sliding = 4.0 * model.num_heads * model.head_dim * sum(model.sliding_layers)
        seen = (numbers.pair_flops - sliding) * pairs(None)
        return rows * (seen + (sliding * pairs(model.sliding_window) if sliding else 0))

    def _exchanges_s(
        self, model: ModelConfig, layout: ParallelLayout, flushes: _Flushes, *, passes: int
    ) -> dict[str, float]:
        # Seconds of activations sent between devices.
        #
        # Per layer and pass: two all-reduces of tensor parallelism, tokens to their experts and back, parts
        # of rows that devices share (mesh.ring). Per tick: from stage to stage.
        numbers, assume = model_numbers(model), self._assume
        size = flushes.microbatch_tokens * numbers.width * assume.compute_bytes
        microbatches = flushes.count * flushes.microbatches
        layers = passes * numbers.layers * numbers.part_of_stage(layout.p) * microbatches
        shared = self._collectives
        one = shared.reduce_s(size, shared.ring(layout, *TRAIN_RULES["heads"]))
        found = {"tensor all-reduces": 2 * layers * one}
        if layout.expert > 1:
            # The tokens of a group are gathered, and the sums scattered (mesh.parallel_layers); or, as a run
            # decides, each token goes to the devices of its experts alone, after the numbers of tokens.
            group, sent, calls = shared.ring(layout, "expert"), layout.expert * size, 1.0
            chosen = (layout.expert, model.num_experts, model.experts_per_token)
            if self._cluster.accelerator.platform != "cpu" and exchange_pays(*chosen):
                sent, calls = sent * exchanged_share(*chosen), 1.5
            found["tokens to experts"] = layers * shared.reduce_s(sent, group, calls=calls)
        if layout.context > 1:
            heads = (model.num_heads // layout.t, max(1, model.num_kv_heads // layout.t))
            split = pick_split(layout.context, *heads, whole_rows=assume.attention != "xla")
            deltas = (model.num_layers - model.attention_layers) / model.num_layers
            sent = (1 - deltas) * split.heads_sent(*heads) * model.largest_head
            # Delta layers exchange queries, keys, values and, in float32, outputs.
            keys = model.delta_key_heads * model.delta_key_dim
            values = model.delta_value_heads * model.delta_value_dim
            others = (layout.context - 1) / layout.context
            both = values * (1 + 4 / assume.compute_bytes)
            sent += deltas * (2 * keys + both) / layout.t * others
            sent *= flushes.microbatch_tokens
            # Written as a gather, of which a device sends all but its own part.
            whole = sent * assume.compute_bytes * layout.context / (layout.context - 1)
            calls = 4 * (split.exchanged > 1) + 2 * (split.ring - 1)
            group = shared.ring(layout, "context")
            found["parts of rows"] = layers * shared.gather_s(whole, group, calls=calls)
        if layout.p > 1:
            ticks = flushes.count * (flushes.microbatches + layout.p - 1)
            hop = shared.pass_on_s(size, shared.ring(layout, "stage_gen", "stage_micro"))
            found["between stages"] = min(passes, 2) * ticks * hop
        return found

    def _gathers_s(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        flushes: _Flushes,
        *,
        gathers: int,
        compute_s: float,
        gradients: bool = False,
    ) -> dict[str, float]:
        # Seconds of exchanges between replicas, and the part that compute hides (negative).
        assume, shared, numbers = self._assume, self._collectives, model_numbers(model)
        values = self._values(model, layout)
        shards = self._shards(layout, "weights")
        # The weights of a layer are one gather, and their gradients one sum.
        calls = numbers.layers * numbers.part_of_stage(layout.p) + 1
        # Weights travel in the type of the matmuls, gradients in the type of their sums.
        gather = shared.gather_s(values * assume.compute_bytes, shards, calls=calls)
        found = {"weights gathered": gathers * flushes.count * gather}
        if gradients:
            sums = flushes.count if assume.reduce_each_microbatch else self._work.updates
            scattered = self._shards(layout, "gradients")
            scatter = shared.gather_s(values * assume.reduced_bytes, scattered, calls=calls)
            # The other replicas have sums of the same shards, but for experts, which those of `expert` split.
            own = numbers.experts * numbers.part_of_stage(layout.p) / (layout.t * layout.expert)
            sharded = state_rules(layout.sharding).gradients["embed"]
            axes = [a for a in (*TRAIN_RULES["batch"], "context") if a not in sharded]
            rest = 0.0
            for part, left in ((values - own, axes), (own, [a for a in axes if a != "expert"])):
                size = part * assume.reduced_bytes / scattered.members
                if part:
                    rest += shared.reduce_s(size, shared.ring(layout, *left), calls=calls)
            found["gradients summed"] = flushes.count * scatter + sums * rest
            moments = self._shards(layout, "optimizer")
            if moments.members > shards.members:
                # Each replica changes a part of the weights (ZeRO-1 and 2).
                changed = shared.gather_s(values * assume.master_bytes, moments, calls=calls)
                found["weights gathered"] += self._work.updates * changed
        found["hidden behind compute"] = -min(sum(found.values()), assume.overlap * compute_s)
        return found

    def _values(self, model: ModelConfig, layout: ParallelLayout) -> float:
        # Parameters of a device before FSDP.
        return model_numbers(model).params_of_shard(layout.p, layout.t, layout.expert)

    def _shards(self, layout: ParallelLayout, part: str) -> Ring:
        # The replicas that split the weights, gradients or optimizer state (fields of `StateRules`).
        axes = getattr(state_rules(layout.sharding), part)["embed"]
        return self._collectives.ring(layout, *axes)

    def _weights(
        self, model: ModelConfig, layout: ParallelLayout, *, trained: bool = False
    ) -> dict[str, float]:
        values, assume = self._values(model, layout), self._assume
        weights = values / self._shards(layout, "weights").members
        if not trained:
            return {"frozen weights": assume.frozen_bytes * weights}
        moments = values / self._shards(layout, "optimizer").members
        return {
            "master weights": assume.master_bytes * weights,
            "optimiser state": assume.moments_bytes * moments,
        }

    def _at_work(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        flushes: _Flushes,
        *,
        backward: bool = False,
    ) -> dict[str, float]:
        # Bytes of cast weights, and the larger of one layer's activations and the logits.
        numbers, assume = model_numbers(model), self._assume
        tokens = flushes.microbatch_tokens
        values = numbers.kept_values + numbers.split_values / layout.t
        stacked = numbers.dense + numbers.experts / layout.expert
        layer = stacked / numbers.layers / layout.t
        embedding = numbers.vocabulary * numbers.width / layout.t
        logits = min(assume.logits_tokens, tokens) * numbers.vocabulary / layout.t
        # A backward pass holds the values of a layer and their gradients.
        passes = 2 if backward else 1
        of_layer = passes * tokens * values * assume.compute_bytes
        of_layer += 2 * layer * assume.compute_bytes
        if layout.expert > 1:
            # The tokens of the whole group, and their sums.
            of_layer += 2 * layout.expert * tokens * numbers.width * assume.compute_bytes
        arrays = assume.logits_arrays if backward else 1
        of_logits = arrays * logits * 4
        of_logits += assume.embedding_arrays * embedding * assume.compute_bytes
        found = {}
        # GPU compilers cast the weights of one layer at a time.
        is_tpu = self._cluster.accelerator.arrangement == "torus"
        if is_tpu and assume.compute_bytes != assume.master_bytes:
            shard = stacked * numbers.part_of_stage(layout.p)
            shard /= layout.t * self._shards(layout, "weights").members
            found["layers' weights in the type of the matmuls"] = shard * assume.compute_bytes
        if of_layer > of_logits:
            return found | {"a layer at work, and the weights of two": of_layer}
        return found | {"logits at work, and the weights beside them": of_logits}
