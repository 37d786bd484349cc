"""Meshes of the devices that tests have."""

import functools

import jax
from jax.sharding import Mesh

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout


@functools.cache
def mesh_of(train: str = "1-1-1", generate: str = "", *, first: int = 0, **shares: int) -> Mesh:
    """The mesh of a layout on as many devices as it takes, beginning with number `first`."""
    layout = ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, **shares))
    return build_mesh(layout, jax.devices()[first : first + layout.num_devices])
