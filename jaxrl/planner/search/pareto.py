"""Pareto fronts: the points that no other point beats in every coordinate; a search keeps only these."""

from __future__ import annotations

import numpy as np


def pareto_front(points: np.ndarray) -> np.ndarray:
    """Indices of the points that no other one is at least as good as, in every coordinate; less is better.

        points (1, 5), (2, 2), (3, 3), (5, 1)  -->  all but (3, 3), which (2, 2) beats

    Of equal points the first stays.

    Args:
      points: float64 [K, D].

    Returns:
      int64 [F], in the order of the points' sums, scaled so that no coordinate outweighs the others.
    """
    scale = np.maximum(np.abs(points).max(axis=0, initial=0), 1e-300)
    order = np.argsort((points / scale).sum(axis=1), kind="stable")
    left, kept = points[order], []
    while len(order):
        # None of what is left can be better than the one of the least sum.
        kept.append(order[0])
        better = (left[1:] < left[0]).any(axis=1)
        left, order = left[1:][better], order[1:][better]
    return np.array(kept, np.int64)
