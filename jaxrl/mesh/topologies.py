"""Accelerators that are not here, by name: what to compile for, and what one of them has.

    v5p:4x4x8     a TPU slice, by generation and shape; compiled for by the package libtpu
    h100:16x8     16 hosts of 8 GPUs; compiled for by jax's CUDA plugin, without a GPU or a driver

Neither opens a device. Memory and links are the vendors' figures (Google Cloud's pages of TPU versions,
NVIDIA's data sheets of the GPUs and of HGX boards, as of 2026); what devices compute is in `hardware.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl.errors import UserError
from jaxrl.mesh.gpu_targets import GPU_TARGETS

_GIVEN = re.compile(r"([a-z0-9\-]+):(\d{1,4}(?:x\d{1,4}){1,2})")
_MAX_GPUS_PER_HOST = 8
_MAX_DEVICES = 65_536


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device has besides its rates.

    Attributes:
      memory_bytes: of its own.
      link: bytes/s that it receives from its neighbours at most, all links together: of a TPU the torus, of a
        GPU the switch in its host.
      network: bytes/s that it receives from other hosts; of a TPU, from other slices.
    """

    memory_bytes: int
    link: float
    network: float


def _gpu(name: str, link: float, network: float) -> Chip:
    return Chip(GPU_TARGETS[name].memory_bytes, link, network)


# A chip's share of its host's network: 200 Gbit/s of a TPU host of four, or of eight v5e and v6e chips.
_TPU_CHIPS = {
    "v4": Chip(32 * 10**9, 300e9, 6.25e9),
    "v5e": Chip(16 * 10**9, 200e9, 3.1e9),
    "v5p": Chip(95 * 10**9, 600e9, 6.25e9),
    "v6e": Chip(32 * 10**9, 400e9, 6.25e9),
    # Of a chip's two devices each.
    "tpu7x": Chip(96 * 10**9, 300e9, 6.25e9),
}
_GPU_CHIPS = {
    "a100-40g": _gpu("a100-40g", 300e9, 25e9),
    "a100": _gpu("a100", 300e9, 25e9),
    "h100": _gpu("h100", 450e9, 50e9),
    "h200": _gpu("h200", 450e9, 50e9),
    "b200": _gpu("b200", 900e9, 50e9),
}
CHIPS = _TPU_CHIPS | _GPU_CHIPS
# Dimensions of the shapes that a generation's slices have.
_TORUS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for, none of which is here.

    Attributes:
      name: as it was given.
      chip: what each of them has.
      devices: of all hosts.
      devices_per_host: whose links are the fast ones; all of a TPU slice.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    devices_per_host: int

    @property
    def kind(self) -> str:
        """As JAX names a device."""
        return self.devices[0].device_kind

    @property
    def platform(self) -> str:
        """As of `jax.Device.platform`."""
        return self.devices[0].platform


def check_topology(name: str) -> tuple[str, tuple[int, ...]]:
    """Chip and shape of a topology's name; nothing is loaded.

    Raises:
      UserError: no such chip, or no shape of its kind.
    """
    chip, shape = _chip_of(name), _shape_of(name)
    if chip in _TPU_CHIPS and len(shape) != _TORUS[chip]:
        example = {2: f"{chip}:4x4", 3: f"{chip}:4x4x8"}[_TORUS[chip]]
        raise UserError(
            f"topology {name!r}: slices of {chip} have {_TORUS[chip]} dimensions, this has {len(shape)}; "
            f"write it like {example}"
        )
    if chip in _TPU_CHIPS and not _is_slice(chip, shape):
        rule = (
            "whole cubes of 4x4x4, or 1x1x1, 2x2x1, 2x2x2, 2x2x4 and 2x4x4"
            if _TORUS[chip] == 3
            else "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16 and 16x16"
        )
        raise UserError(f"topology {name!r} does not exist; slices of {chip} are {rule}")
    if chip in _GPU_CHIPS and (len(shape) != 2 or shape[1] > _MAX_GPUS_PER_HOST):
        raise UserError(
            f"topology {name!r}: GPUs are named by hosts and GPUs of a host, at most "
            f"{_MAX_GPUS_PER_HOST} of these; write it like {chip}:16x8"
        )
    return chip, shape


def _is_slice(chip: str, shape: tuple[int, ...]) -> bool:
    if _TORUS[chip] == 2:
        return shape in ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    small = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    return shape in small or not any(n % 4 for n in shape)


def _chip_of(name: str) -> str:
    chip = name.partition(":")[0]
    if chip not in CHIPS:
        near = difflib.get_close_matches(chip, CHIPS, n=2)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"topology {name!r}: no chip {chip!r} is known; {meant}Use one of {', '.join(CHIPS)}"
        )
    return chip


def _shape_of(name: str) -> tuple[int, ...]:
    match = _GIVEN.fullmatch(name)
    shape = tuple(map(int, match[2].split("x"))) if match else ()
    if not shape or not 0 < math.prod(shape) <= _MAX_DEVICES:
        raise UserError(
            f"topology {name!r} is not CHIP:SHAPE with 1 to {_MAX_DEVICES:,} devices; write v5p:4x4x8 for a "
            "TPU slice, or h100:16x8 for hosts of GPUs"
        )
    return shape


def read_topology(name: str) -> Topology:
    """The devices of a name such as "v5p:4x4x8" or "h100:16x8", to compile for.

    Raises:
      UserError: it is none, or the package that compiles for it is not installed.
    """
    chip, shape = check_topology(name)
    if chip in _TPU_CHIPS:
        devices = tuple(_tpu_devices(name))
        return Topology(name, CHIPS[chip], devices, len(devices))
    return Topology(name, CHIPS[chip], tuple(_gpu_devices(chip, shape)), shape[1])


def topology_devices(name: str) -> Sequence[Any]:
    """The devices of `read_topology`."""
    return read_topology(name).devices


def _tpu_devices(name: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"compiling for {name} needs the package libtpu, which is not installed; run "
            "pip install 'jaxrl[aot]'"
        )
    # Without these libtpu looks for the metadata of a real TPU host, and complains that there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    # No TPU is opened, so a lock on it, or one that a killed process left behind, is no hindrance.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"topology {name!r} cannot be compiled for ({reason}); name a slice that exists, for example "
            "v5p:4x4x8 or v6e:4x4, or update libtpu: pip install -U 'jaxrl[aot]'"
        ) from error


def _gpu_devices(chip: str, shape: tuple[int, ...]) -> Sequence[Any]:
    missing = [name for name in ("jax_plugins.xla_cuda13", "nvidia.cudnn") if not _is_there(name)]
    if missing:
        version = jax.__version__
        raise UserError(
            f"compiling for {chip} needs jax's CUDA plugin and cuDNN (no GPU, driver or toolkit), of which "
            f"{' and '.join(missing)} is missing; run pip install --no-deps jax-cuda13-plugin=={version} "
            f"jax-cuda13-pjrt=={version} nvidia-cudnn-cu13"
        )
    hosts, per_host = shape
    return topologies.get_topology_desc(
        platform="cuda", target_config=GPU_TARGETS[chip].text(), topology=f"1x{hosts}x{per_host}"
    ).devices


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
