"""`shard_map` inside and outside of a pipeline stage.

`pipeline` is a `shard_map` over the stage axes of a mesh; the other axes stay with the compiler. Code inside
a stage can use these other axes only. Its sharding constraints must not name the stage axes, and a nested
`shard_map` covers the remaining axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh


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
        check_vma=False,
    )
