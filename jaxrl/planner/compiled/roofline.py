"""The roofline of programs: predicted lower bounds of their seconds, at the vendors' rates.

A program takes as long as the slowest of its matmuls, its memory reads, and its traffic between devices, as
if these overlapped completely. `expected_step.py` has what is expected instead. Not covered: element-wise
operations, reads and writes of activations, the host, latencies, waiting for the longest sample.
"""

from __future__ import annotations

import dataclasses

from jaxrl.mesh.hardware import Accelerator
from jaxrl.planner.compiled.ahead import CompiledProgram


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

    def times(self, factor: float) -> Seconds:
        """The seconds of `factor` repetitions."""
        return Seconds(factor * self.matmuls, factor * self.memory, factor * self.traffic)

    @property
    def total(self) -> float:
        """Lower bound of the seconds."""
        return max(self.matmuls, self.memory, self.traffic)

    @property
    def bound(self) -> str:
        """Name of the slowest part."""
        each = {"matmuls": self.matmuls, "memory": self.memory, "traffic": self.traffic}
        return max(each, key=lambda name: each[name])


def seconds_of(program: CompiledProgram, kind: Accelerator, dtype: str) -> Seconds:
    """The roofline of a program.

    Args:
      program: program that was compiled for devices of the kind.
      kind: devices, whose rates are used.
      dtype: data type of the matmuls, "float32" or "bfloat16".
    """
    near = sum(t.nbytes for t in program.traffic if not t.across_hosts)
    far = sum(t.nbytes for t in program.traffic if t.across_hosts)
    traffic = near / (kind.links_gbs * 1e9) + far / (kind.network_gbs * 1e9)
    return roofline(
        kind, program.flops, program.reads, traffic, num_devices=program.num_devices, dtype=dtype
    )


def roofline(
    kind: Accelerator,
    flops: float,
    reads: float,
    traffic_s: float = 0.0,
    *,
    num_devices: int,
    dtype: str,
) -> Seconds:
    """The roofline of a program from its operations over all devices and its reads of one device.

    Args:
      kind: devices, whose rates are used.
      flops: operations of matmuls, over all devices.
      reads: bytes that a device reads.
      traffic_s: seconds of traffic between devices; 0 if it is not known.
      num_devices: number of devices of the program's mesh.
      dtype: data type of the matmuls, "float32" or "bfloat16".
    """
    return Seconds(
        matmuls=flops / num_devices / (kind.roof.tflops(dtype) * 1e12),
        memory=reads / (kind.memory_gbs * 1e9),
        traffic=traffic_s,
    )
