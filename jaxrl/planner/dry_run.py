"""What a run would take, from the real programs' shapes and shardings, with no device and no memory.

    model, layout, shapes --> the real Actor and Engine on a mesh without devices
                                |
                                +-- every program traced: a shape or a split that does not fit is an error
                                +-- shard_shape of every array that stays: bytes per device
                                +-- the update's layer scan: what the backward pass keeps of the layers

Covered: everything of the actor that lives from one program to the next, and the two largest things inside
its update; weights and optimiser state of roles that share its devices. Not covered: other temporaries of the
compiled programs, which only compiling them can tell; so totals are lower bounds. Nor are programs of other
roles, and whatever else the caller names as left out, which the table repeats.

R rows of a microbatch   T tokens of a row   L layers   S slots
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.data.packing import PackedShape
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.pipeline import bubble, microbatches_of
from jaxrl.mesh.protocols import rows_and_length
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings, shards_of
from jaxrl.mesh.transition import Transition
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.roles.objective import Objective
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import PackedModel, TrainConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.value import Critic
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Assignment, DecodeState, Engine
from jaxrl.rollout.sampling import untruncated
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import TrainBatch

# Memory of one device, as vendors state it, in GB.
DEVICE_MEMORY_GB = {
    "TPU v5e": 16,
    "TPU v6e": 32,
    "A100 40 GB": 40,
    "A100 / H100 80 GB": 80,
    "TPU v5p": 95,
    "H200": 141,
    "TPU v7": 192,
}

_GB = 1e9
_PLAIN_WIDTH = 200
_OFFLOADED = "in host memory while sampling"
_INTEGER_FIELDS = frozenset({"tokens", "positions", "segment_ids", "sequence"})


@dataclasses.dataclass(frozen=True)
class BatchFlow:
    """How many of what a step samples, keeps and learns from.

    Attributes:
      generation_prompts: prompts of one generation batch.
      max_generation_batches: how many of these a step may take.
      num_prompts: groups a step learns from.
      num_samples: G, samples of each prompt.
      shape: [U, M, R, T] of the packed sequences.
      keeps_mixed_groups: only groups with right and wrong answers count (dynamic sampling).
      greedy_answers: every prompt gets a greedy answer besides.
    """

    generation_prompts: int
    max_generation_batches: int
    num_prompts: int
    num_samples: int
    shape: PackedShape
    keeps_mixed_groups: bool = False
    greedy_answers: bool = False


@dataclasses.dataclass(frozen=True)
class Companion:
    """A role on the actor's devices.

    Attributes:
      name: of the role.
      model: its shape.
      optim: how it learns; None if it does not. What learns is a critic, with a head of one score.
    """

    name: str
    model: ModelConfig
    optim: OptimConfig | None = None


@dataclasses.dataclass(frozen=True)
class Holding:
    """Arrays that are in memory together.

    Attributes:
      name: what they are.
      layout: how they are split, for people.
      num_values: over the whole mesh, each value counted once.
      bytes_per_device: what they add to a device.
      sampling, learning: the phases in which they are there.
    """

    name: str
    layout: str
    num_values: int
    bytes_per_device: int
    sampling: bool
    learning: bool


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a run would take. `show` prints it as one table.

    Attributes:
      title: of the run.
      layout: of its mesh.
      holdings: what lies on the devices.
      flow: (what, how many) of a step, in the order in which they happen.
      left_out: (what, why) is not among all this.
    """

    title: str
    layout: ParallelLayout
    holdings: tuple[Holding, ...]
    flow: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def sampling_bytes(self) -> int:
        """Bytes per device while responses are sampled, at least."""
        return sum(h.bytes_per_device for h in self.holdings if h.sampling)

    @property
    def learning_bytes(self) -> int:
        """Bytes per device while weights are updated, at least."""
        return sum(h.bytes_per_device for h in self.holdings if h.learning)

    def table(self, *, plain: bool = False) -> Table:
        """Everything as one table; `plain` draws its lines with ASCII."""
        table = Table(
            title=f"{self.title}: {self.layout.num_devices} devices, training {_train_name(self.layout)}, "
            f"generation {_generate_name(self.layout)}",
            title_justify="left",
            box=box.ASCII2 if plain else box.ROUNDED,
        )
        table.add_column("role or event")
        table.add_column("layout")
        table.add_column("values", justify="right", no_wrap=True)
        table.add_column("per device", justify="right", no_wrap=True)
        for holding in self.holdings:
            table.add_row(
                holding.name,
                holding.layout,
                f"{holding.num_values:,}",
                _size(holding.bytes_per_device),
            )
        table.add_section()
        totals = (
            ("sampling, at least", self.sampling_bytes),
            ("learning, at least", self.learning_bytes),
        )
        for name, total in totals:
            table.add_row(name, _may_fit(total), "", _size(total))
        table.add_section()
        for event, amount in self.flow:
            table.add_row(event, amount, "", "")
        if self.left_out:
            table.add_section()
        for name, reason in self.left_out:
            table.add_row(f"not counted: {name}", reason, "", "")
        return table

    def show(self, console: Console | None = None) -> None:
        """Prints the table: for a terminal, or as plain text of its own width elsewhere."""
        # FORCE_COLOR, which CI systems set, would make a log look like a terminal to rich.
        if console is None:
            console = Console(force_terminal=None if sys.stdout.isatty() else False)
        if console.is_terminal:
            console.print(self.table())
        else:
            plain = Console(
                file=console.file, width=_PLAIN_WIDTH, force_terminal=False, color_system=None
            )
            plain.print(self.table(plain=True))


