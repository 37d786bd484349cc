"""Every program of an actor, traced on a mesh without devices: what does not fit or divide is an error.

    the real Actor and Engine --> shapes with shardings of what stays
                              --> the update's layer scan: what the backward pass keeps of the layers

Each function here runs the real methods on shapes. What the compiled programs need besides is not covered.

R rows of a microbatch   T tokens of a row   L layers   S slots
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core
from jax.sharding import NamedSharding

from jaxrl.data.packing import PackedShape
from jaxrl.mesh.protocols import rows_and_length
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import Params
from jaxrl.roles.learner import TrainState
from jaxrl.roles.objective import Objective
from jaxrl.roles.policy import Actor
from jaxrl.rollout.engine import Assignment, DecodeState, Engine
from jaxrl.rollout.sampling import untruncated
from jaxrl.types import TrainBatch

_INTEGER_FIELDS = frozenset({"tokens", "positions", "segment_ids", "sequence", "prefix_ids"})
_PROGRAMS = (jax_core.ClosedJaxpr, jax_core.Jaxpr)


@dataclasses.dataclass(frozen=True)
class SamplerShapes:
    """Weights and slots in the generation layout, shapes and shardings only."""

    params: Params
    slots: DecodeState


def abstract_batch(actor: Actor, shape: PackedShape) -> TrainBatch:
    """Shapes and shardings of what an update learns from."""

    def field(name: str) -> jax.ShapeDtypeStruct:
        is_count = name == "num_micro_U"
        dims = (shape.minibatches,) if is_count else dataclasses.astuple(shape)
        dtype = jnp.int32 if is_count or name in _INTEGER_FIELDS else jnp.float32
        spec = rows_and_length(actor.mesh, dims)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(actor.mesh, spec))

    fields: dict[str, Any] = {f.name: field(f.name) for f in dataclasses.fields(TrainBatch)}
    if not actor.train.share_prompts:
        fields["prefix_ids"] = None
    return TrainBatch(**fields)


def trace_rollout(actor: Actor, engine: Engine) -> SamplerShapes:
    """Traces the way to the generation layout and the programs there."""
    assert isinstance(actor.resharding, Resharding)
    for bucket in actor.resharding.buckets:
        jax.eval_shape(bucket.gather_program, *bucket.gather_arguments())
    dtype = jnp.dtype(engine.config.dtype)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
        actor.shapes,
        shardings(actor.axes, actor.shapes, GENERATE_RULES, engine.mesh),
    )
    slots = engine.abstract_decode_state()
    _trace_engine(engine, params, slots)
    return SamplerShapes(params, slots)


def _trace_engine(engine: Engine, params: Params, slots: DecodeState) -> None:
    """Prefill, insert and generate."""
    config = engine.config
    prefix = jax.eval_shape(
        engine.prefill,
        params,
        _ints(config.prefill_prompts, config.max_prompt_tokens),
        _ints(config.prefill_prompts),
    )
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


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def trace_learning(
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


def layer_memory(update: jax_core.Jaxpr, num_layers: int, num_ticks: int) -> tuple[list[Any], Any]:
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
        key=lambda eqn: sum(map(nbytes_of, _stacked(eqn))),
    )


def _largest_inside(scan: jax_core.JaxprEqn) -> Any:
    inside = [v.aval for e in _equations(scan.params["jaxpr"].jaxpr) for v in e.outvars]
    return max(inside, key=nbytes_of)


def _stacked(scan: jax_core.JaxprEqn) -> list[Any]:
    # A carry has the shape it has inside the loop; since jax 0.11 a scan does not say how many it has.
    inside: list[Any] = [v.aval for v in scan.params["jaxpr"].jaxpr.outvars]
    outside: list[Any] = [v.aval for v in scan.outvars]
    return [outer for outer, inner in zip(outside, inside, strict=True) if outer.ndim > inner.ndim]


def _equations(jaxpr: jax_core.Jaxpr) -> Iterator[jax_core.JaxprEqn]:
    """Every equation, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for program in _inside(eqn):
            yield from _equations(program)


def _inside(eqn: jax_core.JaxprEqn) -> Iterator[jax_core.Jaxpr]:
    """Programs that an equation runs, such as the body of a loop."""
    for value in jax.tree.leaves(
        tuple(eqn.params.values()), is_leaf=lambda v: isinstance(v, _PROGRAMS)
    ):
        if isinstance(value, jax_core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jax_core.Jaxpr):
            yield value


def product_flops(program: jax_core.Jaxpr) -> int:
    """Operations of all products of a traced program, those it computes again included.

    A scan counts as often as it runs, a loop whose end is known at run time once, as do all branches of a
    choice.
    """
    total = 0
    for eqn in program.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left: Any = eqn.invars[0].aval
            result: Any = eqn.outvars[0].aval
            total += 2 * result.size * math.prod(left.shape[axis] for axis in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(product_flops, _inside(eqn)))
    return total


def nbytes_of(aval: Any) -> int:
    """Bytes of a shape, over the whole mesh."""
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
