"""The pass rate of each problem of a run, and the probability that a curriculum draws the problem.

    graded groups -> counts of right and of all answers, older ones decayed -> probability of being drawn

A group of answers that are all right or all wrong teaches nothing. The probability of such a group follows
from the counts by a beta-binomial distribution. Its prior is U-shaped, because most problems are solved
nearly always or nearly never.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

# The prior, as numbers of right and of wrong answers before the first. Below 1 it is U-shaped.
_PRIOR = 0.25
_STORED = {"rows": "<u4", "right": "<f4", "graded": "<f4"}


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Draws problems by their pass rates.

    Attributes:
      group_size: G, the number of answers to a problem.
      least_chance: Probability of drawing a problem that is always or never solved, above 0.
      decay: Factor on the older counts of a problem when its next group is graded.
    """

    group_size: int
    least_chance: float = 0.05
    decay: float = 0.75


class PassRates:
    """Decayed counts of the right and of all graded answers to each problem of a source.

    Args:
      num_problems: Number of problems of the source.
      curriculum: Settings.
    """

    def __init__(self, num_problems: int, curriculum: Curriculum):
        self._curriculum = curriculum
        # float32, as in the checkpoint: a restored run then computes the same probabilities.
        self._right = np.zeros(num_problems, np.float32)
        self._graded = np.zeros(num_problems, np.float32)

    def learn(self, row: int, num_right: int, num_graded: int) -> None:
        """Adds a graded group to the counts of a problem."""
        decay = np.float32(self._curriculum.decay)
        self._right[row] = decay * self._right[row] + np.float32(num_right)
        self._graded[row] = decay * self._graded[row] + np.float32(num_graded)

    def chance(self, row: int) -> float:
        """Returns the probability of drawing a problem at its turn; 1 before its first graded group.

        It is the probability that the next group is mixed, divided by its largest value: that of a problem
        with a pass rate of one half. `least_chance` is the lower bound.
        """
        graded = float(self._graded[row])
        if not graded:
            return 1.0
        right = float(self._right[row])
        # A group of one answer is never mixed; then the next two answers count.
        size = max(2, self._curriculum.group_size)
        alike = _all_alike(right, graded, size) + _all_alike(graded - right, graded, size)
        return max(self._curriculum.least_chance, min(1.0, (1 - alike) / (1 - 2.0 ** (1 - size))))

    def state(self) -> dict[str, str]:
        """The counts of graded problems, for `restore`: arrays in base64, 12 bytes a problem."""
        (rows,) = np.nonzero(self._graded)
        arrays = {"rows": rows, "right": self._right[rows], "graded": self._graded[rows]}
        return {
            name: base64.b64encode(arrays[name].astype(kind).tobytes()).decode()
            for name, kind in _STORED.items()
        }

    def restore(self, state: Mapping[str, str]) -> None:
        """Replaces all counts by those of a `state`."""
        arrays = {
            name: np.frombuffer(base64.b64decode(state[name]), kind)
            for name, kind in _STORED.items()
        }
        self._right[:] = self._graded[:] = 0
        self._right[arrays["rows"]] = arrays["right"]
        self._graded[arrays["rows"]] = arrays["graded"]

    @staticmethod
    def metrics(tables: Sequence[PassRates]) -> dict[str, float]:
        """The number and pass rates of the graded problems of several sources, as metrics."""
        right = np.concatenate([table._right[table._graded > 0] for table in tables])
        graded = np.concatenate([table._graded[table._graded > 0] for table in tables])
        if not len(graded):
            return {"curriculum/known": 0.0}
        return {
            "curriculum/known": float(len(graded)),
            "curriculum/mean_pass_rate": float((right / graded).mean(dtype=np.float64)),
            "curriculum/solved_always": float((right == graded).mean()),
            "curriculum/solved_never": float((right == 0).mean()),
        }


def is_drawn(chance: float, seed: int, turn: int) -> bool:
    """A random decision with a probability; the same for a seed and turn, at any time on any machine."""
    digest = hashlib.blake2b(f"{seed} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < chance * 2**64


def _all_alike(hits: float, graded: float, size: int) -> float:
    """The probability that the next `size` answers are all hits; every hit makes the next one likelier."""
    # Single multiplications give the same bits on every machine; a power does not.
    return math.prod((_PRIOR + hits + i) / (2 * _PRIOR + graded + i) for i in range(size))
