"""Every program of an actor, traced on a mesh without devices: what does not fit or divide is an error.

    the real Actor and Engine --> shapes with shardings of what stays
                              --> the update's layer scan: what the backward pass keeps of the layers

Each function here runs the real methods on shapes. What the compiled programs need besides is not covered.

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
    """Weights and slots in the generation layout, shapes and shardings only."""

    params: Params
    slots: DecodeState


def abstract_batch(
    role: PackedModel, shape: PackedShape, kind: type[PackedBatch] = TrainBatch
) -> Any:
    """Shapes and shardings of a batch of some kind on a role's mesh, by default what a policy learns from."""

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
    """What an engine samples with, from shapes and logical axes of the weights."""
    dtype = jnp.dtype(engine.config.dtype)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
        shapes,
        shardings(axes, shapes, GENERATE_RULES, engine.mesh),
    )
    return SamplerShapes(params, engine.abstract_decode_state())


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


def matmul_flops(program: jax_core.Jaxpr, *, open_loops: int = 1, expert_shards: int = 1) -> int:
    """Operations of all products of a traced program over the whole mesh, those it computes again included.

    A scan counts as often as it runs, the part of a device as often as there are devices, a kernel as often
    as its grid has places; causal attention counts half. All branches of a choice count. Of the tokens that
    a group of experts' owners gathers, each owner computes its share, as if all experts were chosen alike.

    Args:
      program: the traced program.
      open_loops: rounds of an outermost loop whose end is known at run time; one inside it counts once.
      expert_shards: devices that share the experts, inside the part of one of them.
    """
    total = 0
    for eqn in program.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in _PRODUCTS:
            total += _PRODUCTS[name](eqn)
        elif name == "ragged_dot_general":
            total += _grouped_product(eqn) // expert_shards
        of_experts = params.get("name") == EXPERT_TILES
        times, rounds = _times(eqn, open_loops), 1 if name == "while" else open_loops
        shards = expert_shards
        if name == "shard_map" and "expert" in params["newly_manual_axes"]:
            shards = params["mesh"].shape["expert"]
        inside = sum(
            matmul_flops(p, open_loops=rounds, expert_shards=shards) for p in _inside(eqn)
        )
        total += times * inside // (expert_shards if of_experts else 1)
    return total


def _times(eqn: jax_core.JaxprEqn, open_loops: int) -> int:
    """How often what is inside an equation runs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "while":
        return open_loops
    if name == "shard_map":
        return math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"])
    if name == "pallas_call":
        places = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
        # It skips what lies above the diagonal, which is half of it.
        return places // 2 if "splash" in str(params.get("name")) else places
    return 1


def _product(eqn: jax_core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    return 2 * result.size * math.prod(left.shape[axis] for axis in contracted)


def _grouped_product(eqn: jax_core.JaxprEqn) -> int:
    """Of `ragged_dot`: each row with one group; or, the gradient of the groups, each in one group's sum."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    one = 2 * result.size * math.prod(left.shape[axis] for axis in contracted)
    groups: Any = eqn.invars[2].aval
    summed = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return one // groups.size if summed else one


def _fused_attention(eqn: jax_core.JaxprEqn, products: int) -> int:
    """A cuDNN kernel's `products` of queries [B, T, Q, H] and keys [B, S, K, H], half of them causal."""
    query: Any = eqn.invars[0].aval
    key: Any = eqn.invars[1].aval
    return products * query.size * key.shape[1]


_PRODUCTS: dict[str, Callable[[jax_core.JaxprEqn], int]] = {
    "dot_general": _product,
    # Scores and mixed values; their gradients, with the scores once more.
    "dot_product_attention_fwd_wrapper": functools.partial(_fused_attention, products=2),
    "dot_product_attention_bwd_wrapper": functools.partial(_fused_attention, products=5),
}


def nbytes_of(aval: Any) -> int:
    """Bytes of a shape, over the whole mesh."""
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