@dataclasses.dataclass(frozen=True)
class _Rollout:
    """Weights and slots in the generation layout, shapes and shardings only."""

    params: Params
    slots: DecodeState


def dry_run(
    title: str,
    model: ModelConfig,
    layout: ParallelLayout,
    *,
    train: TrainConfig,
    optim: OptimConfig,
    engine: EngineConfig,
    temperature: float,
    objective: Objective,
    flow: BatchFlow,
    tables: StateTables = ZERO["FSDP"],
    offload: bool = False,
    companions: Sequence[Companion] = (),
    notes: Sequence[tuple[str, str]] = (),
    left_out: Sequence[tuple[str, str]] = (),
) -> DryRun:
    """Traces every program of an actor on a mesh without devices, and counts what lies beside it.

    Args:
      title: of the run.
      model, layout: what is trained, and how it would be spread.
      train, optim, temperature, objective, tables: as the actor takes them.
      engine: what it samples with.
      flow: batches of a step.
      offload: training states wait in pinned host memory while their role is idle, and frozen weights do.
      companions: roles on the same devices.
      notes: (what, which) to be shown with the flow.
      left_out: (what, why) of what the caller knows to be missing.

    Raises:
      UserError: something does not divide over the layout.
    """
    # Stands in for a Mesh: it has axes and sizes, which is all that tracing asks for, and no devices.
    mesh: Any = abstract_mesh(layout)
    backend = OfflineBackend(Engine(model, decoder_graph(model)[0], mesh, engine), _no_text)
    actor = Actor(
        model,
        mesh,
        train=train,
        optim=optim,
        temperature=temperature,
        seed=0,
        backend=backend,
        tables=tables,
    )
    state = actor.abstract_state()
    batch = _abstract_batch(actor, flow.shape)
    rollout = _trace_rollout(actor, backend.engine)
    update = _trace_learning(actor, state, batch, objective)
    holdings = (
        *_weights(layout, state, rollout, engine, model, offload=offload),
        *(h for c in companions for h in _beside(c, actor, layout, offload=offload)),
        *_activations(actor, layout, train, flow.shape, batch, update),
    )
    described = (*notes, *_describe_flow(flow, actor, engine, train))
    return DryRun(title, layout, holdings, described, tuple(left_out))


# Tracing: each runs the real methods on shapes, so that whatever does not fit raises here.


def _abstract_batch(actor: Actor, shape: PackedShape) -> TrainBatch:
    def field(name: str) -> jax.ShapeDtypeStruct:
        is_count = name == "num_micro_U"
        dims = (shape.minibatches,) if is_count else dataclasses.astuple(shape)
        dtype = jnp.int32 if is_count or name in _INTEGER_FIELDS else jnp.float32
        spec = rows_and_length(actor.mesh, dims)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(actor.mesh, spec))

    fields: dict[str, Any] = {f.name: field(f.name) for f in dataclasses.fields(TrainBatch)}
    return TrainBatch(**fields)


def _no_text(tokens: np.ndarray) -> str:
    raise AssertionError(f"shapes are not spelled, and {len(tokens)} tokens are")


