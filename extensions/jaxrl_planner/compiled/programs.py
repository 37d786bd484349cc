"""The programs of a run's roles, as functions and shapes, with the number of their calls in a step.

    Actor, Engine      to_generate or hand_over, prefill, insert, generate, to_train    sampling
                       logprobs, update                                    learning
    Critic             values, update
    Reference, reward and cost models    logprobs, scores

These are the roles' own compiled functions; shapes with shardings take the place of arrays.

U minibatches   M microbatches   R rows   T tokens of a row   G samples of a prompt   W tokens of a dispatch

Tracing runs the real methods on shapes; a wrong shape or sharding is an error. Of the traced update the scan
over layers shows the activations that are kept for the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core
from jax.sharding import NamedSharding

from jaxrl.mesh.handover import Handover, move_program
from jaxrl.mesh.parallel_layers import HELD_EXPERTS
from jaxrl.mesh.protocols import rows_and_length
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import generation_shardings, replicated
from jaxrl.models.decoder import Params
from jaxrl.models.experts import EXPERT_ROWS
from jaxrl.models.kernels.grouped_matmul import GROUPED_MATMUL
from jaxrl.roles.losses import Objective
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.scores import RewardModel, ScoreLearner
from jaxrl.rollout.decode_state import Assignment, DecodeState
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.engine_sizes import round_up
from jaxrl.rollout.sampling import truncation_of
from jaxrl.types import PackedBatch, TrainBatch, ValueBatch
from jaxrl_planner.simulation.model_numbers import mean_attention_flops, model_numbers
from jaxrl_planner.step_load import StepLoad

_INTEGER_FIELDS = frozenset({"tokens", "positions", "segment_ids", "sequence", "prefix_ids"})
_PROGRAMS = (jax_core.ClosedJaxpr, jax_core.Jaxpr)


@dataclasses.dataclass(frozen=True)
class SamplerShapes:
    """Shapes and shardings of weights and slots in the generation layout."""

    params: Params
    slots: DecodeState


def abstract_batch(
    role: PackedModel, shape: PackedShape, kind: type[PackedBatch] = TrainBatch
) -> Any:
    """Shapes and shardings of a batch on a role's mesh; `kind` is its type, by default the policy's."""
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        is_count = name == "num_micro_U"
        dims = (shape.minibatches,) if is_count else dataclasses.astuple(shape)
        dtype = jnp.int32 if is_count or name in _INTEGER_FIELDS else jnp.float32
        where = NamedSharding(role.mesh, rows_and_length(role.mesh, dims))
        fields[name] = jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    # Without shared prompts a batch has no such field, and the program has another signature.
    absent = ["routes"] + ["prefix_ids"] * (not role.train.shares_prompts)
    if kind is TrainBatch and not role.model.value_head:
        absent += ["old_value", "target"]
    fields |= dict.fromkeys(absent)
    if role.replays_routes:
        U, M, R, T = dataclasses.astuple(shape)
        dims = (U, M, role.model.mixture_layers * role.model.experts_per_token, R, T)
        where = NamedSharding(role.mesh, rows_and_length(role.mesh, dims))
        fields["routes"] = jax.ShapeDtypeStruct(dims, jnp.int16, sharding=where)
    return kind(**fields)


def sampler_shapes(engine: Engine, shapes: Params, axes: Any) -> SamplerShapes:
    """Shapes of an engine's weights and slots, from shapes and logical axes of the weights."""
    params = jax.tree.map(
        lambda stored, leaf, sharding: stored.abstract(leaf.shape, sharding),
        engine.weight_types,
        shapes,
        generation_shardings(axes, shapes, engine.mesh),
    )
    return SamplerShapes(params, engine.abstract_decode_state())


def layer_memory(update: jax_core.Jaxpr, num_layers: int, num_ticks: int) -> tuple[list[Any], Any]:
    """Activations that the forward pass keeps for the backward pass, and the largest value in a layer.

    Both are shapes over the whole mesh; in a pipeline over the devices of one stage.

    Args:
      update: traced update.
      num_layers: number of layers of one stage.
      num_ticks: number of ticks of the pipeline; 0 without a pipeline.
    """
    if not num_ticks:
        layers = _forward_scan(update, num_layers)
        # A single layer is in no scan, and what it keeps looks like other values.
        kept = [] if layers is None else _stacked(layers)
        return kept, _largest_in(update if layers is None else layers.params["jaxpr"].jaxpr)
    # Each tick scans the layers of a stage.
    ticks = _forward_scan(update, num_ticks)
    assert ticks is not None, "the ticks of a pipeline are a scan, of at least two rounds"
    # The tick of a stage with a single layer has no scan inside.
    layers = _forward_scan(ticks.params["jaxpr"].jaxpr, num_layers) or ticks
    return _stacked(ticks), _largest_in(layers.params["jaxpr"].jaxpr)


