"""Latencies of collectives: a fixed part (alpha) for each start and each hop, by kind of device.

    seconds = start + near hops x near + far hops x far + bytes / (share x rate of the link)

GPUs: the constants of NCCL's own tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc, `baseLat` and
`hwLat` of rings, version 2.23). NCCL has three protocols and takes the fastest. LL sends 4 bytes of flag with
each 4 bytes of data, LL128 sends 8 with 120; Simple sends data only, and synchronises instead. NCCL's trees
and NVLink SHARP are not covered.

TPUs: a hop over ICI takes about 1 us, and a ring is used in both directions (How to Scale Your Model,
jax-ml.github.io/scaling-book, "Sharded Matrices": a note on ICI latency). The start is from one example
there: an all-gather of 3 hops was measured at 8 us.

Devices from a file get NCCL's constants, which is a guess for anything but GPUs.
"""

from __future__ import annotations

import dataclasses

from jaxrl.mesh.hardware import Accelerator


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One way to send the data of a collective.

    Attributes:
      start_s: seconds of a collective before its first hop.
      near_s: seconds of a hop inside a domain of fast links.
      far_s: seconds of a hop between hosts of GPUs, or past the chips of another pool.
      share: share of the link's rate that data gets; the rest is flags.
    """

    start_s: float
    near_s: float
    far_s: float
    share: float


# The next chip of a pool with a part of each host is two hops away.
_ICI = (Protocol(5e-6, 1e-6, 2e-6, 1.0),)
_NVLINK = (
    Protocol(6.6e-6, 0.6e-6, 2.7e-6, 1 / 2),  # LL
    Protocol(14.0e-6, 1.9e-6, 4.0e-6, 120 / 128),  # LL128
    Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0),  # Simple
)
_PCIE = (
    Protocol(6.6e-6, 1.0e-6, 2.7e-6, 1 / 2),
    Protocol(14.0e-6, 2.5e-6, 4.0e-6, 120 / 128),
    Protocol(8.4e-6, 5.7e-6, 14.0e-6, 1.0),
)
# PCIe 5.0 x16 has 64 GB/s in a direction, the slowest NVLink of the table 300.
_PCIE_GBS = 64.0


def protocols_of(kind: Accelerator) -> tuple[Protocol, ...]:
    """The protocols among which a collective takes the fastest."""
    if kind.arrangement == "torus":
        return _ICI
    return _PCIE if kind.link_gbs <= _PCIE_GBS else _NVLINK
