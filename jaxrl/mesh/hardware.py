"""Peak figures of accelerators from their vendors: memory, rates, links, and the shapes that exist.

Rates are dense (no sparsity) and per device as JAX counts devices, at JAX's default precision: matmuls of
float32 arrays run in TF32 on NVIDIA GPUs and in bfloat16 on TPUs. Sources: the data sheets of NVIDIA's A100,
H100, H200 and B200, and Google Cloud's pages of TPU versions, as of 2026. A user can describe another device
in a JSON file; `jaxrl calibrate` writes one for the current machine (`planner/hardware/`). The table is here
and not in the planner, because every training step compares its rate with these peaks (`perf/mfu`).

    links   device --link_gbs--> devices of its domain (a host of GPUs, a slice of a TPU)
            host --host_gbs--> other domains, shared by the devices of the host
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from jaxrl.checks import MAX_COUNT, at_least, check_fields, count, positive
from jaxrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class Roof:
    """Peak rates of one device.

    Attributes:
      bfloat16, float32: TFLOP/s of matmuls.
      memory: memory bandwidth in GB/s.
    """

    bfloat16: float
    float32: float
    memory: float

    def tflops(self, dtype: str) -> float:
        """TFLOP/s of matmuls of a type, "bfloat16" or "float32"."""
        return self.bfloat16 if dtype == "bfloat16" else self.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device and its interconnect. GB are 10^9 bytes; "a device" is one of `jax.devices()`.

    Attributes:
      name: name on command lines.
      device_kinds: prefixes of `jax.Device.device_kind`; a longer prefix before a shorter one that it
        contains.
      arrangement: "hosts" for hosts of GPUs, whose shapes are hosts x devices; "torus" for a TPU slice, whose
        shapes are the side lengths in chips.
      memory_gb: memory of a device.
      bfloat16_tflops, float32_tflops, int8_tops, float8_tflops: matmul rates; 0 if not supported.
      memory_gbs: memory bandwidth of a device, GB/s.
      link_gbs: GB/s that a device sends inside its domain. NVLink counts one direction; ICI counts both
        directions of one side of the torus, as a ring uses both.
      host_gbs: GB/s that a host sends to other domains (InfiniBand, DCN), all its devices together.
      devices_per_host: devices of one host.
      devices_per_chip: 2 if JAX sees two devices in a chip (TPU 7x).
      largest: devices of the largest torus, or of the largest cluster to plan for.
      shapes: small torus shapes that exist; empty for hosts of GPUs.
      side_multiple: larger torus shapes exist if every side is a multiple of it, up to `largest`; 0 for none.
      measured: whether the rates are what programs reached (`jaxrl calibrate`), not a vendor's peaks.
      source: source of the numbers.
    """

    name: str
    device_kinds: tuple[str, ...]
    arrangement: Literal["hosts", "torus"]
    memory_gb: Annotated[float, positive()]
    bfloat16_tflops: Annotated[float, positive()]
    float32_tflops: Annotated[float, positive()]
    int8_tops: Annotated[float, at_least(0)] = 0.0
    float8_tflops: Annotated[float, at_least(0)] = 0.0
    memory_gbs: Annotated[float, positive()]
    link_gbs: Annotated[float, positive()]
    host_gbs: Annotated[float, positive()]
    devices_per_host: Annotated[int, count(1)]
    devices_per_chip: Annotated[int, count(1)] = 1
    largest: Annotated[int, count(1)] = 16_384
    shapes: tuple[tuple[Annotated[int, count(1)], ...], ...] = ()
    side_multiple: Annotated[int, at_least(0, at_most=MAX_COUNT)] = 0
    measured: bool = False
    source: str = ""

    def __post_init__(self):
        check_fields(self)

    @property
    def platform(self) -> str:
        """The platform of its devices, as `jax.Device.platform`."""
        if self.arrangement == "torus":
            return "tpu"
        return "gpu" if any("NVIDIA" in name for name in self.device_kinds) else "cpu"

    @property
    def roof(self) -> Roof:
        """The rates alone."""
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
        """The number of devices of a shape."""
        return math.prod(shape) * self.devices_per_chip

    def exists(self, shape: tuple[int, ...]) -> bool:
        """Whether a cluster or slice of this shape exists."""
        if self.num_devices(shape) > self.largest:
            return False
        if self.arrangement == "hosts":
            hosts, devices = (*shape, 0)[:2] if len(shape) == 2 else (0, 0)
            whole = self.devices_per_host
            return devices == whole or (hosts == 1 and devices in _halves(whole))
        if tuple(sorted(shape)) in {tuple(sorted(s)) for s in self.shapes}:
            return True
        dims, side = len(self.shapes[-1]) if self.shapes else 3, self.side_multiple
        return bool(side) and len(shape) == dims and all(s % side == 0 for s in shape)

    def growing_shapes(self) -> Iterator[tuple[int, ...]]:
        """Existing shapes in order of size; large ones roughly double each time."""
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
            shortest = sides.index(min(sides))
            sides[shortest] *= 2
            shape = tuple(sorted(sides))
            if self.num_devices(shape) > self.largest:
                return
            if self.exists(shape):
                yield shape


def _halves(n: int) -> list[int]:
    """n, n/2, n/4, ... down to the last odd number."""
    found = [n]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4))
