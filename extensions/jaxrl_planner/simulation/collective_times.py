"""Seconds of ring collectives: latencies of their hops, and bytes over the rate of a link.

    seconds = start + near hops x near + far hops x far + bytes / (share x rate of the link)

A ring over hosts of GPUs goes around in one direction: g - 1 hops for a gather, of which each crossing of
hosts is a far one. A ring of a TPU goes both ways: g / 2 hops. A reduction is a scatter and a gather.

NCCL's trees and NVLink SHARP are not covered. Devices from a file get NCCL's constants, which is a guess for
anything but GPUs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import numpy as np

from jaxrl.mesh.layout import AXES, ParallelLayout
from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.hardware.cluster import Cluster, Ring
from jaxrl_planner.simulation.assumptions import Assumptions

# A number, or an array of numbers of collectives of several sizes.
Bytes = TypeVar("Bytes", float, np.ndarray)


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


# A hop over ICI takes about 1 us, and a ring is used in both directions (How to Scale Your Model,
# jax-ml.github.io/scaling-book, "Sharded Matrices": a note on ICI latency). The start is from one example
# there: an all-gather of 3 hops was measured at 8 us. The next chip of a pool with a part of each host is two
# hops away.
_ICI = (Protocol(5e-6, 1e-6, 2e-6, 1.0),)
# The constants of NCCL's own tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc, `baseLat` and `hwLat`
# of rings, version 2.23). LL sends 4 bytes of flag with each 4 bytes of data, LL128 sends 8 with 120; Simple
# sends data only, and synchronises instead.
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


class Collectives:
    """Collectives on a cluster; `nbytes` is the size of the whole gathered or summed array."""

    def __init__(self, cluster: Cluster, assumptions: Assumptions):
        """Args are the devices with their links, and the assumed fraction of a link's rate."""
        self._cluster = cluster
        self._rate = assumptions.link_rate * 1e9
        self._latency = assumptions.latency_scale
        self._protocols = protocols_of(cluster.accelerator)
        self._rings: dict[tuple[ParallelLayout, tuple[str, ...]], Ring] = {}

    def ring(self, layout: ParallelLayout, *axes: str) -> Ring:
        """The links of the groups of a pool's devices along some axes of its mesh.

        Args:
          layout: layout of the pool, whose mesh has its devices in order.
          axes: names of the axes, from major to minor.
        """
        # The search asks for the same few groups thousands of times.
        key = (layout, axes)
        if key not in self._rings:
            sizes = layout.axis_sizes
            places = np.arange(layout.num_devices).reshape(tuple(sizes.values()))
            last = range(-len(axes), 0)
            places = np.moveaxis(places, [AXES.index(axis) for axis in axes], last)
            members = math.prod(sizes[axis] for axis in axes)
            self._rings[key] = self._cluster.ring(places.reshape(-1, members))
        return self._rings[key]

    def gather_s(self, nbytes: Bytes, ring: Ring, *, calls: float = 1.0) -> Bytes:
        """Seconds of an all-gather or a reduce-scatter: each of g devices sends (g - 1) / g of the bytes.

        Args:
          nbytes: bytes of all calls together.
          ring: g devices and their links.
          calls: number of collectives that the bytes are divided into.
        """
        return self._ring_s(nbytes, ring, calls, rounds=1)

    def reduce_s(self, nbytes: Bytes, ring: Ring, *, calls: float = 1.0) -> Bytes:
        """Seconds of an all-reduce, a reduce-scatter and an all-gather; args as of `gather_s`."""
        return self._ring_s(nbytes, ring, calls, rounds=2)

    def pass_on_s(self, nbytes: float, ring: Ring) -> float:
        """Seconds of sending activations to the next pipeline stage, over the slowest hop of the ring."""
        # In a ring of two a device sends half of the bytes (`_ring_s`); here it sends all.
        hop = Ring(2, int(not ring.far), int(ring.far > 0), ring.gbs)
        return self._ring_s(2 * nbytes, hop, 1.0, rounds=1)

    def _ring_s(self, nbytes: Bytes, ring: Ring, calls: float, *, rounds: int) -> Bytes:
        members = ring.members
        if members == 1:
            return nbytes * 0.0
        near, far = rounds * ring.near, rounds * ring.far
        sent = rounds * nbytes * (members - 1) / members
        rate = ring.gbs * self._rate
        # Of protocols that differ in latency and rate, the fastest for this size.
        found: list[Any] = [
            calls * self._latency * (p.start_s + near * p.near_s + far * p.far_s)
            + sent / (rate * p.share)
            for p in self._protocols
        ]
        # NumPy's minimum of single numbers takes ten times as long.
        return np.minimum.reduce(found) if isinstance(nbytes, np.ndarray) else min(found)