def _trace_rollout(actor: Actor, engine: Engine) -> _Rollout:
    """Traces the way to the generation layout and the programs there."""
    config = engine.config
    assert isinstance(actor.resharding, Transition)
    for bucket in actor.resharding.buckets:
        jax.eval_shape(bucket.gather_program, *bucket.gather_arguments())
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(config.dtype), sharding=sharding
        ),
        actor.shapes,
        shardings(actor.axes, actor.shapes, GENERATE_RULES, engine.mesh),
    )
    prefix = jax.eval_shape(
        engine.prefill,
        params,
        _ints(config.prefill_prompts, config.max_prompt_tokens),
        _ints(config.prefill_prompts),
    )
    slots = engine.abstract_decode_state()
    assignment: Any = [_ints(config.slots) for _ in dataclasses.fields(Assignment)]
    seed, temperature = (jax.ShapeDtypeStruct((), t) for t in (jnp.uint32, jnp.float32))
    jax.eval_shape(
        engine.insert,
        prefix,
        slots,
        Assignment(*assignment),
        seed,
        _ints(),
        temperature,
        untruncated(),
    )
    jax.eval_shape(engine.generate, params, slots)
    return _Rollout(params, slots)


def _trace_learning(
    actor: Actor, state: TrainState, batch: TrainBatch, objective: Objective
) -> jax_core.Jaxpr:
    """The traced update, after tracing the old log-probabilities."""

    def logprobs(state, batch):
        actor.state = state
        return actor.logprobs(batch)

    def update(state, batch):
        actor.state = state
        reference = state.params if objective.needs_reference else None
        metrics = actor.update(batch, objective, reference=reference)
        return actor.state, metrics

    jax.eval_shape(logprobs, state, batch)
    return jax.make_jaxpr(update)(state, batch).jaxpr


def _layer_memory(update: jax_core.Jaxpr, num_layers: int, num_ticks: int) -> tuple[list[Any], Any]:
    """What the forward scan over layers hands to the backward one, and the largest value inside a layer.

    Both are shapes over the whole mesh; in a pipeline, whose ticks each scan the layers of a stage, over
    the devices of one stage.

    Args:
      update: the traced program.
      num_layers: of one stage.
      num_ticks: of the pipeline, 0 where there is none.
    """
    if not num_ticks:
        layers = _forward_scan(update, num_layers)
        return _stacked(layers), _largest_inside(layers)
    ticks = _forward_scan(update, num_ticks)
    layers = _forward_scan(ticks.params["jaxpr"].jaxpr, num_layers)
    return _stacked(ticks), _largest_inside(layers)


def _forward_scan(program: jax_core.Jaxpr, length: int) -> jax_core.JaxprEqn:
    # Other loops may have as many iterations by chance; none of them hands on nearly as much. The
    # backward scan hands on the gradients of the weights, which are counted as such.
    return max(
        (
            eqn
            for eqn in _equations(program)
            if eqn.primitive.name == "scan"
            and eqn.params["length"] == length
            and not eqn.params["reverse"]
        ),
        key=lambda eqn: sum(map(_nbytes, _stacked(eqn))),
    )


def _largest_inside(scan: jax_core.JaxprEqn) -> Any:
    inside = [v.aval for e in _equations(scan.params["jaxpr"].jaxpr) for v in e.outvars]
    return max(inside, key=_nbytes)


def _stacked(scan: jax_core.JaxprEqn) -> list[Any]:
    # A carry has the shape it has inside the loop; since jax 0.11 a scan does not say how many it has.
    inside: list[Any] = [v.aval for v in scan.params["jaxpr"].jaxpr.outvars]
    outside: list[Any] = [v.aval for v in scan.outvars]
    return [outer for outer, inner in zip(outside, inside, strict=True) if outer.ndim > inner.ndim]