def _forward_scan(program: jax_core.Jaxpr, length: int) -> jax_core.JaxprEqn | None:
    # Other loops may have the same length by chance, but none stacks nearly as many bytes. The backward
    # scan stacks the gradients of the weights, which are counted elsewhere.
    return max(
        (
            eqn
            for eqn in _equations(program)
            if eqn.primitive.name == "scan"
            and eqn.params["length"] == length
            and not eqn.params["reverse"]
        ),
        key=lambda eqn: sum(map(nbytes_of, _stacked(eqn))),
        default=None,
    )


def _largest_in(program: jax_core.Jaxpr) -> Any:
    return max((v.aval for e in _equations(program) for v in e.outvars), key=nbytes_of)


def _stacked(scan: jax_core.JaxprEqn) -> list[Any]:
    # Stacked outputs have one more dimension than inside the loop, carries do not. The number of carries is
    # not among the parameters of a scan since jax 0.11.
    inside: list[Any] = [v.aval for v in scan.params["jaxpr"].jaxpr.outvars]
    outside: list[Any] = [v.aval for v in scan.outvars]
    return [outer for outer, inner in zip(outside, inside, strict=True) if outer.ndim > inner.ndim]


def _equations(jaxpr: jax_core.Jaxpr) -> Iterator[jax_core.JaxprEqn]:
    # Every equation, including those of inner programs.
    for eqn in jaxpr.eqns:
        yield eqn
        for program in _inside(eqn):
            yield from _equations(program)


def _inside(eqn: jax_core.JaxprEqn) -> Iterator[jax_core.Jaxpr]:
    # The inner programs of an equation, such as the body of a loop.
    for value in jax.tree.leaves(
        tuple(eqn.params.values()), is_leaf=lambda v: isinstance(v, _PROGRAMS)
    ):
        if isinstance(value, jax_core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jax_core.Jaxpr):
            yield value


