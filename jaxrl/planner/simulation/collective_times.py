"""Seconds of the collectives of one axis, by the ring: what a device sends, over what its link carries."""

from __future__ import annotations

from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions


class Collectives:
    """Collectives of a cluster; bytes are those of the whole array that a group has at the end or sums."""

    def __init__(self, cluster: Cluster, assumptions: Assumptions):
        """Args: which links there are, and what share of them is reached."""
        self._cluster = cluster
        self._rate = assumptions.link_rate * 1e9
        self._latency_s = assumptions.collective_latency_s

    def gather_s(self, nbytes: float, members: int, stride: int) -> float:
        """An all-gather or a reduce-scatter: (g - 1) / g of the bytes pass each device."""
        if members == 1:
            return 0.0
        gbs = self._cluster.group_gbs(members, stride)
        return nbytes * (members - 1) / members / (gbs * self._rate)

    def reduce_s(self, nbytes: float, members: int, stride: int) -> float:
        """An all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(nbytes, members, stride)

    def layer_reduce_s(self, nbytes: float, members: int, stride: int) -> float:
        """An all-reduce inside a layer, which is small enough for its latency to count."""
        if members == 1:
            return 0.0
        return self._latency_s + self.reduce_s(nbytes, members, stride)

    def pass_on_s(self, nbytes: float, stride: int) -> float:
        """From a pipeline stage to the next."""
        gbs = self._cluster.group_gbs(2, stride)
        return self._latency_s + nbytes / (gbs * self._rate)
