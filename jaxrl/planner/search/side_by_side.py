"""Combines pools side by side: devices add up, each stage takes as long as its slowest pool (Algorithm 1).

                devices   generation   preparation   training
actor pool         8         10 s           2 s          6 s
critic pool        4          0 s           1 s          9 s
side by side      12         10 s           2 s          9 s      a step: 21 s
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.planner.search.choice_costs import pareto_front

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


# Rounding in sums of seconds; a choice is ruled out only if it is slower by more.
_SLACK = 1 + 1e-12


class Bounds:
    """Lower and upper bounds of the seconds of a step, by which the search skips what cannot be the best.

    A bound is safe if it never rules out the best mapping. These rest on one fact: roles that share memory
    with the actor leave it no more slots than it has alone, so it never generates faster than alone.

    Attributes:
      best_s: seconds of the fastest known mapping. It only decreases, so excluded choices stay excluded.
    """

    def __init__(self, sizes: Sequence[int], alone_s: Sequence[float]):
        """Nothing is known yet.

        Args:
          sizes: possible numbers of devices of a pool, ascending; the last is the whole cluster.
          alone_s: seconds of the fastest generation of an actor alone, by size; infinite if it does not fit.
        """
        self.best_s = math.inf
        self._sizes = np.array(sizes)
        self._generation_s = np.minimum.accumulate(alone_s)

    def lower(self, seconds: float) -> None:
        """Records that a mapping with this many seconds exists."""
        self.best_s = min(self.best_s, seconds)

    @property
    def below_s(self) -> float:
        """Upper bound: the best mapping takes fewer seconds per step than this."""
        return self.best_s * _SLACK

    @property
    def most_passes_s(self) -> float:
        """Maximum seconds of preparation and training, with any generation."""
        return self.below_s - float(self._generation_s[-1])

    def generation_s(self, devices: np.ndarray) -> np.ndarray:
        """Seconds of the fastest generation on at most `devices`; infinite if the actor does not fit."""
        place = np.searchsorted(self._sizes, devices, side="right") - 1
        return np.where(place >= 0, self._generation_s[np.maximum(place, 0)], np.inf)

    def may_be_best(self, points: np.ndarray) -> np.ndarray:
        """Which pools side by side may be part of a mapping that is faster than the best known.

        Their step takes preparation and training, and generation: theirs, or the fastest on what they leave.

        Args:
          points: float64 [..., 4], as of `SideBySide`.
        """
        left = self._sizes[-1] - points[..., DEVICES]
        here = points[..., GENERATION]
        generation = np.where(here > 0, here, self.generation_s(left))
        return points[..., PREPARATION] + points[..., TRAINING] + generation <= self.below_s
