"""Combines pools side by side: devices add up, each stage takes as long as its slowest pool (Algorithm 1).

                devices   generation   preparation   training
actor pool         8         10 s           2 s          6 s
critic pool        4          0 s           1 s          9 s
side by side      12         10 s           2 s          9 s      a step: 21 s
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl.planner.search.pareto import pareto_front

# Columns of points.
DEVICES, GENERATION, PREPARATION, TRAINING = range(4)


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Trade-offs of several pools together.

    Attributes:
      points: float64 [K, 4], columns DEVICES, GENERATION, PREPARATION, TRAINING.
      picks: int64 [K, pools], index of each pool's point.
    """

    points: np.ndarray
    picks: np.ndarray

    @staticmethod
    def of_no_pools() -> SideBySide:
        """The start: no devices, no seconds."""
        return SideBySide(np.zeros((1, 4)), np.zeros((1, 0), np.int64))

    def with_pool(
        self,
        pool: np.ndarray,
        *,
        most_devices: int,
        interesting: Callable[[np.ndarray], np.ndarray],
    ) -> SideBySide:
        """Combines each trade-off with each point of another pool, and keeps the Pareto front.

        Args:
          pool: float64 [J, 4], points of the pool.
          most_devices: maximum number of devices of all pools together.
          interesting: mask of the points to keep, from points float64 [..., 4].
        """
        points = np.maximum(self.points[:, None], pool[None])
        points[..., DEVICES] = self.points[:, None, DEVICES] + pool[None, :, DEVICES]
        i, j = np.nonzero((points[..., DEVICES] <= most_devices) & interesting(points))
        kept = pareto_front(points[i, j])
        i, j = i[kept], j[kept]
        return SideBySide(points[i, j], np.concatenate([self.picks[i], j[:, None]], axis=1))

    def best_with(
        self, pool: np.ndarray, *, most_devices: int, below_s: float
    ) -> tuple[float, tuple[int, ...]] | None:
        """(seconds, index of each pool's point) of the fastest step with a last pool.

        None if no step on at most `most_devices` takes less than `below_s` seconds.
        """
        best = None
        for j, point in enumerate(pool):
            seconds = np.maximum(self.points[:, GENERATION:], point[GENERATION:]).sum(axis=1)
            seconds[self.points[:, DEVICES] + point[DEVICES] > most_devices] = np.inf
            i = int(seconds.argmin()) if len(seconds) else -1
            if i >= 0 and seconds[i] < below_s:
                below_s = float(seconds[i])
                best = below_s, (*self.picks[i].tolist(), j)
        return best
