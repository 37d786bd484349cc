"""From a layout to a mesh of devices: real ones, simulated ones, or only their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl.checks import between, check_value
from jaxrl.errors import UserError
from jaxrl.mesh.layout import AXES, MAX_SIMULATED_DEVICES, LayoutConfig, ParallelLayout


def simulate(num_devices: int, *, processes: int = 1) -> None:
    """Makes a run see `num_devices` CPU devices. Call before anything asks JAX for a device.

    Args:
      num_devices: of the run.
      processes: how many of them share the devices equally.

    Raises:
      UserError: they cannot, or are too many.
    """
    check_value("simulated devices", num_devices, Annotated[int, between(1, MAX_SIMULATED_DEVICES)])
    if num_devices % processes:
        raise UserError(
            f"mesh.simulated_devices={num_devices} does not divide over hosts.num_processes={processes}; "
            f"use a multiple of {processes}"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices // processes)


def build_mesh(
    layout: ParallelLayout,
    devices: Sequence[Any] | None = None,
    axes: tuple[str, ...] = AXES,
) -> Mesh:
    """The mesh of `layout`, its minor axes on the closest devices.

    Args:
      layout: sizes of all axes.
      devices: which devices to use; all of them by default.
      axes: the axes, from major to minor.

    Raises:
      UserError: the layout does not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = tuple(layout.axis_sizes[axis] for axis in axes)
    if layout.num_devices != len(devices):
        raise UserError(
            f"layout {layout.name} needs {layout.num_devices} devices (p*t*d), this run has {len(devices)} "
            f"({devices[0].device_kind}); change mesh.train, or set mesh.simulated_devices="
            f"{layout.num_devices} to try it on CPU"
        )
    grid = device_grid(dict(zip(axes, sizes, strict=True)), devices)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def build_generation_mesh(layout_name: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a command that only generates, over the first devices that its layout needs.

    Args:
      layout_name: "p-t-d", as --mesh has it.
      devices: the devices; all by default.

    Raises:
      UserError: the layout is malformed, or needs more devices than there are.
    """
    try:
        layout = ParallelLayout.from_config(LayoutConfig(train=layout_name))
    except UserError as error:
        raise UserError(str(error).replace("mesh.train=", "--mesh ")) from error
    devices = jax.devices() if devices is None else devices
    if layout.num_devices > len(devices):
        raise UserError(
            f"--mesh {layout_name} needs {layout.num_devices} devices, here are {len(devices)} "
            f"({devices[0].device_kind}); choose a smaller one"
        )
    return build_mesh(layout, devices[: layout.num_devices])


def dtype_on(mesh: Mesh, asked: str) -> str:
    """The dtype of weights and activations: as asked, and for "auto" the fast one on a mesh."""
    if asked != "auto":
        return asked
    return "float32" if platform_of(mesh) == "cpu" else "bfloat16"


def device_grid(sizes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices in the order of a mesh: minor axes on the closest ones, `data` alone across slices.

    Slices of TPUs are joined by the data-centre network, over which only gradients should travel.

    Args:
      sizes: of the axes, from major to minor; their product is the number of devices.
      devices: real ones, or anything with their attributes.

    Raises:
      UserError: `data` is no multiple of the number of slices.
    """
    shape = tuple(sizes.values())
    if devices[0].platform == "cpu":
        # Neighbouring ids, so that groups come out as in the paper's figures.
        return np.array(devices).reshape(shape)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if sizes["data"] % num_slices:
        raise UserError(
            f"{len(devices)} devices in {num_slices} slices: the data axis of {sizes['data']} does not "
            "divide over them, and no other axis should cross the network between slices; choose a layout in "
            f"which d / (fsdp * expert * context) is a multiple of {num_slices}"
        )
    across = tuple(num_slices if axis == "data" else 1 for axis in sizes)
    within = tuple(size // slices for size, slices in zip(shape, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def platform_of(mesh: Mesh | AbstractMesh) -> str | None:
    """The kind of a mesh's devices, as `jax.Device.platform`; None if it has none."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None


def memory_bytes(device: Any) -> int:
    """Memory of one device; of a CPU, simulated or not, its share of the machine's."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // jax.local_device_count(device.platform)


def abstract_mesh(layout: ParallelLayout, axes: tuple[str, ...] = AXES) -> AbstractMesh:
    """A mesh without devices, to compute shapes and shardings of a machine that is not here."""
    sizes = tuple(layout.axis_sizes[axis] for axis in axes)
    return AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
