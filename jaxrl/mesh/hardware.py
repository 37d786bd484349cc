"""Peak rates of accelerators from their vendors, by which a training step divides its own (`perf/mfu`).

Rates are dense (no sparsity) and per device as JAX counts devices, at JAX's default precision: matmuls of
float32 arrays run in TF32 on NVIDIA GPUs and in bfloat16 on TPUs. `chips.toml` has them with their sources.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib


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


FIGURES = tomllib.loads(pathlib.Path(__file__).with_name("chips.toml").read_text("utf-8"))
"""The table of accelerators; the planner reads memory, links and shapes from it."""

CHIPS = {name: (chip["kinds"], Roof(*chip["rates"])) for name, chip in FIGURES["chips"].items()}
"""Prefixes of `jax.Device.device_kind` and rates of each kind, by name."""


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
