"""Kinds of accelerators: memory, rates, links, and the shapes that exist.

The figures are in `mesh/chips.toml`. A user can describe another
device in a JSON file with the fields of `Accelerator`, and name it by its path:

    {"name": "mine", "platform": "gpu", "arrangement": "hosts", "memory_gb": 48, "bfloat16_tflops": 362,
     "float32_tflops": 183, "memory_gbs": 864, "link_gbs": 32, "host_gbs": 50, "devices_per_host": 8}

    links   device --link_gbs--> devices of its domain (a host of GPUs, a slice of a TPU)
            host --host_gbs--> other domains, shared by the devices of the host
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from jaxrl.checks import NAME, count, positive, settings
from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.mesh.hardware import FIGURES, Roof, chip_of


@settings
class Accelerator:
    """A kind of device and its interconnect. GB are 10^9 bytes; "a device" is one of `jax.devices()`.

    Attributes:
      name: name on command lines.
      platform: platform of its devices, as `jax.Device.platform`.
      arrangement: "hosts" for hosts of GPUs, whose shapes are hosts x devices; "torus" for a TPU slice, whose
        shapes are the side lengths in chips.
      memory_gb: memory of a device.
      bfloat16_tflops, float32_tflops: matmul rates.
      memory_gbs: memory bandwidth of a device, GB/s.
      link_gbs: GB/s that a device sends inside its domain. NVLink counts one direction; ICI counts both
        directions of one side of the torus, as a ring uses both.
      host_gbs: GB/s that a host sends to other domains (InfiniBand, DCN), all its devices together.
      devices_per_host: devices of one host.
      devices_per_chip: 2 if JAX sees two devices in a chip (TPU 7x).
      largest: devices of the largest torus, or of the largest cluster to plan for.
      shapes: small torus shapes that exist; empty for hosts of GPUs.
      side_multiple: larger torus shapes exist if every side is a multiple of it, up to `largest`; 0 for none.
      measured: whether the rates are what programs reached, not a vendor's peaks.
    """

    name: Annotated[str, NAME]
    memory_gb: Annotated[float, positive()]
    bfloat16_tflops: Annotated[float, positive()]
    float32_tflops: Annotated[float, positive()]
    memory_gbs: Annotated[float, positive()]
    link_gbs: Annotated[float, positive()]
    host_gbs: Annotated[float, positive()]
    devices_per_host: Annotated[int, count(1)]
    platform: Literal["tpu", "gpu", "cpu"] = "gpu"
    arrangement: Literal["hosts", "torus"] = "hosts"
    devices_per_chip: Annotated[int, count(1)] = 1
    largest: Annotated[int, count(1)] = 16_384
    shapes: tuple[tuple[Annotated[int, count(1)], ...], ...] = ()
    side_multiple: Annotated[int, count(0)] = 0
    measured: bool = False

    @property
    def roof(self) -> Roof:
        return Roof(self.bfloat16_tflops, self.float32_tflops, self.memory_gbs)

    @property
    def links_gbs(self) -> float:
        """Peak GB/s that a device receives inside its domain, all links together."""
        sides = len(self.shapes[-1]) if self.shapes else 3
        return self.link_gbs * (sides if self.arrangement == "torus" else 1)

    @property
    def network_gbs(self) -> float:
        """A device's share of its host's bandwidth to other domains, GB/s."""
        return self.host_gbs / self.devices_per_host

    @property
    def domain(self) -> int:
        """The number of devices that are connected by fast links."""
        return self.devices_per_host if self.arrangement == "hosts" else self.largest

    def num_devices(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.devices_per_chip

    def exists(self, shape: tuple[int, ...]) -> bool:
        if self.num_devices(shape) > self.largest:
            return False
        if self.arrangement == "hosts":
            hosts, devices = (*shape, 0)[:2] if len(shape) == 2 else (0, 0)
            whole = self.devices_per_host
            return devices == whole or (hosts == 1 and devices in _halves(whole))
        # A slice can be turned: 4x4x8 and 8x4x4 are one.
        if tuple(sorted(shape)) in {tuple(sorted(s)) for s in self.shapes}:
            return True
        dims, side = len(self.shapes[-1]) if self.shapes else 3, self.side_multiple
        return bool(side) and len(shape) == dims and all(s % side == 0 for s in shape)

    def growing_shapes(self) -> Iterator[tuple[int, ...]]:
        """Existing shapes in order of size; large slices roughly double, large clusters grow by an eighth."""
        if self.arrangement == "hosts":
            yield from ((1, n) for n in reversed(_halves(self.devices_per_host)))
            hosts = 2
            while hosts * self.devices_per_host <= self.largest:
                yield (hosts, self.devices_per_host)
                hosts += 1 if hosts < 16 else hosts // 8
            return
        found = sorted(self.shapes, key=math.prod)
        yield from found
        sides = list(found[-1]) if found else [self.side_multiple] * 3
        while self.side_multiple:
            # So that slices stay close to cubes.
            shortest = sides.index(min(sides))
            sides[shortest] *= 2
            shape = tuple(sorted(sides))
            if self.num_devices(shape) > self.largest:
                return
            if self.exists(shape):
                yield shape


def _halves(n: int) -> list[int]:
    # n, n/2, n/4, ... down to the last odd number.
    found = [n]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


def _entry(name: str, chip: dict[str, Any]) -> Accelerator:
    # An entry of `chips.toml`, which has the rates and sizes as lists.
    bfloat16, float32, memory_gbs = chip["rates"]
    memory_gb, link_gbs, host_gbs = chip["sizes"]
    fields = FIGURES["families"][chip["family"]] | chip
    names = {field.name for field in dataclasses.fields(Accelerator)}
    others: Any = {key: fields[key] for key in fields.keys() & names}
    return Accelerator(
        name=name,
        bfloat16_tflops=bfloat16,
        float32_tflops=float32,
        memory_gbs=memory_gbs,
        memory_gb=memory_gb,
        link_gbs=link_gbs,
        host_gbs=host_gbs,
        **others,
    )


ACCELERATORS = {name: _entry(name, chip) for name, chip in FIGURES["chips"].items()}
_ALIASES = {
    "tpu7x": "7x",
    "v7x": "7x",
    "a100-80": "a100",
    "a100-40g": "a100-40",
    "v5litepod": "v5e",
}


def accelerator(name_or_path: str) -> Accelerator:
    """Finds an entry by its name in the table, or reads it from a JSON file.

    Args:
      name_or_path: name of an entry, or path that ends in .json.

    Raises:
      UserError: the name is unknown, or the file is not an entry.
    """
    lowered = name_or_path.lower()
    if lowered.endswith(".json"):
        try:
            values: Any = read_json_object(name_or_path, absent="give its path")
            return Accelerator(**values)
        except (ValueError, TypeError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Accelerator))
            raise UserError(
                f"{name_or_path} describes no accelerator ({error}); its fields are {fields} "
                "(docs/planning.md)"
            ) from error
    found = ACCELERATORS.get(_ALIASES.get(lowered, lowered))
    if found is None:
        near = difflib.get_close_matches(lowered, ACCELERATORS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"chip {name_or_path!r} is not one of {', '.join(ACCELERATORS)}; {hint}"
            "A kind of your own is a JSON file, given by its path (docs/planning.md)"
        )
    return found


def accelerator_of(device_kind: str) -> Accelerator | None:
    """The entry for a `jax.Device.device_kind`; None if the kind is unknown."""
    name = chip_of(device_kind)
    return None if name is None else ACCELERATORS[name]