_SMALL_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_GOOGLE = "Google Cloud, TPU versions"
_NVIDIA = "NVIDIA data sheet; hosts with one NIC a GPU"


def _tpu(name: str, kinds: tuple[str, ...], *numbers: float, **others: Any) -> Accelerator:
    memory, tflops, int8, memory_gbs, link, host = numbers
    others = {"devices_per_host": 4} | others
    return Accelerator(
        name=name,
        device_kinds=kinds,
        arrangement="torus",
        memory_gb=memory,
        bfloat16_tflops=tflops,
        float32_tflops=tflops,
        int8_tops=int8,
        memory_gbs=memory_gbs,
        link_gbs=link,
        host_gbs=host,
        source=_GOOGLE,
        **others,
    )


def _gpu(name: str, kinds: tuple[str, ...], *numbers: float, float8: float = 0.0) -> Accelerator:
    memory, tflops, tf32, memory_gbs, link, host = numbers
    return Accelerator(
        name=name,
        device_kinds=kinds,
        arrangement="hosts",
        memory_gb=memory,
        bfloat16_tflops=tflops,
        float32_tflops=tf32,
        int8_tops=2 * tflops,
        float8_tflops=float8,
        memory_gbs=memory_gbs,
        link_gbs=link,
        host_gbs=host,
        devices_per_host=8,
        source=_NVIDIA,
    )


# Columns: memory GB, bfloat16, int8 (TPU) or TF32 (GPU), memory GB/s, link GB/s, host GB/s. Entries with a
# longer kind come before those with a prefix of it ("NVIDIA H100 PCIe" before "NVIDIA H100").
ACCELERATORS = {
    entry.name: entry
    for entry in (
        _tpu(
            "v4",
            ("TPU v4",),
            32,
            275,
            275,
            1_228,
            90,
            25,
            shapes=_SMALL_3D,
            side_multiple=4,
            largest=4096,
        ),
        _tpu(
            "v5e",
            ("TPU v5 lite", "TPU v5e"),
            16,
            197,
            394,
            819,
            90,
            12.5,
            shapes=_SMALL_2D,
            largest=256,
        ),
        _tpu(
            "v5p",
            ("TPU v5",),
            95,
            459,
            918,
            2_765,
            180,
            25,
            shapes=_SMALL_3D,
            side_multiple=4,
            largest=6144,
        ),
        _tpu("v6e", ("TPU v6",), 32, 918, 1_836, 1_640, 180, 25, shapes=_SMALL_2D, largest=256),
        # A chip has two devices, each with half of its memory, rates and links.
        _tpu(
            "7x",
            ("TPU7x", "TPU v7"),
            *(96, 1_153, 0, 3_690, 100, 25),
            float8_tflops=2_307,
            shapes=_SMALL_3D,
            side_multiple=4,
            largest=18_432,
            devices_per_host=8,
            devices_per_chip=2,
        ),
        _gpu("a100-40", ("NVIDIA A100-SXM4-40GB",), 40, 312, 156, 1_555, 300, 200),
        _gpu("a100-40-pcie", ("NVIDIA A100-PCIE-40GB",), 40, 312, 156, 1_555, 32, 200),
        _gpu("a100", ("NVIDIA A100",), 80, 312, 156, 2_039, 300, 200),
        _gpu("h100-pcie", ("NVIDIA H100 PCIe",), 80, 756, 378, 2_039, 64, 200, float8=1_513),
        _gpu("h100-nvl", ("NVIDIA H100 NVL",), 94, 835, 417, 3_938, 300, 200, float8=1_671),
        _gpu("h100", ("NVIDIA H100",), 80, 989, 494, 3_352, 450, 400, float8=1_979),
        _gpu("h200-nvl", ("NVIDIA H200 NVL",), 141, 835, 417, 4_800, 450, 200, float8=1_671),
        _gpu("h200", ("NVIDIA H200",), 141, 989, 494, 4_800, 450, 400, float8=1_979),
        _gpu("b200", ("NVIDIA B200",), 180, 2_250, 1_125, 8_000, 900, 400, float8=4_500),
    )
}
_ALIASES = {
    "tpu7x": "7x",
    "v7x": "7x",
    "a100-80": "a100",
    "a100-40g": "a100-40",
    "v5litepod": "v5e",
}


def accelerator(name: str) -> Accelerator:
    """The entry of a device by its name in the table.

    Raises:
      UserError: the name is unknown; the message lists the known ones.
    """
    lowered = name.lower()
    found = ACCELERATORS.get(_ALIASES.get(lowered, lowered))
    if found is None:
        near = difflib.get_close_matches(lowered, ACCELERATORS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"chip {name!r} is not one of {', '.join(ACCELERATORS)}; {hint}"
            "A kind of your own is a JSON file, given by its path (docs/planner.md)"
        )
    return found


def accelerator_of(device_kind: str) -> Accelerator | None:
    """The entry for a `jax.Device.device_kind`; None if the kind is unknown."""
    kind = device_kind.lower()
    entries = ((begin, entry) for entry in ACCELERATORS.values() for begin in entry.device_kinds)
    return next((entry for begin, entry in entries if kind.startswith(begin.lower())), None)


def roof_of(device_kind: str) -> Roof | None:
    """The peak rates for a `jax.Device.device_kind`; None if the kind is unknown."""
    found = accelerator_of(device_kind)
    return None if found is None else found.roof
