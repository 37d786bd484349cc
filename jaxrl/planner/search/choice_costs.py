"""Costs of choices, their Pareto front, and the front of combinations of roles that take turns.

    reference  2 options \\
    critic     3 options  >  at most 12 combinations; only their Pareto front is kept
    reward     2 options /

Roles are added one after the other. A combination off the front can be dropped: with any later roles, the one
that beats it is at least as good. So the best combination is never lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# Exchange rates of `quick_turns` between memory and time: seconds of a role per budget of bytes.
_PRICES = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 81)])


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


@dataclasses.dataclass(frozen=True)
class ChoiceCosts:
    """Costs of choices for one role, or for several roles that use the same devices one after the other.

    Attributes:
      rows: float64 [..., 4]: resident bytes, which stay from step to step; transient bytes while a task runs;
        seconds of preparation and of training.
    """

    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> ChoiceCosts:
        return ChoiceCosts(self.rows[index])

    @property
    def resident(self) -> np.ndarray:
        """Bytes that stay from step to step."""
        return self.rows[..., 0]

    @property
    def passes_s(self) -> np.ndarray:
        """Seconds of preparation and training."""
        return self.rows[..., 2] + self.rows[..., 3]

    def fits(self, budget: float) -> np.ndarray:
        """Which choices fit into this many bytes per device."""
        return self.rows[..., 0] + self.rows[..., 1] <= budget

    def in_turn(self, others: ChoiceCosts) -> ChoiceCosts:
        """Combines each choice here with each of `others` on the same devices, [K, J].

        Resident bytes add up. Tasks run one at a time, so only the larger transient counts. Seconds add up.

            resident 6 + 5 = 11 GB   transient max(2, 3) = 3 GB   training 4 + 2 = 6 s
        """
        a, b = self.rows[:, None], others.rows[None]
        rows = a + b
        rows[..., 1] = np.maximum(a[..., 1], b[..., 1])
        return ChoiceCosts(rows)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Combinations of roles that do not generate.

    Attributes:
      costs: costs of K combinations.
      options: int64 [K, roles], index of each role's option.
    """

    costs: ChoiceCosts
    options: np.ndarray

    @staticmethod
    def of_no_roles(count: int = 1) -> Turns:
        """The start: combinations of no roles, without costs."""
        return Turns(ChoiceCosts(np.zeros((count, 4))), np.zeros((count, 0), np.int64))

    def with_role(self, own: ChoiceCosts, *, budget: float, most_s: float) -> Turns:
        """Combines each combination with each option of another role, and keeps the Pareto front.

        Args:
          own: costs of the role's options.
          budget: available bytes per device.
          most_s: maximum seconds of preparation and training.
        """
        pairs = self.costs.in_turn(own)
        i, j = np.nonzero(pairs.fits(budget) & (pairs.passes_s <= most_s))
        kept = pareto_front(pairs.rows[i, j])
        return self._picked(pairs, i[kept], j[kept])

    def _picked(self, pairs: ChoiceCosts, i: np.ndarray, j: np.ndarray) -> Turns:
        return Turns(pairs[i, j], np.concatenate([self.options[i], j[:, None]], axis=1))

    @staticmethod
    def quick(roles: Sequence[ChoiceCosts], budget: float) -> Turns:
        """A few good combinations, not always the best: each role takes its cheapest option.

        The cheapest option depends on the exchange rate of memory and time; several rates are tried.

        Args:
          roles: costs of the options of each role.
          budget: available bytes per device.
        """
        every = np.arange(len(_PRICES))
        found = Turns.of_no_roles(len(every))
        for own in roles:
            if not len(own):
                return Turns(found.costs[:0], found.options[:0])
            paid = own.passes_s + _PRICES[:, None] / budget * own.resident * own.passes_s.min()
            found = found._picked(found.costs.in_turn(own), every, paid.argmin(axis=1))
        return found
