"""Roles that share devices and take turns: combinations of their options that no other combination beats.

    reference  2 options \\
    critic     3 options  >  at most 12 combinations, of which those on the Pareto front go on
    reward     2 options /

Roles are added one after the other. Whatever a beaten combination could become with the roles that follow,
the combination that beats it becomes something at least as good; so the best is never lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.planner.search.choice_costs import ChoiceCosts
from jaxrl.planner.search.pareto import pareto_front

# Prices of a byte, in seconds of a role per budget, with which `quick_turns` trades memory for time.
_PRICES = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 81)])


@dataclasses.dataclass(frozen=True)
class Turns:
    """Combinations of roles that do not generate.

    Attributes:
      costs: of K combinations.
      options: which option each role takes: int64 [K, roles].
    """

    costs: ChoiceCosts
    options: np.ndarray

    @staticmethod
    def of_nobody() -> Turns:
        """The one combination of no roles, which costs nothing."""
        return Turns(ChoiceCosts.from_rows(np.zeros((1, 4))), np.zeros((1, 0), np.int64))

    def with_role(self, own: ChoiceCosts, *, budget: float, most_s: float) -> Turns:
        """Each combination with each option of a further role, the beaten ones left out.

        Args:
          own: costs of the role's options.
          budget: bytes of a device.
          most_s: seconds that the combination may compute for.
        """
        pairs = self.costs.in_turn(own)
        i, j = np.nonzero(pairs.fits(budget) & (pairs.passes_s <= most_s))
        kept = pareto_front(pairs[i, j].rows())
        i, j = i[kept], j[kept]
        return Turns(pairs[i, j], np.concatenate([self.options[i], j[:, None]], axis=1))


def quick_turns(roles: Sequence[ChoiceCosts], budget: float) -> Turns:
    """A few good combinations, not the best ones: each role alone takes the cheapest of its options.

    What is cheapest depends on what a byte is worth beside a second; several prices are tried.

    Args:
      roles: costs of the options of each role.
      budget: bytes of a device.
    """
    zeros = np.zeros((len(_PRICES), 4))
    found = Turns(ChoiceCosts.from_rows(zeros), np.zeros((len(_PRICES), 0), np.int64))
    for own in roles:
        if not len(own):
            return Turns(found.costs[:0], found.options[:0])
        paid = own.passes_s + _PRICES[:, None] / budget * own.resident * own.passes_s.min()
        picked = paid.argmin(axis=1)
        every = np.arange(len(_PRICES))
        costs = found.costs.in_turn(own)[every, picked]
        found = Turns(costs, np.concatenate([found.options, picked[:, None]], axis=1))
    return found
