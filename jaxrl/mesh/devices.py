"""Builds a mesh from a layout: of real devices, of simulated ones, or abstract."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl.checks import between, check_value
from jaxrl.errors import UserError
from jaxrl.mesh.layout import AXES, MAX_SIMULATED_DEVICES, TENSOR_GEN, LayoutConfig, ParallelLayout

# Threads of a simulated device.
_THREADS = 4


def simulate(num_devices: int, *, processes: int = 1) -> None:
    """Simulates `num_devices` CPU devices. Call it before anything asks JAX for a device.

    Args:
      num_devices: number of devices of the run.
      processes: number of processes, which share the devices equally.

    Raises:
      UserError: there are too many devices, or they do not divide over the processes.
    """
    check_value("simulated devices", num_devices, Annotated[int, between(1, MAX_SIMULATED_DEVICES)])
    if num_devices % processes:
        raise UserError(
            f"mesh.simulated_devices={num_devices} does not divide over hosts.num_processes={processes}; "
            f"use a multiple of {processes}"
        )
    # A machine with an accelerator simulates on its CPU, too.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices // processes)
    # XLA has a thread for each core or device. One that waits in a collective blocks its thread, and devices
    # may come to two independent collectives in different orders: then all threads wait.
    os.environ.setdefault("PJRT_NPROC", str(_THREADS * num_devices // processes))
    # For XLA on CPU, OpenBLAS solves the triangular systems of delta nets: one call after the other on
    # threads of its own, while the other devices spin. With one, eight devices take a 260th of the time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def build_mesh(
    layout: ParallelLayout,
    devices: Sequence[Any] | None = None,
    axes: tuple[str, ...] = AXES,
) -> Mesh:
    """The mesh of `layout`, its minor axes on the closest devices.

    Args:
      layout: sizes of all axes.
      devices: devices of the mesh; None for all devices.
      axes: names of the axes, from major to minor.

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
    # One axis for tensor_gen: the order of devices does not depend on its factors.
    merged = dict(zip(axes, sizes, strict=True))
    merged[TENSOR_GEN[0]] = math.prod(merged.pop(axis) for axis in TENSOR_GEN)
    merged = {axis: merged[axis] for axis in axes if axis in merged}
    grid = device_grid(merged, devices).reshape(sizes)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def build_generation_mesh(layout_name: str, *, shard_state: bool = False) -> Mesh:
    """The mesh of a command that generates, over the first devices that its layout needs.

    Args:
      layout_name: "p-t-d", as --mesh has it.
      shard_state: whether replicas share one copy of a training state, for a command that trains too.

    Raises:
      UserError: the layout is malformed, or needs more devices than there are.
    """
    try:
        layout = ParallelLayout.from_config(LayoutConfig(train=layout_name))
        if shard_state:
            layout = dataclasses.replace(layout, fsdp=layout.d)
    except UserError as error:
        raise UserError(str(error).replace("mesh.train=", "--mesh ")) from error
    devices = jax.devices()
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
    # XLA on CPU has few fast kernels for bfloat16.
    return "float32" if platform_of(mesh) == "cpu" else "bfloat16"


def device_grid(sizes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices in the order of a mesh: minor axes on the closest devices, only `data` across TPU slices.

    TPU slices are connected by the data-centre network. Only gradients should travel over it. Hosts of GPUs
    have no such rule: their devices stay in the order given, host after host.

    Args:
      sizes: sizes of the axes, from major to minor; their product is the number of devices.
      devices: JAX devices, or objects with the same attributes.

    Raises:
      UserError: the size of `data` is not a multiple of the number of slices.
    """
    shape = tuple(sizes.values())
    in_order = np.empty(len(devices), object)
    in_order[:] = devices
    if devices[0].platform != "tpu":
        # JAX gives each host of GPUs a slice_index of its own, which says nothing about a TPU's slices.
        return in_order.reshape(shape)
    slice_of = lambda device: getattr(device, "slice_index", 0)  # noqa: E731
    num_slices = len(set(map(slice_of, devices)))
    if sizes["data"] % num_slices:
        raise UserError(
            f"{len(devices)} devices in {num_slices} slices: the data axis of {sizes['data']} does not "
            "divide over them, and no other axis should cross the network between slices; choose a layout in "
            f"which d / (fsdp * expert * context) is a multiple of {num_slices}"
        )
    for number in set(map(slice_of, devices)):
        chips = [device for device in devices if slice_of(device) == number]
        places = np.array([(*chip.coords, chip.core_on_chip) for chip in chips])
        if len(chips) != np.prod(places.max(axis=0) - places.min(axis=0) + 1):
            # JAX's own order needs a box without holes. A pool with a part of every host has holes.
            in_order[:] = sorted(devices, key=slice_of)
            return in_order.reshape(shape)
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across = tuple(num_slices if axis == "data" else 1 for axis in sizes)
    within = tuple(size // slices for size, slices in zip(shape, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def device_of(mesh: Mesh | AbstractMesh) -> Any:
    """The first device of a mesh; None for an abstract mesh."""
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else None


def platform_of(mesh: Mesh | AbstractMesh) -> str | None:
    """The platform of the devices of a mesh, as `jax.Device.platform`; None for an abstract mesh."""
    return getattr(device_of(mesh), "platform", None)


def memory_bytes(device: Any) -> int:
    """Memory of one device in bytes. A CPU device counts an equal share of the machine's memory."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory_bytes() // jax.local_device_count(device.platform)


def host_memory_bytes() -> int:
    """Memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class PeakMemory(NamedTuple):
    """The most memory that was in use so far.

    Attributes:
      num_bytes: bytes of the fullest local device; on CPU bytes of the process, libraries included.
      on_device: whether the devices have memory of their own.
    """

    num_bytes: int
    on_device: bool


def peak_memory() -> PeakMemory:
    """The peak memory of this process so far."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    # Devices on CPU are threads of this process and share its memory.
    return PeakMemory(max(peaks) if peaks else peak_process_bytes(), bool(peaks))


def peak_process_bytes() -> int:
    """The most memory that this process has had so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in kilobytes.
    return peak if sys.platform == "darwin" else peak * 1024


def abstract_mesh(layout: ParallelLayout, axes: tuple[str, ...] = AXES) -> AbstractMesh:
    """A mesh without devices, to compute shapes and shardings for a machine that is not available."""
    sizes = tuple(layout.axis_sizes[axis] for axis in axes)
    return AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
