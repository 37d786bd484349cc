"""Sharding rules: the mesh axes that each logical axis is split over, in training and in generation.

There is one set of rules per phase. Resharding (`resharding.py`) follows from two sets of rules alone:

    weight     axes                           TRAIN_RULES                                  GENERATE_RULES
    q          (embed, heads, head_dim)       fsdp, (tensor_gen, tensor_micro), -          -, tensor_gen, -
    mlp.down   (mlp, embed)                   (tensor_gen, tensor_micro), fsdp             tensor_gen, -

Experts are spread over the tensor axes too, whole, as far as their number divides (Megatron's expert tensor
parallel size 1). The axes that are left split the width of each expert.

In generation on GPUs a stack of layers is not one array but a list, with an array for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import UserError
from jaxrl.mesh.devices import platform_of
from jaxrl.mesh.layout import TENSOR_GEN
from jaxrl.quantized import StoredType

Rules = Mapping[str, tuple[str, ...]]

_TENSOR = (*TENSOR_GEN, "tensor_micro")
_GENERATE_TENSOR = (*TENSOR_GEN, "fsdp_gen")

TRAIN_RULES: Rules = {
    # weights
    "layers": ("stage_gen", "stage_micro"),
    # Layers outside of the pipeline.
    "unstaged_layers": (),
    "embed": ("fsdp", "fsdp_gen"),
    "heads": _TENSOR,
    "kv_heads": _TENSOR,
    "head_dim": (),
    "mlp": _TENSOR,
    "experts": ("expert", *_TENSOR),
    "vocab": _TENSOR,
    # activations
    "batch": ("data", "fsdp", "expert", "fsdp_gen"),
    # Rows outside the stack of layers (embedding, loss): pipeline stages share them too.
    "rows": ("data", "fsdp", "expert", "fsdp_gen", "stage_gen", "stage_micro"),
    "length": ("context",),
    "activation": (),
}

GENERATE_RULES: Rules = {
    "layers": ("stage_gen",),
    "unstaged_layers": (),
    "embed": (),
    "heads": _GENERATE_TENSOR,
    "kv_heads": _GENERATE_TENSOR,
    "head_dim": (),
    "mlp": _GENERATE_TENSOR,
    "experts": ("expert", *_GENERATE_TENSOR),
    "vocab": _GENERATE_TENSOR,
    "batch": ("data", "fsdp", "expert", "context", "stage_micro", "tensor_micro"),
    "rows": ("data", "fsdp", "expert", "context", "stage_micro", "tensor_micro", "stage_gen"),
    "length": (),
    "activation": (),
}

# Logical axes that are split as far as they divide, and the mesh axes that have to divide them nevertheless:
# key-value heads, as in Megatron, rows that are too few for all stages of a pipeline, and experts. For every
# other axis it is an error not to divide.
REPLICABLE: Rules = {"kv_heads": (), "rows": (), "experts": ("expert",)}


def partition_spec(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    rules: Rules,
    sizes: Mapping[str, int],
    name: str = "array",
) -> P:
    """The PartitionSpec of one array.

    Args:
      axes: logical axis of each dimension; None for a dimension that is never split.
      shape: shape of the array.
      rules: sharding rules of the phase.
      sizes: size of each mesh axis.
      name: name of the array in errors.

    Raises:
      UserError: a dimension does not divide over its mesh axes, or two dimensions use the same mesh axis.
    """
    claimed: dict[str, str] = {}
    entries = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axes: tuple[str, ...] = axes_of(axis, rules, sizes) if axis else ()
        if axis == "mlp":
            # What the experts of the same array have left.
            mesh_axes = tuple(a for a in mesh_axes if claimed.get(a) != "experts")
        if (needed := REPLICABLE.get(axis or "")) is not None:
            # Minor axes are given up first. Axes that must divide stay, and the error below names them.
            while size % _product(mesh_axes, sizes) and mesh_axes[-1:] != needed[-1:]:
                mesh_axes = mesh_axes[:-1]
        if size % _product(mesh_axes, sizes):
            split = " x ".join(f"{a}={sizes[a]}" for a in mesh_axes)
            raise UserError(
                f"{name}: {axis} of size {size} does not divide over {split} "
                f"({_product(mesh_axes, sizes)} shards); choose a layout (mesh.train, mesh.generate) whose "
                f"product divides {size}"
            )
        for mesh_axis in mesh_axes:
            if mesh_axis in claimed:
                raise UserError(
                    f"{name}: mesh axis {mesh_axis} is claimed by both {claimed[mesh_axis]} and {axis}; "
                    "one mesh axis can split one dimension of an array; change the rule table"
                )
            claimed[mesh_axis] = axis or ""
        entries.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0] if mesh_axes else None)
    return P(*entries)


def parts_of(
    axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """The number of parts that each dimension of an array is split into."""
    spec = partition_spec(axes, shape, rules, dict(mesh.shape))
    own = NamedSharding(mesh, spec).shard_shape(shape)
    return tuple(whole // part for whole, part in zip(shape, own, strict=True))


def _product(mesh_axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in mesh_axes)


def shardings(axes: Any, shapes: Any, rules: Rules, mesh: Mesh | AbstractMesh) -> Any:
    """The NamedShardings of a whole tree.

    Args:
      axes: tree with a tuple of logical axes at each leaf.
      shapes: tree of the same structure; leaves have `.shape`.
      rules: sharding rules of the phase.
      mesh: the mesh.
    """
    sizes = dict(mesh.shape)

    def one(path, names, leaf):
        spec = partition_spec(names, leaf.shape, rules, sizes, jax.tree_util.keystr(path))
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        one, axes, shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def lists_layers(mesh: Mesh | AbstractMesh) -> bool:
    """Whether weights in generation are lists of layers, and not stacks."""
    # On GPUs a scan copies each layer out of the stack for every token: 1.8 of 4.3 ms of 1.5B at 16 rows
    # (H200, benchmarks/results/2026-11-26-h200.md). On TPUs the slices are a part of the products, and
    # nothing is copied. The stages of a pipeline split a stack.
    return platform_of(mesh) == "gpu" and shards_of("layers", GENERATE_RULES, mesh) == 1


def generation_shardings(axes: Any, shapes: Any, mesh: Mesh | AbstractMesh) -> Any:
    """`shardings` by GENERATE_RULES; for a stack of layers a list of them, if the mesh `lists_layers`."""
    where = shardings(axes, shapes, GENERATE_RULES, mesh)
    if not lists_layers(mesh):
        return where

    def one(names: tuple[str | None, ...], leaf: Any, sharding: NamedSharding) -> Any:
        if names[:1] not in (("layers",), ("unstaged_layers",)):
            return sharding
        return [NamedSharding(mesh, P(*sharding.spec[1:]))] * leaf.shape[0]

    return jax.tree.map(one, axes, shapes, where, is_leaf=lambda x: isinstance(x, tuple))


def with_shardings(shapes: Any, where: Any) -> Any:
    """A tree of shapes with the shardings of an equal tree, which may have lists of layers."""
    return jax.tree.map(
        lambda leaf, sharding: StoredType(leaf.dtype).abstract(leaf.shape, sharding), shapes, where
    )


def constraint(
    mesh: Mesh, rules: Rules
) -> Callable[[jax.Array, tuple[str | None, ...]], jax.Array]:
    """A function that constrains an activation to the sharding that `rules` give to its logical axes."""
    sizes = dict(mesh.shape)
    if math.prod(sizes.values()) == 1:
        return lambda x, axes: x

    def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        spec = partition_spec(axes, x.shape, rules, sizes, "activation")
        return jax.lax.with_sharding_constraint(x, NamedSharding(context_mesh(mesh), spec))

    return constrain


def axes_of(axis: str, rules: Rules, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes of size above 1 that `rules` split a logical axis over."""
    return tuple(a for a in rules[axis] if sizes[a] > 1)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of a value that is whole on every device."""
    return NamedSharding(mesh, P())


def check_divides(
    setting: str, size: int, axis: str, rules: Rules, mesh: Mesh | AbstractMesh
) -> None:
    """Raises UserError if a setting does not divide over the mesh axes of its logical axis."""
    shards = shards_of(axis, rules, mesh)
    if size % shards:
        sizes = dict(mesh.shape)
        split = " x ".join(f"{a}={sizes[a]}" for a in rules[axis] if sizes[a] > 1)
        near = [n for n in (size - size % shards, size - size % shards + shards) if n]
        raise UserError(
            f"{setting}={size} does not divide over {split} ({shards} shards); "
            f"use {' or '.join(map(str, near))}, or change the layout"
        )


def shards_of(axis: str, rules: Rules, mesh: Mesh | AbstractMesh) -> int:
    """The number of parts that `rules` split a logical axis into on `mesh`."""
    sizes = dict(mesh.shape)
    return _product(rules[axis], sizes)


# `pipeline` is a `shard_map` over the stage axes of a mesh; the other axes stay with the compiler. Code
# inside a stage can use these other axes only. Its sharding constraints must not name the stage axes, and a
# nested `shard_map` covers the remaining axes.


def context_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh for sharding constraints. Inside a `shard_map` its manual axes are marked as such."""
    inside = jax.sharding.get_abstract_mesh()
    return mesh if inside.empty else inside


def per_device(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Wraps `function`, which works on the shards of one device, in a `shard_map` over all remaining axes."""
    where = context_mesh(mesh)
    return jax.shard_map(
        function,
        mesh=where,
        axis_names=frozenset(where.axis_names) - frozenset(where.manual_axes),
        in_specs=in_specs,
        out_specs=out_specs,
        # The splash kernel does not work with the check (docs/decoding.md).
        check_vma=False,
    )