def _equations(jaxpr: jax_core.Jaxpr) -> Iterator[jax_core.JaxprEqn]:
    """Every equation, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda v: isinstance(v, _PROGRAMS)
        ):
            if isinstance(value, jax_core.ClosedJaxpr):
                yield from _equations(value.jaxpr)
            elif isinstance(value, jax_core.Jaxpr):
                yield from _equations(value)


_PROGRAMS = (jax_core.ClosedJaxpr, jax_core.Jaxpr)


# Counting and words


def _weights(
    layout: ParallelLayout,
    state: TrainState,
    rollout: _Rollout,
    engine: EngineConfig,
    model: ModelConfig,
    *,
    offload: bool,
) -> list[Holding]:
    """What outlives a program."""
    adapters = f", adapters of rank {model.lora.rank} included" if model.lora.rank else ""
    trained = f"float32, {_train_name(layout)}{adapters}"
    like = f"like the {'adapters' if adapters else 'weights'}"
    of_optimizer = f"float32, {_train_name(layout)}, {_OFFLOADED if offload else like}"
    # [L, S, K, H, C], or each layer's own
    keys = jax.tree.leaves(rollout.slots.context.cache)[0]
    slots, kv_heads, _, tokens = keys.sharding.shard_shape(keys.shape)[-4:]
    return [
        _holding(
            "actor in training",
            f"{trained}, {_OFFLOADED}" if offload else trained,
            state.params,
            sampling=not offload,
        ),
        _holding("optimiser state", of_optimizer, state.opt_state, sampling=not offload),
        dataclasses.replace(
            _holding(
                "actor in generation",
                f"{jnp.dtype(engine.dtype).name}, {_generate_name(layout)}",
                rollout.params,
            ),
            bytes_per_device=sum(map(_bytes_per_device, _moved(state.params, rollout.params))),
        ),
        _holding(
            "KV cache and slots",
            f"{slots} slots x {kv_heads} kv heads a device, {tokens:,} tokens each",
            rollout.slots,
            learning=False,
        ),
    ]


def _beside(
    role: Companion, actor: Actor, layout: ParallelLayout, *, offload: bool
) -> list[Holding]:
    """What a role on the actor's devices keeps there."""
    where = f"float32, {_train_name(layout)}"
    name = role.name.replace("_", " ")
    common: Any = {"train": actor.train, "tables": actor.tables}
    if role.optim is None:
        frozen = PackedModel(role.model, actor.mesh, **common)
        where = f"{where}, in host memory between calls" if offload else where
        weights = frozen.abstract_params()
        return [
            _holding(f"{name}, frozen", where, weights, sampling=not offload, learning=not offload)
        ]
    state = Critic(
        role.model, actor.mesh, optim=role.optim, seed=0, offload=offload, **common
    ).abstract_state()
    return [
        _holding(f"{name} in training", where, state.params),
        _holding(f"{name}, optimiser state", f"{where}, like the weights", state.opt_state),
    ]


def _activations(
    actor: Actor,
    layout: ParallelLayout,
    train: TrainConfig,
    shape: PackedShape,
    batch: TrainBatch,
    update: jax_core.Jaxpr,
) -> list[Holding]:
    """What the update adds to that."""
    stages = layout.p
    micro = microbatches_of(shape.rows, TRAIN_RULES, actor.mesh, train.pipeline_microbatches)
    kept, largest = _layer_memory(
        update, actor.model.num_layers // stages, micro + stages - 1 if stages > 1 else 0
    )
    row_shards, token_shards = (
        shards_of(axis, TRAIN_RULES, actor.mesh) for axis in ("batch", "length")
    )
    gradients = actor.abstract_gradients()
    return [
        _holding(
            "gradients",
            "float32: the sum and the newest",
            (gradients, gradients),
            sampling=False,
        ),
        _holding(
            "train batch",
            f"{shape.rows // row_shards} x {shape.tokens // token_shards:,} tokens a device and microbatch",
            batch,
            sampling=False,
        ),
        Holding(
            "kept of the layers",
            f"remat {train.remat}, split over rows and tokens",
            sum(a.size for a in kept) * stages,
            sum(map(_nbytes, kept)) // (row_shards * token_shards),
            sampling=False,
            learning=True,
        ),
        Holding(
            "largest value in a layer",
            f"{largest.dtype.name} {list(largest.shape)}, if split over all devices"
            + (" of a stage" if stages > 1 else ""),
            largest.size,
            _nbytes(largest) * stages // layout.num_devices,
            sampling=False,
            learning=True,
        ),
    ]


def _holding(
    name: str, layout: str, tree: Any, *, sampling: bool = True, learning: bool = True
) -> Holding:
    leaves = jax.tree.leaves(tree)
    return Holding(
        name,
        layout,
        num_values=sum(leaf.size for leaf in leaves),
        bytes_per_device=sum(map(_bytes_per_device, leaves)),
        sampling=sampling,
        learning=learning,
    )


