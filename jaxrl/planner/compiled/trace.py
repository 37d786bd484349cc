"""Traces programs on a mesh without devices; a wrong shape or sharding is an error.

    the real Actor and Engine --> shapes and shardings of their buffers
                              --> the update's scan over layers: activations kept for the backward pass

Each function runs the real methods on shapes. Other temporaries of compiled programs are not covered.

R rows of a microbatch   T tokens of a row   L layers   S slots
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core
from jax.sharding import NamedSharding

from jaxrl.data.packing import PackedShape
from jaxrl.mesh.protocols import rows_and_length
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import Params
from jaxrl.models.experts import EXPERT_TILES
from jaxrl.roles.packed_model import PackedModel
from jaxrl.rollout.decode_state import DecodeState
from jaxrl.rollout.engine import Engine
from jaxrl.types import PackedBatch, TrainBatch

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

    def field(name: str) -> jax.ShapeDtypeStruct:
        is_count = name == "num_micro_U"
        dims = (shape.minibatches,) if is_count else dataclasses.astuple(shape)
        dtype = jnp.int32 if is_count or name in _INTEGER_FIELDS else jnp.float32
        spec = rows_and_length(role.mesh, dims)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(role.mesh, spec))

    fields: dict[str, Any] = {f.name: field(f.name) for f in dataclasses.fields(kind)}
    if not role.train.shares_prompts:
        fields["prefix_ids"] = None
    return kind(**fields)


def sampler_shapes(engine: Engine, shapes: Params, axes: Any) -> SamplerShapes:
    """Shapes of an engine's weights and slots, from shapes and logical axes of the weights."""
    params = jax.tree.map(
        lambda stored, leaf, sharding: stored.abstract(leaf.shape, sharding),
        engine.weight_types,
        shapes,
        shardings(axes, shapes, GENERATE_RULES, engine.mesh),
    )
    return SamplerShapes(params, engine.abstract_decode_state())


def layer_memory(update: jax_core.Jaxpr, num_layers: int, num_ticks: int) -> tuple[list[Any], Any]:
    """Activations that the forward pass keeps for the backward pass, and the largest value in a layer.

    Both are shapes over the whole mesh. In a pipeline they are over the devices of one stage, because each
    tick scans the layers of a stage.

    Args:
      update: traced update.
      num_layers: number of layers of one stage.
      num_ticks: number of ticks of the pipeline; 0 without a pipeline.
    """
    if not num_ticks:
        layers = _forward_scan(update, num_layers)
        # A single layer is in no scan, and what it keeps cannot be told from other values.
        return (
            ([], _largest_in(update)) if layers is None else (_stacked(layers), _inside_of(layers))
        )
    ticks = _forward_scan(update, num_ticks)
    assert ticks is not None, "the ticks of a pipeline are a scan, of at least two rounds"
    # The tick of a stage with a single layer has no scan inside.
    layers = _forward_scan(ticks.params["jaxpr"].jaxpr, num_layers) or ticks
    return _stacked(ticks), _inside_of(layers)


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


def _inside_of(scan: jax_core.JaxprEqn) -> Any:
    """The largest value inside a scan."""
    return _largest_in(scan.params["jaxpr"].jaxpr)


def _largest_in(program: jax_core.Jaxpr) -> Any:
    return max((v.aval for e in _equations(program) for v in e.outvars), key=nbytes_of)


def _stacked(scan: jax_core.JaxprEqn) -> list[Any]:
    # Stacked outputs have one more dimension than inside the loop, carries do not. The number of carries is
    # not among the parameters of a scan since jax 0.11.
    inside: list[Any] = [v.aval for v in scan.params["jaxpr"].jaxpr.outvars]
    outside: list[Any] = [v.aval for v in scan.outvars]
    return [outer for outer, inner in zip(outside, inside, strict=True) if outer.ndim > inner.ndim]


def _equations(jaxpr: jax_core.Jaxpr) -> Iterator[jax_core.JaxprEqn]:
    """Every equation, including those of inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for program in _inside(eqn):
            yield from _equations(program)


def _inside(eqn: jax_core.JaxprEqn) -> Iterator[jax_core.Jaxpr]:
    """The inner programs of an equation, such as the body of a loop."""
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
      expert_shards: number of devices that share the experts, inside the `shard_map` over them.
    """
    total = 0.0
    for eqn in program.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in _MATMULS:
            total += _MATMULS[name](eqn)
        elif name == "ragged_dot_general":
            total += _grouped_matmul(eqn) // expert_shards
        of_experts = params.get("name") == EXPERT_TILES
        times, rounds = _times(eqn, open_loops), 1 if name == "while" else open_loops
        shards = expert_shards
        if name == "shard_map" and "expert" in params["newly_manual_axes"]:
            shards = params["mesh"].shape["expert"]
        counts = [matmul_flops(p, open_loops=rounds, expert_shards=shards) for p in _inside(eqn)]
        inside = max(counts) if name == "cond" else sum(counts)
        total += times * inside // (expert_shards if of_experts else 1)
    return total


def _times(eqn: jax_core.JaxprEqn, open_loops: float) -> float:
    """The number of runs of an equation's inner programs."""
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


def _matmul(eqn: jax_core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    return 2 * result.size * math.prod(left.shape[axis] for axis in contracted)


def _grouped_matmul(eqn: jax_core.JaxprEqn) -> int:
    """Of `ragged_dot`: each row is multiplied with one group; in its gradient each row adds to one group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    one = 2 * result.size * math.prod(left.shape[axis] for axis in contracted)
    groups: Any = eqn.invars[2].aval
    summed = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return one // groups.size if summed else one


def _fused_attention(eqn: jax_core.JaxprEqn, matmuls: int) -> int:
    """A cuDNN kernel with this many causal matmuls of queries [B, T, Q, H] and keys [B, S, K, H]."""
    query: Any = eqn.invars[0].aval
    key: Any = eqn.invars[1].aval
    return matmuls * query.size * key.shape[1]


_MATMULS: dict[str, Callable[[jax_core.JaxprEqn], int]] = {
    "dot_general": _matmul,
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
