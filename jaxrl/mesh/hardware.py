"""What devices are able to do at most, as their vendors state it: the roof that a rate is compared with.

Dense rates of one device as JAX counts them, at JAX's own precision: products of float32 arrays are computed
in TF32 on NVIDIA GPUs and in bfloat16 on TPUs unless a program asks for more. Sources: the data sheets of
NVIDIA's A100, H100, H200 and B200, and Google Cloud's pages of TPU versions, as of 2026.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


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


# By what `device_kind` begins with; the first that fits counts.
_ROOFS = {
    "TPU v4": Roof(275, 275, 1_228),
    "TPU v5 lite": Roof(197, 197, 819),
    "TPU v5e": Roof(197, 197, 819),
    "TPU v5": Roof(459, 459, 2_765),
    "TPU v6": Roof(918, 918, 1_640),
    # A chip is two devices.
    "TPU7x": Roof(1_153, 1_153, 3_690),
    "NVIDIA A100-SXM4-40GB": Roof(312, 156, 1_555),
    "NVIDIA A100-PCIE-40GB": Roof(312, 156, 1_555),
    "NVIDIA A100": Roof(312, 156, 2_039),
    "NVIDIA H100 PCIe": Roof(756, 378, 2_039),
    "NVIDIA H100 NVL": Roof(835, 417, 3_938),
    "NVIDIA H100": Roof(989, 494, 3_352),
    "NVIDIA H200 NVL": Roof(835, 417, 4_800),
    "NVIDIA H200": Roof(989, 494, 4_800),
    "NVIDIA B200": Roof(2_250, 1_125, 8_000),
}


def roof_of(device_kind: str) -> Roof | None:
    """The roof of a kind of device, as `jax.Device.device_kind` names it; None of one that is not known."""
    fits = (roof for name, roof in _ROOFS.items() if device_kind.lower().startswith(name.lower()))
    return next(fits, None)


def measured_roof(dtype: str) -> Roof:
    """The roof of a device that is not in the table: its fastest large product and copy of a few.

    Simulated devices share one processor, and what is measured is all of it.

    Args:
      dtype: of the product, "float32" or "bfloat16"; the other has the same rate here.
    """
    side, copied = 1024, 2**26
    x = jnp.ones((side, side), dtype)
    product_s = _fastest_s(jax.jit(lambda y: x @ y, donate_argnums=0), jnp.ones_like(x))
    # In place: new memory would be paid for page by page.
    add = jax.jit(lambda y: y + 1, donate_argnums=0)
    copy_s = _fastest_s(add, jnp.ones(copied // 4, jnp.float32))
    tflops = 2 * side**3 / product_s / 1e12
    return Roof(tflops, tflops, 2 * copied / copy_s / 1e9)


def _fastest_s(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        x = jax.block_until_ready(function(x))
        times.append(time.perf_counter() - start)
    return min(times)
