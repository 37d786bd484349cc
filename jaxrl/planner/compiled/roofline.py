"""The roofline of programs: predicted lower bounds of their seconds, at the vendors' rates.

A program takes as long as the slowest of its matmuls, its memory reads, and its traffic between devices, as
if these overlapped completely. Real programs usually take 1.5 to 3 times as long. Not covered: element-wise
operations, reads and writes of activations, the host, waiting for the longest sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.hardware.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Predicted seconds of a program in a step, each part as if it ran alone.

    Attributes:
      matmuls: seconds of matmuls.
      memory: seconds of memory reads.
      traffic: seconds of traffic between devices.
    """

    matmuls: float
    memory: float
    traffic: float

    @property
    def total(self) -> float:
        """Lower bound of the seconds."""
        return max(self.matmuls, self.memory, self.traffic)

    @property
    def bound(self) -> str:
        """Name of the slowest part."""
        each = {"matmuls": self.matmuls, "memory": self.memory, "traffic": self.traffic}
        return max(each, key=lambda name: each[name])


def seconds_of(program: CompiledProgram, topology: Topology, dtype: str) -> Seconds:
    """The roofline of a program.

    Args:
      program: program that was compiled for the topology.
      topology: devices, whose rates are used.
      dtype: data type of the matmuls, "float32" or "bfloat16".
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
    """Number of devices times hours of a run whose steps each take the sum of `seconds`."""
    return sum(seconds) * num_steps * num_devices / 3600