def _describe_flow(
    flow: BatchFlow, actor: Actor, engine: EngineConfig, train: TrainConfig
) -> tuple[tuple[str, str], ...]:
    U, M, R, T = dataclasses.astuple(flow.shape)
    sampled = flow.generation_prompts * flow.num_samples
    sequences = flow.num_prompts * flow.num_samples
    shards = shards_of("batch", GENERATE_RULES, actor.mesh)
    batches = f"; at most {flow.max_generation_batches} batches a step"
    greedy = f", and {flow.generation_prompts:,} greedy ones"
    which = "with right and wrong answers" if flow.keeps_mixed_groups else "all of them"
    return (
        (
            "generation batch",
            f"{flow.generation_prompts:,} prompts x {flow.num_samples} samples = {sampled:,} responses of "
            f"at most {engine.max_response_tokens:,} tokens"
            f"{greedy if flow.greedy_answers else ''}{batches if flow.keeps_mixed_groups else ''}",
        ),
        (
            "decoding",
            f"{engine.slots:,} slots over {shards} replicas, {engine.slots // shards} on each; every slot "
            f"is filled {sampled / engine.slots:.1f} times a batch",
        ),
        (
            "prefill",
            f"{engine.prefill_prompts} prompts x {engine.max_prompt_tokens:,} tokens, "
            f"{engine.prefill_prompts // shards} on each replica",
        ),
        (
            "groups kept",
            f"{flow.num_prompts:,}, {which} = {sequences:,} sequences",
        ),
        (
            "learning",
            f"{U} updates x {sequences // U:,} sequences, each in at most {M} microbatches of {R} rows x "
            f"{T:,} tokens",
        ),
        *_describe_pipelines(flow, actor, engine, train),
        (
            "programs of the actor",
            "to_generate, prefill, insert, generate, logprobs, update: all traced",
        ),
    )


def _describe_pipelines(
    flow: BatchFlow, actor: Actor, engine: EngineConfig, train: TrainConfig
) -> Iterator[tuple[str, str]]:
    """A line for each program that has stages."""
    for program, rules, rows, requested in (
        ("prefill", GENERATE_RULES, engine.prefill_prompts, 0),
        ("decoding", GENERATE_RULES, engine.slots, 0),
        ("learning", TRAIN_RULES, flow.shape.rows, train.pipeline_microbatches),
    ):
        stages = shards_of("layers", rules, actor.mesh)
        if stages > 1:
            micro = microbatches_of(rows, rules, actor.mesh, requested)
            yield (
                f"pipeline, {program}",
                f"{stages} stages x {micro} microbatches of {rows // micro} rows: "
                f"idle for {bubble(stages, micro):.0%} of the time",
            )


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _moved(trained: Params, sampled: Params) -> list[Any]:
    """Leaves of `sampled` that are not shared with training, as `mesh.transition` decides it."""
    pairs = zip(jax.tree.leaves(trained), jax.tree.leaves(sampled), strict=True)
    return [
        after
        for before, after in pairs
        if before.dtype != after.dtype
        or not before.sharding.is_equivalent_to(after.sharding, before.ndim)
    ]


def _bytes_per_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _train_name(layout: ParallelLayout) -> str:
    shares = {"fsdp": layout.fsdp, "expert": layout.expert, "context": layout.context}
    return f"{layout.p}-{layout.t}-{layout.d}" + "".join(
        f" {name} {size}" for name, size in shares.items() if size > 1
    )


def _generate_name(layout: ParallelLayout) -> str:
    return f"{layout.p_g}-{layout.t_g}-{layout.d_g}-{layout.d}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _GB:,.2f} GB" if nbytes >= _GB / 10 else f"{nbytes / 1e6:,.2f} MB"


def _may_fit(nbytes: int) -> str:
    too_small = [name for name, size in DEVICE_MEMORY_GB.items() if size * _GB < nbytes]
    fitting = [name for name in DEVICE_MEMORY_GB if name not in too_small]
    parts = []
    if too_small:
        parts.append(f"does not fit {too_small[-1]}" + " or less" * (len(too_small) > 1))
    if fitting:
        parts.append(f"may fit {fitting[0]}" + " or more" * (len(fitting) > 1))
    return ", ".join(parts)
