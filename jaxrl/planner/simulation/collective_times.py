"""Seconds of ring collectives: latencies of their hops, and bytes over the rate of a link.

A ring over hosts of GPUs goes around in one direction: g - 1 hops for a gather, of which each crossing of
hosts is a far one. A ring of a TPU goes both ways: g / 2 hops. A reduction is a scatter and a gather.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.link_latency import protocols_of
from jaxrl.planner.simulation.assumptions import Assumptions

# A number, or an array of numbers of collectives of several sizes.
Bytes = TypeVar("Bytes", float, np.ndarray)


class Collectives:
    """Collectives on a cluster; `nbytes` is the size of the whole gathered or summed array."""

    def __init__(self, cluster: Cluster, assumptions: Assumptions):
        """Args are the devices with their links, and the assumed fraction of a link's rate."""
        self._cluster = cluster
        self._rate = assumptions.link_rate * 1e9
        self._latency = assumptions.latency_scale
        self._protocols = protocols_of(cluster.accelerator)

    def gather_s(self, nbytes: Bytes, members: int, stride: int, *, calls: float = 1.0) -> Bytes:
        """Seconds of an all-gather or a reduce-scatter: each of g devices sends (g - 1) / g of the bytes.

        Args:
          nbytes: bytes of all calls together.
          members: g, number of devices of a group.
          stride: distance in devices between members.
          calls: number of collectives that the bytes are divided into.
        """
        return self._ring_s(nbytes, members, stride, calls, rounds=1)

    def reduce_s(self, nbytes: Bytes, members: int, stride: int, *, calls: float = 1.0) -> Bytes:
        """Seconds of an all-reduce, a reduce-scatter and an all-gather; args as of `gather_s`."""
        return self._ring_s(nbytes, members, stride, calls, rounds=2)

    def pass_on_s(self, nbytes: float, stride: int) -> float:
        """Seconds of sending activations to the next pipeline stage."""
        return self._ring_s(2 * nbytes, 2, stride, 1.0, rounds=1)

    def _ring_s(
        self, nbytes: Bytes, members: int, stride: int, calls: float, *, rounds: int
    ) -> Bytes:
        if members == 1:
            return nbytes * 0.0
        near, far = (rounds * hops for hops in self._hops(members, stride))
        sent = rounds * nbytes * (members - 1) / members
        rate = self._cluster.group_gbs(members, stride) * self._rate
        # Of protocols that differ in latency and rate, the fastest for this size.
        found: list[Any] = [
            calls * self._latency * (p.start_s + near * p.near_s + far * p.far_s)
            + sent / (rate * p.share)
            for p in self._protocols
        ]
        # NumPy's minimum of single numbers takes ten times as long.
        return np.minimum.reduce(found) if isinstance(nbytes, np.ndarray) else min(found)

    def _hops(self, members: int, stride: int) -> tuple[int, int]:
        """Hops of a gather inside a domain, and between hosts."""
        kind = self._cluster.accelerator
        if kind.arrangement == "torus":
            return -(-members // 2), 0
        hosts = -(-members // max(1, kind.devices_per_host // stride))
        return members - hosts, hosts - 1
