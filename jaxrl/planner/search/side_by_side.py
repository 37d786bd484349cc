"""Pools side by side: their devices add up, and each stage lasts as long as the slowest pool (Algorithm 1).

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
    """Trade-offs of some pools together.

    Attributes:
      points: float64 [K, 4], columns DEVICES, GENERATION, PREPARATION, TRAINING.
      picks: which point of each pool makes them: int64 [K, pools].
    """

    points: np.ndarray
    picks: np.ndarray

    @staticmethod
    def of_no_pools() -> SideBySide:
        """No devices and no seconds."""
        return SideBySide(np.zeros((1, 4)), np.zeros((1, 0), np.int64))

    def with_pool(
        self,
        pool: np.ndarray,
        *,
        most_devices: int,
        interesting: Callable[[np.ndarray], np.ndarray],
    ) -> SideBySide:
        """Each trade-off beside each point of a further pool, the beaten ones left out.

        Args:
          pool: points of the pool: float64 [J, 4].
          most_devices: that all of them may have together.
          interesting: which of some points, float64 [..., 4], are worth keeping.
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
        """(seconds of a step, which point of each pool) of the fastest step with a last pool.

        None if none on so many devices takes less than `below_s`.
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