def matmul_flops(
    program: jax_core.Jaxpr, *, open_loops: float = 1, expert_shards: int = 1
) -> float:
    """Floating-point operations of all matmuls of a traced program over the whole mesh, with recomputation.

    The body of a scan counts once per iteration, a `shard_map` once per device, a kernel once per position of
    its grid. Causal attention counts half. Of a conditional the largest branch counts. Each device of an
    expert group computes an equal share of the group's tokens, as if all experts were chosen equally often.

    Args:
      program: traced program.
      open_loops: mean rounds of an outermost loop whose end depends on data; one inside it counts once.
      expert_shards: number of devices that share the experts, inside `HELD_EXPERTS`.
    """
    total = 0.0
    for eqn in program.eqns:
        name, params = eqn.primitive.name, eqn.params
        if str(params.get("name")) == GROUPED_MATMUL:
            # Of rows [M, K] and matrices [G, K, N], or of rows [M, K] and the gradients [M, N] of their
            # products. Recomputation can split off a part that prepares masks and sizes, which has no float.
            rows: Any = eqn.invars[0].aval if eqn.invars else None
            if rows is not None and jnp.issubdtype(rows.dtype, jnp.floating):
                products: Any = eqn.outvars[0].aval
                total += 2 * rows.size * products.shape[-1]
            continue
        if name in _MATMULS:
            total += _MATMULS[name](eqn)
        elif name == "ragged_dot_general":
            # Each row is multiplied with one group; in its gradient each row adds to one group.
            numbers: Any = params["ragged_dot_dimension_numbers"]
            groups: Any = eqn.invars[2].aval
            (contracted, _), _ = numbers.dot_dimension_numbers
            summed = set(numbers.lhs_ragged_dimensions) <= set(contracted)
            one = _product(eqn, contracted)
            total += (one // groups.size if summed else one) // expert_shards
        of_experts = params.get("name") == EXPERT_ROWS
        times, rounds = _times(eqn, open_loops), 1 if name == "while" else open_loops
        shards = expert_shards
        if str(params.get("name")).startswith(HELD_EXPERTS):
            shards = int(params["name"].removeprefix(HELD_EXPERTS))
        counts = [matmul_flops(p, open_loops=rounds, expert_shards=shards) for p in _inside(eqn)]
        inside = max(counts) if name == "cond" else sum(counts)
        total += times * inside // (expert_shards if of_experts else 1)
    return total


def _times(eqn: jax_core.JaxprEqn, open_loops: float) -> float:
    # The number of runs of an equation's inner programs.
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "while":
        return open_loops
    if name == "shard_map":
        return math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"])
    if name == "pallas_call":
        places = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
        # The kernel skips positions above the diagonal, half of all.
        return places // 2 if "splash" in str(params.get("name")) else places
    return 1


def _product(eqn: jax_core.JaxprEqn, contracted: Sequence[int]) -> int:
    # Operations of a product that sums over these dimensions of its first factor.
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    return 2 * result.size * math.prod(left.shape[axis] for axis in contracted)


def _fused_attention(eqn: jax_core.JaxprEqn, matmuls: int) -> int:
    # A fused kernel with this many causal matmuls of queries [B, T, Q, H] and keys [B, S, K, H]. Causal ones
    # count half, so there is no factor of 2 for multiplying and adding.
    query: Any = eqn.invars[0].aval
    key: Any = eqn.invars[1].aval
    return matmuls * query.size * key.shape[1]


_MATMULS: dict[str, Callable[[jax_core.JaxprEqn], int]] = {
    "dot_general": lambda eqn: _product(eqn, eqn.params["dimension_numbers"][0][0]),
    # Forward: scores, weighted values. Backward: four gradients, and the scores again.
    "dot_product_attention_fwd_wrapper": functools.partial(_fused_attention, matmuls=2),
    "dot_product_attention_bwd_wrapper": functools.partial(_fused_attention, matmuls=5),
}


def nbytes_of(aval: Any) -> int:
    """Bytes of a shape, over the whole mesh."""
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def bytes_of(tree: Any) -> int:
    """Bytes per device of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


# Names of buffers, as in `jaxrl_planner.memory`.
WEIGHTS, OPTIMISER, SAMPLER, CACHE, SENT = (
    "actor in training",
    "optimiser state",
    "actor in generation",
    "KV cache and slots",
    "rollout, frozen",
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One compiled function.

    Attributes:
      function: jitted function.
      arguments, keywords: shapes with shardings; keywords are static.
      calls: number of calls in a step.
      open_loops: mean rounds of its outermost loop whose end depends on data.
      used: share of the rounds of its other loops that are not empty.
      share: bytes that a step exchanges, relative to those of calls at the largest size.
      step_flops: operations of a step over the whole mesh, if its calls are smaller than the traced one.
      longest_branch: whether conditionals take the branch with the most instructions; else with the fewest.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: float = 1.0
    open_loops: float = 1
    used: float = 1.0
    share: float = 1.0
    step_flops: float | None = None
    longest_branch: bool = True

    def flops(self, jaxpr: jax_core.Jaxpr) -> float:
        """Operations of its matmuls in a step, over the whole mesh, from the traced function."""
        if self.step_flops is not None:
            return self.step_flops
        return self.calls * self.used * matmul_flops(jaxpr, open_loops=self.open_loops)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a role, at one point of a step.

    Attributes:
      role, name: role that runs it, and its name.
      phase: "sampling" or "learning".
      pieces: its compiled functions; at least one.
      holds: names of resident buffers that are its arguments, or that are released before it runs.
      reads: lower bound of the bytes that a device reads from its memory in a step.
      peak: function from the temporaries of all pieces to the peak bytes per device; None takes the largest
        peak of the pieces.
    """

    role: str
    name: str
    phase: str
    pieces: tuple[Piece, ...]
    holds: frozenset[str]
    reads: float
    peak: Callable[[Sequence[int]], int] | None = None

    @property
    def title(self) -> str:
        return f"{self.role} {self.name}"


def sampling_programs(actor: Actor, engine: Engine, load: StepLoad) -> Iterator[Program]:
    """The programs of resharding, and the engine's programs at their largest sizes."""
    role, resharding = "rollout", actor.resharding
    if isinstance(resharding, Resharding):
        role = "actor"
        # Leaves with equal shapes and layouts share one program.
        keys = [(b.weights, b.num_slices) for b in resharding.buckets]
        distinct = list(dict.fromkeys(keys))
        first = {key: resharding.buckets[keys.index(key)] for key in distinct}

        def peak(own: Sequence[int]) -> int:
            of_key = dict(zip(distinct, own, strict=True))
            return resharding.peak_bytes([of_key[key] for key in keys])

        # Each moved weight is read in one layout and written in the other.
        moved = sum(w.train_bytes + w.generate_bytes for w in resharding.weights if w.moves)
        held = frozenset({WEIGHTS, SAMPLER, CACHE})
        # No weight moves if both layouts have the same shardings.
        if keys:
            gathers = tuple(
                Piece(b.gather_program, b.gather_arguments(), calls=keys.count(key) * b.num_slices)
                for key, b in first.items()
            )
            yield Program("actor", "to_generate", "sampling", gathers, held, moved, peak)
        if keys and resharding.donate:
            cuts = tuple(
                Piece(b.slice_program, b.slice_arguments(), calls=keys.count(key))
                for key, b in first.items()
            )
            yield Program("actor", "to_train", "learning", cuts, held, moved, peak)
    shapes, axes = actor.model_shapes, actor.axes
    yield from engine_programs(engine, load, role=role, shapes=shapes, axes=axes)


def handover_program(handover: Handover) -> Program:
    """The programs that send the actor's weights to the devices of the sampler."""
    calls = {}
    for bucket in handover.buckets:
        # Leaves with equal shapes and layouts share one program.
        number, _ = calls.get(bucket.weights, (0, bucket))
        calls[bucket.weights] = number + bucket.num_slices, bucket
    pieces = tuple(Piece(move_program, b.move_arguments(), calls=n) for n, b in calls.values())
    sizes = [b.nbytes for _, b in calls.values()]
    received = handover.received_bytes

    def peak(own: Sequence[int]) -> int:
        return received + max(size + inside for size, inside in zip(sizes, own, strict=True))

    held = frozenset({SENT})
    return Program("rollout", "hand_over", "sampling", pieces, held, received, peak)


def engine_programs(
    engine: Engine, load: StepLoad, *, role: str, shapes: Any, axes: Any
) -> Iterator[Program]:
    """Prefill, insert and generate.

    Args:
      engine: engine that has the programs.
      load: work of a step.
      role: role that samples with the engine.
      shapes, axes: shapes and logical axes of the weights.
    """
    config, mesh = engine.config, engine.mesh
    shapes_of = sampler_shapes(engine, shapes, axes)
    params, state = shapes_of.params, shapes_of.slots
    own, cached = (
        (SAMPLER, CACHE) if role == "actor" else (f"{role}, frozen", f"{role}, cache and slots")
    )

    def small(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))

    P = engine.batch_sizes[-1]
    T = round_up(engine.prompt_sizes, min(config.max_prompt_tokens, config.chunk_tokens))
    # Compiled for the longest prompts; a step has programs for shorter ones.
    # Each prompt is prefilled once for all of its answers.
    calls = math.ceil(load.prompts / P)
    lengths, numbers = load.work.prompt_lengths, model_numbers(engine.model)
    share = load.prompts * lengths.mean / (calls * P * T)
    # Each prompt without padding. Only its last token has logits.
    head = 2.0 * numbers.vocabulary * numbers.width
    flops = lengths.mean * (numbers.token_flops - head) + head
    flops += mean_attention_flops(engine.model, lengths.mean, lengths.mean_square)
    prefill = Piece(
        *(engine.prefill, (params, small(P, T), small(P))),
        calls=calls,
        share=share,
        step_flops=load.prompts * flops,
    )
    prefix = engine.layout.abstract(jax.eval_shape(engine.prefill, *prefill.arguments))
    assignment: Any = [small(config.slots) for _ in dataclasses.fields(Assignment)]
    truncation = jax.tree.map(lambda x: small(dtype=jnp.asarray(x).dtype), truncation_of())
    started = (
        *(prefix, state, Assignment(*assignment)),
        *(small(dtype=jnp.uint32), small(), small(dtype=jnp.float32), small(dtype=jnp.bool_)),
        truncation,
    )
    # No slot is ever idle, and each reads only the tokens that it holds: a lower bound.
    samples = load.prompts * load.samples
    busy = min(config.slots, samples)
    tokens = samples * load.work.response_lengths.mean
    generate = Piece(
        engine.generate,
        (params, state, small()),
        calls=tokens / (busy * config.tokens_per_dispatch),
        open_loops=config.tokens_per_dispatch,
        # Its conditionals are about truncated sampling, which is the long branch.
        longest_branch=load.truncated,
    )
    weights = bytes_of(params)
    # A decoding step reads the weights once, but for experts that no token chose, and the tokens that
    # its samples hold.
    step = weights - _unread_experts(engine, params, busy)
    step += busy / engine.shards * load.live_tokens * _token_bytes(engine, state)
    yield Program(
        *(role, "prefill", "sampling", (prefill,), frozenset({own})), prefill.calls * weights
    )
    insert = Piece(engine.insert, started, calls=calls, share=share)
    yield Program(
        *(role, "insert", "sampling", (insert,), frozenset({cached})),
        calls * share * bytes_of(prefix),
    )
    yield Program(
        *(role, "generate", "sampling", (generate,)),
        frozenset({own, cached}),
        generate.calls * config.tokens_per_dispatch * step,
    )


