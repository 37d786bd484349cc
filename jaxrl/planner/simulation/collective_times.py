"""Seconds of ring collectives: bytes that a device sends, divided by the rate of its link."""

from __future__ import annotations

from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions


class Collectives:
    """Collectives on a cluster; `nbytes` is the size of the whole gathered or summed array."""

    def __init__(self, cluster: Cluster, assumptions: Assumptions):
        """Args are the devices with their links, and the assumed fraction of a link's rate."""
        self._cluster = cluster
        self._rate = assumptions.link_rate * 1e9
        self._latency_s = assumptions.collective_latency_s

    def gather_s(self, nbytes: float, members: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter: each of g devices sends (g - 1) / g of the bytes."""
        if members == 1:
            return 0.0
        gbs = self._cluster.group_gbs(members, stride)
        return nbytes * (members - 1) / members / (gbs * self._rate)

    def reduce_s(self, nbytes: float, members: int, stride: int) -> float:
        """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(nbytes, members, stride)

    def layer_reduce_s(self, nbytes: float, members: int, stride: int) -> float:
        """Seconds of an all-reduce inside a layer, with its latency, which counts for small arrays."""
        if members == 1:
            return 0.0
        return self._latency_s + self.reduce_s(nbytes, members, stride)

    def pass_on_s(self, nbytes: float, stride: int) -> float:
        """Seconds of sending activations to the next pipeline stage."""
        gbs = self._cluster.group_gbs(2, stride)
        return self._latency_s + nbytes / (gbs * self._rate)
