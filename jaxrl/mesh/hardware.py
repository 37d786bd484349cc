"""What devices are able to do at most, as their vendors state it: memory, rates, links, shapes that exist.

Rates are dense ones of one device as JAX counts them, at JAX's own precision: products of float32 arrays
are computed in TF32 on NVIDIA GPUs and in bfloat16 on TPUs unless a program asks for more. Sources: the data
sheets of NVIDIA's A100, H100, H200 and B200, and Google Cloud's pages of TPU versions, as of 2026. An entry
of a user's own is a JSON file, which `jaxrl calibrate` writes for the machine at hand (`planner/hardware/`).
A training step compares its rate with these peaks (`perf/mfu`), so the table is below the planner.

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
    """The most that one device can do.

    Attributes:
      bfloat16, float32: TFLOP/s of products.
      memory: GB/s.
    """

    bfloat16: float
    float32: float
    memory: float

    def tflops(self, dtype: str) -> float:
        """TFLOP/s of products of arrays of a type, "bfloat16" or "float32"."""
        return self.bfloat16 if dtype == "bfloat16" else self.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device, and what surrounds it. GB are 10^9 bytes; "a device" is one of `jax.devices()`.

    Attributes:
      name: what commands call it.
      device_kinds: beginnings of `jax.Device.device_kind`, longest first where one begins another.
      arrangement: "hosts" is hosts of GPUs, whose shapes are hosts x devices; "torus" is a slice of a TPU,
        whose shapes are sides in chips.
      memory_gb: of a device.
      bfloat16_tflops, float32_tflops, int8_tops, float8_tflops: of products; 0 is not supported.
      memory_gbs: GB/s between a device and its memory.
      link_gbs: GB/s that a device sends inside its domain: NVLink, one way; ICI, both ways of one side of
        the torus, which is what a ring uses.
      host_gbs: GB/s that a host sends to other domains, of all its devices together: InfiniBand, DCN.
      devices_per_host: that one host drives.
      devices_per_chip: 2 where JAX sees two devices in a chip (TPU 7x).
      largest: devices of the largest domain of a torus, or of the largest cluster that is planned for.
      shapes: those that exist below `side_multiple`'s; hosts of GPUs need none.
      side_multiple: shapes whose sides are all multiples of it exist too, up to `largest`; 0 is none.
      source: where the numbers are from.
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
    source: str = ""

    def __post_init__(self):
        check_fields(self)

    @property
    def roof(self) -> Roof:
        """Its rates alone."""
        return Roof(self.bfloat16_tflops, self.float32_tflops, self.memory_gbs)

    @property
    def links_gbs(self) -> float:
        """GB/s that a device receives inside its domain at most, all its links together."""
        sides = len(self.shapes[-1]) if self.shapes else 3
        return self.link_gbs * (sides if self.arrangement == "torus" else 1)

    @property
    def network_gbs(self) -> float:
        """A device's part of what its host exchanges with other domains, GB/s."""
        return self.host_gbs / self.devices_per_host

    @property
    def domain(self) -> int:
        """Devices among which every link is a fast one."""
        return self.devices_per_host if self.arrangement == "hosts" else self.largest

    def num_devices(self, shape: tuple[int, ...]) -> int:
        """Devices of a shape."""
        return math.prod(shape) * self.devices_per_chip

    def exists(self, shape: tuple[int, ...]) -> bool:
        """Whether such a cluster or slice can be had."""
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
        """Shapes that exist, each of more devices than the one before, about twice as many for large ones."""
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
    """n, n/2, n/4, ... as long as these are whole."""
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


# Memory GB, bfloat16, int8 (TPU) or TF32 (GPU), memory GB/s, link GB/s, host GB/s. Of kinds of which one
# begins another, the longer comes first.
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
        # A chip is two devices, of which each has half of its memory, rates and links.
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
    """The entry of a kind of device by its name in the table.

    Raises:
      UserError: there is none of that name; the known ones are listed.
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
    """The entry of a device, as `jax.Device.device_kind` names it; None of one that is not known."""
    kind = device_kind.lower()
    entries = ((begin, entry) for entry in ACCELERATORS.values() for begin in entry.device_kinds)
    return next((entry for begin, entry in entries if kind.startswith(begin.lower())), None)


def roof_of(device_kind: str) -> Roof | None:
    """The roof of a kind of device, as `jax.Device.device_kind` names it; None of one that is not known."""
    found = accelerator_of(device_kind)
    return None if found is None else found.roof
