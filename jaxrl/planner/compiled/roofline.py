"""Seconds that programs would take at the vendors' rates, which nothing beats. All of it is predicted.

A program takes as long as the slowest of its matmuls, its reads of memory, and its traffic between devices,
as if these overlapped wholly. Real programs take longer: 1.5 to 3 times as long is usual. Not covered:
element-wise work, activations read and written, the host, what waits for the longest sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.hardware.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a program in a step, each as if it were alone.

    Attributes:
      matmuls: of matrices.
      memory: reads.
      traffic: between devices.
    """

    matmuls: float
    memory: float
    traffic: float

    @property
    def total(self) -> float:
        """Seconds at least."""
        return max(self.matmuls, self.memory, self.traffic)

    @property
    def bound(self) -> str:
        """What takes them."""
        each = {"matmuls": self.matmuls, "memory": self.memory, "traffic": self.traffic}
        return max(each, key=lambda name: each[name])


def seconds_of(program: CompiledProgram, topology: Topology, dtype: str) -> Seconds:
    """The roofline of a program.

    Args:
      program: compiled for the topology.
      topology: whose rates count.
      dtype: of the matmuls, "float32" or "bfloat16".
    """
    kind = topology.accelerator
    near = sum(t.nbytes for t in program.traffic if not t.across_hosts)
    far = sum(t.nbytes for t in program.traffic if t.across_hosts)
    return Seconds(
        matmuls=program.flops / program.num_devices / (kind.roof.tflops(dtype) * 1e12),
        memory=program.reads / (kind.memory_gbs * 1e9),
        traffic=near / (kind.links_gbs * 1e9) + far / (kind.network_gbs * 1e9),
    )


def chip_hours(seconds: Iterable[float], num_devices: int, num_steps: int) -> float:
    """Devices times hours of a run whose step takes the sum of `seconds`."""
    return sum(seconds) * num_steps * num_devices / 3600
