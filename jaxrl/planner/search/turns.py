"""The Pareto front of combinations of options, for roles that share devices and take turns.

    reference  2 options \\
    critic     3 options  >  at most 12 combinations; only their Pareto front is kept
    reward     2 options /

Roles are added one after the other. A combination off the front can be dropped: with any later roles, the one
that beats it is at least as good. So the best combination is never lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.planner.search.choice_costs import ChoiceCosts
from jaxrl.planner.search.pareto import pareto_front

# Exchange rates of `quick_turns` between memory and time: seconds of a role per budget of bytes.
_PRICES = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 81)])


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
    def of_no_roles() -> Turns:
        """The start: one combination of no roles, without costs."""
        return Turns(ChoiceCosts.from_rows(np.zeros((1, 4))), np.zeros((1, 0), np.int64))

    def with_role(self, own: ChoiceCosts, *, budget: float, most_s: float) -> Turns:
        """Combines each combination with each option of another role, and keeps the Pareto front.

        Args:
          own: costs of the role's options.
          budget: available bytes per device.
          most_s: maximum seconds of preparation and training.
        """
        pairs = self.costs.in_turn(own)
        i, j = np.nonzero(pairs.fits(budget) & (pairs.passes_s <= most_s))
        kept = pareto_front(pairs[i, j].rows())
        i, j = i[kept], j[kept]
        return Turns(pairs[i, j], np.concatenate([self.options[i], j[:, None]], axis=1))


def quick_turns(roles: Sequence[ChoiceCosts], budget: float) -> Turns:
    """A few good combinations, not always the best: each role takes its cheapest option.

    The cheapest option depends on the exchange rate of memory and time; several rates are tried.

    Args:
      roles: costs of the options of each role.
      budget: available bytes per device.
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
