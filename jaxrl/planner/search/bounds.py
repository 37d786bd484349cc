"""Lower and upper bounds of a step's seconds; the search skips choices that cannot beat the upper bound.

A bound is safe if it never rules out the best mapping. These bounds rest on one fact: roles that share memory
with the actor leave it no more slots than it has alone, so it never generates faster than alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxrl.planner.search.side_by_side import DEVICES, GENERATION, PREPARATION, TRAINING

# Rounding in sums of seconds; a choice is ruled out only if it is slower by more.
_SLACK = 1 + 1e-12


class Bounds:
    """Bounds of the seconds of a step.

    Attributes:
      best_s: seconds of the fastest known mapping. It only decreases, so excluded choices stay excluded.
    """

    def __init__(self, sizes: Sequence[int], alone_s: Sequence[float], *, within: float = 0.0):
        """Nothing is known yet.

        Args:
          sizes: possible numbers of devices of a pool, ascending; the last is the whole cluster.
          alone_s: seconds of the fastest generation of an actor alone, by size; infinite if it does not fit.
          within: keeps mappings that are slower than the best by this share.
        """
        self._slack = _SLACK * (1 + within)
        self.best_s = math.inf
        self._sizes = np.array(sizes)
        self._generation_s = np.minimum.accumulate(alone_s)

    def lower(self, seconds: float) -> None:
        """Records that a mapping with this many seconds exists."""
        self.best_s = min(self.best_s, seconds)

    @property
    def below_s(self) -> float:
        """Upper bound: the best mapping, and all within the share, take fewer seconds per step than this."""
        return self.best_s * self._slack

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
