"""A curriculum: draws problems that are sometimes solved more often than those that always or never are.

    jaxrl train --config configs/dapo_tiny.py --config.data.sampler=shared/by_pass_rate.py:ByPassRate

A group of answers that are all right or all wrong teaches nothing. Every problem has its turn once an epoch,
in a random order, and is drawn with the probability that its next group is mixed: new problems always, others
by a beta-binomial distribution of their right answers so far, of which older ones count less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.curriculum import GradedGroup
from jaxrl.types import Prompts

# The distribution before the first answer, as numbers of right and of wrong ones. Below 1 it has a U shape:
# most problems are solved nearly always or nearly never.
_PRIOR = 0.25
# Factor on older answers when a group is graded: the policy learns, and what was too hard comes again.
_DECAY = 0.75
_LEAST_PROBABILITY = 0.05


class ByPassRate:
    """Draws problems by the shares of their right answers."""

    def __init__(self, prompts: Prompts, seed: int):
        self._size, self._seed = len(prompts), seed
        self._right = np.zeros(self._size)
        self._graded = np.zeros(self._size)
        # Number of answers to a problem, as last seen; of one answer the next two count.
        self._answers = 2
        # Number of turns so far, and the order of the epoch that they are in.
        self._turn = 0
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def next(self) -> int:
        """The next problem that is drawn at its turn; after an epoch without one, the first."""
        first = self._row_of(self._turn)
        for turn in range(self._turn, self._turn + self._size):
            row = self._row_of(turn)
            # A number for each turn: a resumed run decides alike.
            if np.random.default_rng((self._seed, 1, turn)).random() < self._probability(row):
                self._turn = turn + 1
                return row
        self._turn += 1
        return first

    def update(self, groups: Sequence[GradedGroup]) -> None:
        """Counts the right answers of each group."""
        for group in groups:
            self._answers = max(2, len(group.correct))
            for counts, number in (
                (self._right, sum(group.correct)),
                (self._graded, len(group.correct)),
            ):
                counts[group.row] = _DECAY * counts[group.row] + number

    def state(self) -> dict[str, Any]:
        """The counts and the turn."""
        return {
            "right": self._right,
            "graded": self._graded,
            "answers": self._answers,
            "turn": self._turn,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state."""
        self._right, self._graded = state["right"], state["graded"]
        self._answers, self._turn = state["answers"], state["turn"]

    def _row_of(self, turn: int) -> int:
        epoch, place = divmod(turn, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, 0, epoch)).permutation(self._size)
        return int(self._order[place])

    def _probability(self, row: int) -> float:
        right, graded = float(self._right[row]), float(self._graded[row])
        if not graded:
            return 1.0
        alike = sum(
            math.prod((_PRIOR + hits + i) / (2 * _PRIOR + graded + i) for i in range(self._answers))
            for hits in (right, graded - right)
        )
        # Relative to a problem that is solved every other time.
        mixed = (1 - alike) / (1 - 2.0 ** (1 - self._answers))
        return max(_LEAST_PROBABILITY, min(1.0, mixed))
