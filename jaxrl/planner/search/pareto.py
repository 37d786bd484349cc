"""Pareto fronts: the points that no other point beats in every coordinate."""

from __future__ import annotations

import numpy as np


def pareto_front(points: np.ndarray) -> np.ndarray:
    """Indices of the points on the Pareto front: no other point is at most as large in every coordinate.

        points (1, 5), (2, 2), (3, 3), (5, 1)  -->  all but (3, 3), because (2, 2) beats it

    The first of equal points is kept.

    Args:
      points: float64 [K, D].

    Returns:
      int64 [F], by ascending sum of the points, with every coordinate scaled to at most 1.
    """
    scale = np.maximum(np.abs(points).max(axis=0, initial=0), 1e-300)
    order = np.argsort((points / scale).sum(axis=1), kind="stable")
    left, kept = points[order], []
    while len(order):
        # No remaining point beats the point with the smallest sum.
        kept.append(order[0])
        better = (left[1:] < left[0]).any(axis=1)
        left, order = left[1:][better], order[1:][better]
    return np.array(kept, np.int64)
