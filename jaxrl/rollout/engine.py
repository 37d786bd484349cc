"""The compiled programs of rollout: prefill, insert and generate over slots.

The methods follow JetStream's `engine_api.Engine`, but this module does not import JetStream. One state holds
n slots of capacity C. The programs:

    prefill    prompts -> Prefix                   once per prompt               generate_program.py
    extend     Prefix + tokens -> Prefix           long prompts, after reuse     generate_program.py
               both with scores of the tokens      if a request asks for them    generate_program.py
    insert     Prefix -> slots of a state          once per sample               slot_programs.py
    generate   up to W tokens in every slot        once per dispatch             generate_program.py
               the same with edited logits     while a slot has some         generate_program.py
    speculate  the same, of a few slots            instead of generate           speculate_program.py
    reuse      pages of a state -> Prefix          for known beginnings          slot_programs.py
    resize     state -> state of n' slots, C'      as work comes and goes        slot_programs.py
    release    stops slots                         at stop strings               slot_programs.py

Example: three slots, W = 4, prompts "ab" and "xyz", two samples of the first and one of the second. "$" ends
a response. Each column is a slot. The last token of a sequence is in brackets because it is not cached yet.

    prefill(["ab", "xyz"])              prefix: a[b]  xy[z]
    insert(prefix, source = 0 0 1)      a[b]        a[b]       xy[z]         all active
    generate, dispatch 1                abcde[f]    abg[$]     xyzhij[k]     count 4 2 4; slot 1 is idle
    insert(prefix 2, source = -1 0 -1)  abcde[f]    p[q]       xyzhij[k]     a third prompt, "pq", in slot 1
    generate, dispatch 2                abcdef[$]   pqlmn[o]   xyzhijku[$]   count 1 4 2
    resize(slot_n = 1)                  pqlmn[o]                             one slot is enough, and moves

On CPU, decoding reads all of C. There `resize` keeps n and C small, so that a dispatch costs only what its
live slots need. On accelerators the kernels read just the used length of each slot, so n and C never change.
Nor do they with a paged cache. Its page table is written by the host (`slots.py`), before a program runs.
Programs are compiled per size on first use; `engine_sizes.py` bounds the number of sizes.

    n slots   P prompts of a prefill batch   T prompt tokens   W tokens of a dispatch   C capacity in tokens
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.mesh.devices import device_of, platform_of
from jaxrl.mesh.handover import put
from jaxrl.mesh.hardware import chip_of
from jaxrl.mesh.hosts import fetch, gather
from jaxrl.mesh.parallel_layers import attention_parallel, expert_parallel
from jaxrl.mesh.pipeline import pipeline
from jaxrl.mesh.rules import GENERATE_RULES, replicated, shards_of
from jaxrl.models import lora
from jaxrl.models.attention import attention, pick_implementation
from jaxrl.models.compute import Compute, are_listed, scan_layers, scan_layers_as_bits
from jaxrl.models.decoder import Params, split_layers, weight_types
from jaxrl.models.experts import experts_for
from jaxrl.models.kernels.proof import proven_attention, proven_experts
from jaxrl.models.model_config import ModelConfig
from jaxrl.quantized import stored_in_place
from jaxrl.rollout.cache_choice import choose_cache
from jaxrl.rollout.decode_state import DecodeState
from jaxrl.rollout.engine_sizes import (
    SHORTEST_CACHE,
    bucket_sizes,
    page_sizes,
    prefill_sizes,
    slot_sizes,
)
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.slot_programs import SlotLayout, SlotPrograms
from jaxrl.rollout.speculate_program import SpeculatingPrograms
from jaxrl.rollout.speculation import num_drafted


class Engine:
    """The compiled programs of one model on one mesh. Each program is compiled once per size.

    A run prefills some prompts, inserts them into idle slots, generates until a slot is idle, reads that
    slot, and repeats. It resizes when it needs more, fewer or longer slots. On a mesh each shard gets an
    equal, contiguous range of slots, and a slot stays on its shard.

    Attributes:
      shards: number of shards of the slots.
      weight_types: types of the weights, a tree of `StoredType`s.
      cache: kind of the KV cache.
      layout: sharding of the slots.
      pages: sizes of a paged cache; None if the cache is contiguous.
      num_drafted: number of tokens that `speculate` drafts in a round; 0 if decoding does not speculate.
      apart: whether the other processes of the run do not take part.
      splits_layers: whether `for_decoding` makes lists of layers out of stacks.
      slot_sizes: numbers of slots of a state, ascending multiples of `shards`.
      batch_sizes: numbers of sequences of a prefix, ascending multiples of `shards`.
      prompt_sizes: numbers of tokens of a prefill program, ascending.
      prefix_sizes, cache_sizes: capacities of a prefix and of a state, ascending.
    """

    def __init__(
        self,
        model: ModelConfig,
        graph: nnx.GraphDef,
        mesh: Mesh,
        config: EngineConfig,
        *,
        apart: bool = False,
    ):
        """Prepares the programs; nothing is compiled yet.

        Args:
          model, graph: configuration and graph of the model.
          mesh: devices, laid out for generation.
          config: sizes and data types.
          apart: whether the processes that have none of the devices do not take part. Otherwise they make the
            same calls, and get the same results.

        Raises:
          UserError: a stop id is not in the model's vocabulary, texts are too long for the model, or
            `deterministic` is not possible.
        """
        if unknown := [i for i in config.stop_ids if not 0 <= i < model.vocab_size]:
            raise UserError(
                f"stop_ids {unknown} are no tokens of a model with {model.vocab_size}: no response would end "
                "there; give ids of its tokenizer"
            )
        model.check_texts_of(config.max_context_tokens)
        self.weight_types = weight_types(model, config.dtype, config.weights_dtype)
        if config.deterministic:
            _check_deterministic(model, mesh, config.slots)
        if model.has_state:
            _check_state(config)
        stages = shards_of("layers", GENERATE_RULES, mesh)
        model.check_stages(stages, sampling=True)
        if config.keeps_routes and stages > 1:
            raise UserError(
                "train.replay_routes keeps the experts of all layers in one place, and the generation layout "
                f"has {stages} pipeline stages; choose one without, or set replay_routes to False"
            )
        self.model = model
        self.config = config
        self.mesh = mesh
        self.apart = apart
        self.shards = shards_of("batch", GENERATE_RULES, mesh)
        self.pages = page_sizes(
            config,
            shards=self.shards,
            kv_heads=max(1, model.cached_heads // shards_of("heads", GENERATE_RULES, mesh)),
            platform=platform_of(mesh),
        )
        self.cache = choose_cache(
            model,
            mesh,
            dtype=config.dtype,
            kv_dtype=jnp.dtype(config.kv_dtype or config.dtype),
            unroll=config.layers_per_iteration(model.num_layers, platform_of(mesh)),
            decode_attention=config.decode_attention,
            pages=self.pages,
            keeps_routes=config.keeps_routes,
        )
        # On accelerators a single state lasts for the whole run: a resize would need memory for two states.
        fixed = self.cache.reads_own_length
        longest = config.max_context_tokens + config.tokens_per_dispatch
        longest += -longest % self.cache.capacity_multiple
        self.slot_sizes = slot_sizes(config, self.shards, fixed=fixed)
        self.batch_sizes, self.prompt_sizes = prefill_sizes(config, self.shards)
        self.prefix_sizes = bucket_sizes(longest, SHORTEST_CACHE)
        self.cache_sizes = (longest,) if fixed else self.prefix_sizes
        self.num_drafted = num_drafted(config.speculate, platform_of(mesh))
        # On CPU without a scan, which would read the stack: every dispatch would split it again.
        platform = platform_of(mesh)
        whole = config.layers_per_iteration(model.num_layers, platform) >= model.num_layers
        self.splits_layers = stages == 1 and platform == "cpu" and whole
        self.layout = SlotLayout(mesh, self.cache)
        self._graph = graph
        self._compile(graph)

    def _compile(self, graph: nnx.GraphDef) -> None:
        """Makes the jitted programs; each compiles at its first call."""
        config, model, mesh, layout = self.config, self.model, self.mesh, self.layout
        platform = platform_of(mesh)
        on_cpu = platform == "cpu"
        compute = Compute(
            dtype=jnp.dtype(config.dtype),
            constrain=layout.constrain,
            experts=expert_parallel(
                experts_for(
                    device_of(mesh),
                    config.dtype,
                    equal_tiles=config.deterministic,
                    by_kernel=proven_experts(
                        model, device_of(mesh), dtype=config.dtype, gather=gather
                    ),
                ),
                mesh,
                GENERATE_RULES,
                in_order=config.deterministic,
            ),
            layers=pipeline(scan_layers_as_bits if on_cpu else scan_layers, mesh, GENERATE_RULES),
            unroll=config.layers_per_iteration(model.num_layers, platform),
            sum_parts=math.gcd(*_summed_widths(model)) if config.deterministic else 0,
            wide_results=on_cpu,
            gathers_adapters=on_cpu,
        )
        slots = SlotPrograms(self.cache, layout, config.tokens_per_dispatch)
        kernel = pick_implementation(
            platform,
            config.dtype,
            config.attention,
            device=device_of(mesh),
            softcap=model.attention_softcap,
            sinks=model.attention_sinks,
            head_dim=model.largest_head,
        )
        kernel = proven_attention(
            kernel,
            model,
            device_of(mesh),
            parts=shards_of("heads", GENERATE_RULES, mesh),
            dtype=config.dtype,
            gather=gather,
        )
        attend = attention_parallel(
            functools.partial(attention, implementation=kernel, device=device_of(mesh)),
            mesh,
            GENERATE_RULES,
        )
        programs = SpeculatingPrograms(
            graph, compute, attend, slots, config.stop_ids, self.num_drafted
        )
        self._split = jax.jit(split_layers)
        # Nothing else ties a state to a mesh of one device, and it would be made on the first device of all.
        here = replicated(mesh) if mesh.size == 1 else None
        self._idle = jax.jit(slots.idle, static_argnums=(0, 1), out_shardings=here)
        options: Any = {"compiler_options": _compiler_options(config, mesh)}
        self.prefill = jax.jit(programs.prefill, **options)
        self.extend = jax.jit(programs.extend, donate_argnames="prefix", **options)
        self.prefill_scored = jax.jit(programs.prefill_scored, **options)
        self.extend_scored = jax.jit(programs.extend_scored, donate_argnames="prefix", **options)
        self.insert = jax.jit(slots.insert, donate_argnames="state")
        self.generate = jax.jit(programs.generate, donate_argnames="state", **options)
        self.generate_edited = jax.jit(programs.generate_edited, donate_argnames="state", **options)
        self.speculate = jax.jit(programs.speculate, donate_argnames="state", **options)
        self.routes = jax.jit(slots.routes)
        self.release = jax.jit(slots.release, donate_argnames="state")
        self.reuse = jax.jit(slots.reuse)
        self.widen = jax.jit(slots.widen, static_argnames="capacity")
        self.resize = jax.jit(slots.resize, static_argnames="capacity")

    def of_part(self, mesh: Mesh) -> Engine:
        """The engine of some of the replicas, with their part of the slots, for their processes alone."""
        config, totals = self.config, ("slots", "cache_tokens", "prefill_prompts")
        sizes = {name: getattr(config, name) * mesh.size // self.mesh.size for name in totals}
        sizes["prefill_prompts"] = max(1, sizes["prefill_prompts"])
        config = dataclasses.replace(config, **sizes)
        return Engine(self.model, self._graph, mesh, config, apart=True)

    def fetch(self, results: Any) -> Any:
        """Results of the programs as host arrays."""
        return fetch(results, everywhere=not self.apart)

    def for_decoding(self, params: Params) -> Params:
        """The weights as `generate` and `speculate` read them fastest. The programs take stacks too."""
        return self.split(params) if self.splits_layers else params

    def split(self, params: Params) -> Params:
        """The weights with lists of layers in place of stacks: a copy, unless they have lists already."""
        return params if are_listed(params["layers"]) else self._split(params)

    def with_adapters(self, adapters: Params, params: Params) -> Params:
        """Weights, with stacks or with lists of layers, with other adapters, which have stacks."""
        return lora.join(self.split(adapters) if are_listed(params["layers"]) else adapters, params)

    def stored(self, params: Params) -> Params:
        """Rounds projections that are in a wider type to `weights_dtype`, which must be set."""
        return jax.tree.map(stored_in_place, self.weight_types, params)

    def init_decode_state(self, num_slots: int = 0, capacity: int = 0) -> DecodeState:
        """Returns a state with every slot idle; its arrays are created sharded.

        Args:
          num_slots: n, one of `slot_sizes`; 0 means all slots.
          capacity: C, one of `cache_sizes`; 0 means the longest.
        """
        return self._idle(num_slots or self.slot_sizes[-1], capacity or self.cache_sizes[-1])

    def abstract_decode_state(self) -> DecodeState:
        """The shapes and shardings of the largest state; allocates nothing."""
        return self.layout.abstract(jax.eval_shape(self.init_decode_state))

    def with_pages(
        self, state: DecodeState, table_nP: np.ndarray, shared_n: np.ndarray
    ) -> DecodeState:
        """A state of a paged cache with another page table; runs no program.

        Args:
          state: state of the slots; its arrays are used again.
          table_nP, shared_n: int32, as in `PagedSlots`.
        """
        cache = state.context.cache
        # Where the old ones are: with other shardings a program would be compiled once more.
        table = put(table_nP, cache.table.sharding)
        shared = put(shared_n, cache.shared.sharding)
        cache = dataclasses.replace(cache, table=table, shared=shared)
        return state.replace(context=dataclasses.replace(state.context, cache=cache))


def host_inputs(mesh: Mesh, *arrays: Any) -> tuple[jax.Array, ...]:
    """Copies small host arrays to all devices of `mesh`, replicated."""
    sharding = replicated(mesh)
    # One call for all is several times as fast, but cannot reach devices of other processes.
    if sharding.is_fully_addressable:
        return tuple(jax.device_put(arrays, sharding))
    return tuple(put(a, sharding) for a in arrays)


def _check_state(config: EngineConfig) -> None:
    """Refuses what a model with delta layers cannot do: to go back to an earlier state of a sequence."""
    if config.speculate:
        raise UserError(
            f"speculate {config.speculate} takes tokens back, and the states of this model's delta layers "
            "cannot go back; set it to 0"
        )


def _check_deterministic(model: ModelConfig, mesh: Mesh, slots: int) -> None:
    """Checks that the parts of a sum divide over the devices that share it, and the rows of every device."""
    if model.has_state:
        raise UserError(
            "deterministic sampling covers models without delta layers, whose heads it has no parts for; "
            "set deterministic to False"
        )
    if model.qk_norm_over_heads:
        raise UserError(
            "deterministic sampling covers norms within a head, and this model's run over all heads "
            "(qk_norm_over_heads); set deterministic to False"
        )
    widths, devices = _summed_widths(model), shards_of("mlp", GENERATE_RULES, mesh)
    if (parts := math.gcd(*widths)) % devices:
        heads, *neurons = widths
        of_mlp = f" and {' and '.join(map(str, neurons))} neurons" if neurons else ""
        raise UserError(
            f"deterministic sampling sums over {heads} key-value heads{of_mlp} "
            f"in {parts} parts, which do not divide over {devices} devices of a tensor-parallel group (t_g "
            f"of mesh.generate); choose a divisor of {parts}, or set deterministic to False"
        )
    shared = shards_of("experts", GENERATE_RULES, mesh)
    if model.num_experts % shared:
        raise UserError(
            f"deterministic sampling cuts no expert, and {model.num_experts} experts do not divide over "
            f"{shared} devices; choose a layout whose mesh.expert times tensor parallelism divides their "
            "number, or set deterministic to False"
        )
    replicas = shards_of("batch", GENERATE_RULES, mesh)
    if slots < 2 * replicas:
        raise UserError(
            "deterministic sampling needs two slots or more on each replica, because matmuls of one row "
            f"round otherwise, and slots {slots} over {replicas} replicas are fewer; use {2 * replicas} "
            "slots or more, or set deterministic to False"
        )


def _summed_widths(model: ModelConfig) -> list[int]:
    """The heads and the neurons that tensor parallelism splits; experts are whole."""
    # Key-value heads that devices share would be multiplied in other shapes, which round differently.
    heads = math.gcd(model.num_kv_heads, model.full_kv_heads)
    neurons = (model.shared_d_ff, model.dense_d_ff) if model.num_experts else (model.d_ff,)
    return [heads, *(width for width in neurons if width)]


def _compiler_options(config: EngineConfig, mesh: Mesh) -> dict[str, bool | str]:
    """Options of XLA for the programs that run the model."""
    options = {}
    if config.deterministic:
        # XLA may leave out roundings to bfloat16 inside a fusion, and which ones depends on the mesh.
        options["xla_allow_excess_precision"] = False
        if platform_of(mesh) == "cpu":
            # YNNPACK sums in an order of its own, and XLA gives it sums of 4,096 values or more on a device.
            options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    if platform_of(mesh) == "tpu" and chip_of(mesh.devices.flat[0].device_kind) == "7x":
        # On this chip alone XLA wants 16-bit arrays in tiles of 16 x 128, and programs get them in tiles of
        # 8 x 128. So every call would copy all weights, which takes 7.4 GB and 15 GB of memory traffic for
        # Qwen2.5-32B over 8 devices.
        options["xla_tpu_control_large_2nd_minor_layout_for_x16"] = False
    return options
