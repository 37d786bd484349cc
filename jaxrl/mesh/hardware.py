"""Peak rates of accelerators from their vendors, by which a training step divides its own (`perf/mfu`).

Rates are dense (no sparsity) and per device as JAX counts devices, at JAX's default precision: matmuls of
float32 arrays run in TF32 on NVIDIA GPUs and in bfloat16 on TPUs. Sources: the data sheets of NVIDIA's A100,
H100, H200 and B200, and Google Cloud's pages of TPU versions, as of 2026. The planner adds memory, links and
shapes to these (`planner/hardware/accelerators.py`).
"""

from __future__ import annotations

import dataclasses


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


# Name, prefixes of `jax.Device.device_kind`, and rates. A longer kind comes before one that it contains
# ("NVIDIA H100 PCIe" before "NVIDIA H100"). A chip of 7x has two devices, each with half of its rates.
CHIPS: dict[str, tuple[tuple[str, ...], Roof]] = {
    "v4": (("TPU v4",), Roof(275, 275, 1_228)),
    "v5e": (("TPU v5 lite", "TPU v5e"), Roof(197, 197, 819)),
    "v5p": (("TPU v5",), Roof(459, 459, 2_765)),
    "v6e": (("TPU v6",), Roof(918, 918, 1_640)),
    "7x": (("TPU7x", "TPU v7"), Roof(1_153, 1_153, 3_690)),
    "a100-40": (("NVIDIA A100-SXM4-40GB",), Roof(312, 156, 1_555)),
    "a100-40-pcie": (("NVIDIA A100-PCIE-40GB",), Roof(312, 156, 1_555)),
    "a100": (("NVIDIA A100",), Roof(312, 156, 2_039)),
    "h100-pcie": (("NVIDIA H100 PCIe",), Roof(756, 378, 2_039)),
    "h100-nvl": (("NVIDIA H100 NVL",), Roof(835, 417, 3_938)),
    "h100": (("NVIDIA H100",), Roof(989, 494, 3_352)),
    "h200-nvl": (("NVIDIA H200 NVL",), Roof(835, 417, 4_800)),
    "h200": (("NVIDIA H200",), Roof(989, 494, 4_800)),
    "b200": (("NVIDIA B200",), Roof(2_250, 1_125, 8_000)),
}


def chip_of(device_kind: str) -> str | None:
    """The name of a `jax.Device.device_kind`; None if the kind is unknown."""
    kind = device_kind.lower()
    return next(
        (name for name, (kinds, _) in CHIPS.items() for k in kinds if kind.startswith(k.lower())),
        None,
    )


def roof_of(device_kind: str) -> Roof | None:
    """The peak rates for a `jax.Device.device_kind`; None if the kind is unknown."""
    name = chip_of(device_kind)
    return None if name is None else CHIPS[name][1]