def _unread_experts(engine: Engine, params: Any, busy: float) -> float:
    # Bytes of a device's experts that no token of a decoding step chooses, if all are as likely.
    model = engine.model
    if not model.num_experts:
        return 0.0
    # The replicas that share the experts send their tokens to each other.
    tokens = busy / engine.shards * engine.mesh.shape["expert"]
    unread = (1 - model.experts_per_token / model.num_experts) ** tokens
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    # Not those of the first dense layers, nor of shared experts.
    experts = [f"['mlp']['{name}']" for name in ("gate", "up", "down")]
    held = [
        leaf
        for name, leaf in names
        if name.startswith("['layers']") and any(part in name for part in experts)
    ]
    return unread * bytes_of(held)


def _token_bytes(engine: Engine, state: DecodeState) -> float:
    # Bytes of a token in the cache of a device, in a slot or in a page.
    cache, tokens = state.context.cache, state.num_slots // engine.shards * state.capacity
    if engine.pages is not None:
        cache, tokens = cache.pool, engine.pages.num_pages * engine.pages.page_tokens
    return bytes_of(cache) / tokens


def learner_programs(
    name: str,
    role: Actor | ScoreLearner,
    objective: Objective,
    shape: PackedShape,
    load: StepLoad,
    *,
    reference: Any = None,
    compared: str = "reference",
    first_minibatch: int = 0,
    epochs: int = 1,
) -> Iterator[Program]:
    """What a trained role reads of a batch (old log-probabilities, values), and its update.

    Args:
      name, role: the actor or a critic, on a mesh of devices that need not be present.
      objective: objective of its update.
      shape: shape of its batches.
      load: work of a step.
      reference: shapes of the weights that the objective compares with; None without them.
      compared: name of the role with these weights.
      first_minibatch: first minibatch of the log-probabilities; the update computes those of earlier ones.
      epochs: number of passes over the minibatches.
    """
    # A run computes only microbatches that hold sequences; the shape has room for more.
    state, micro = role.abstract_state(), load.microbatches(shape)
    weights, moments = WEIGHTS, OPTIMISER
    if isinstance(role, Actor):
        what, forward, read = "logprobs", role.logprobs_program, abstract_batch(role, shape)
        batch = read
    else:
        what, forward = "values", role.by_token_program
        read, batch = (abstract_batch(role, shape, kind) for kind in (PackedBatch, ValueBatch))
        shown = name.replace("_", " ")
        weights, moments = f"{shown} in training", f"{shown}, optimiser state"
    if first_minibatch < shape.minibatches:
        keywords = {"first_minibatch": first_minibatch} if first_minibatch else {}
        used = micro / shape.microbatches
        piece = Piece(forward, (state.params, read), keywords, used=used)
        yield Program(
            *(name, what, "learning", (piece,), frozenset({weights})),
            bytes_of(state.params) * micro * (shape.minibatches - first_minibatch),
        )
    update = Piece(
        role.update_program((objective,), epochs=epochs),
        (state, (batch,), reference, role.schedule),
        open_loops=micro,
    )
    # The sampler's copy of the actor's weights is released before its update.
    holds = {weights, moments} | ({SAMPLER} if name == "actor" else set())
    holds |= {f"{compared}, frozen"} if reference else set()
    # Weights are read three times per microbatch (rematerialised), the state twice per update.
    each = 3 * micro * bytes_of(state.params) + 2 * bytes_of(state)
    yield Program(
        *(name, "update", "learning", (update,), frozenset(holds)),
        epochs * shape.minibatches * each,
    )


def frozen_programs(
    name: str, role: Reference | RewardModel, shape: PackedShape, load: StepLoad
) -> Iterator[Program]:
    """The only program of a frozen model."""
    params = role.abstract_params()
    micro = load.microbatches(shape)
    is_policy = isinstance(role, Reference)
    # Frozen roles see the batch once a step, in the layout of packed rows like all others.
    piece = Piece(
        role.logprobs_program if is_policy else role.scores_program,
        (params, abstract_batch(role, shape, PackedBatch)),
        used=micro / shape.microbatches,
    )
    yield Program(
        *(name, "logprobs" if is_policy else "scores", "learning", (piece,)),
        frozenset({f"{name.replace('_', ' ')}, frozen"}),
        bytes_of(params) * micro * shape.minibatches,
    )
