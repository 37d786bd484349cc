"""How hard the problems of a run have proved: of each, how often it was solved, and the worth of another try.

    graded groups -> counts of right and of all answers, older ones decayed -> chance of being drawn

A group whose answers are all right or all wrong teaches nothing. How likely the next one is to be such a
group follows from the counts: a beta-binomial distribution, whose prior is U-shaped, since most problems are
solved nearly always or nearly never.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

# Answers, right and wrong alike, that a problem is thought to have had before its first.
_PRIOR = 0.25
_STORED = {"rows": "<u4", "right": "<f4", "graded": "<f4"}


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """How pass rates decide which problems are drawn.

    Attributes:
      group_size: G, number of answers to a problem.
      least_chance: smallest probability of drawing a problem when its turn comes, above 0.
      decay: factor on older counts of a problem whenever its next group is graded.
    """

    group_size: int
    least_chance: float = 0.05
    decay: float = 0.75


class PassRates:
    """Decayed counts of the right and of all graded answers to each problem of a source.

    Args:
      num_problems: of the source.
      curriculum: what is made of them.
    """

    def __init__(self, num_problems: int, curriculum: Curriculum):
        self._curriculum = curriculum
        # A float32 is as good as the counts are, and is stored as it is.
        self._right = np.zeros(num_problems, np.float32)
        self._graded = np.zeros(num_problems, np.float32)

    def learn(self, row: int, num_right: int, num_graded: int) -> None:
        """Takes in a graded group of a problem."""
        decay = np.float32(self._curriculum.decay)
        self._right[row] = decay * self._right[row] + np.float32(num_right)
        self._graded[row] = decay * self._graded[row] + np.float32(num_graded)

    def chance(self, row: int) -> float:
        """With which a problem is drawn when its turn comes; 1 where no answer to it was graded.

        It is the probability that its next group is mixed, against the most that this can be, that of a
        problem which is solved half of the time.
        """
        graded = float(self._graded[row])
        if not graded:
            return 1.0
        right = float(self._right[row])
        # Of one answer nothing is mixed; then it is two of them that may differ.
        size = max(2, self._curriculum.group_size)
        alike = _all_alike(right, graded, size) + _all_alike(graded - right, graded, size)
        return max(self._curriculum.least_chance, min(1.0, (1 - alike) / (1 - 2.0 ** (1 - size))))

    def state(self) -> dict[str, str]:
        """The problems that were graded, for `restore`; arrays as text of JSON, 12 bytes a problem."""
        (rows,) = np.nonzero(self._graded)
        arrays = {"rows": rows, "right": self._right[rows], "graded": self._graded[rows]}
        return {
            name: base64.b64encode(arrays[name].astype(kind).tobytes()).decode()
            for name, kind in _STORED.items()
        }

    def restore(self, state: Mapping[str, str]) -> None:
        """Forgets what it knows for a state."""
        arrays = {
            name: np.frombuffer(base64.b64decode(state[name]), kind)
            for name, kind in _STORED.items()
        }
        self._right[:] = self._graded[:] = 0
        self._right[arrays["rows"]] = arrays["right"]
        self._graded[arrays["rows"]] = arrays["graded"]

    @staticmethod
    def metrics(tables: Sequence[PassRates]) -> dict[str, float]:
        """Of all problems that were graded, in several sources: how many, and how often they are solved."""
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
    """A draw with a chance, the same whenever it is asked for, on every machine."""
    digest = hashlib.blake2b(f"{seed} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < chance * 2**64


def _all_alike(hits: float, graded: float, size: int) -> float:
    """The probability that the next answers are all hits, each of which makes the next one likelier."""
    # One product after the other: unlike a power it is the same on every machine.
    return math.prod((_PRIOR + hits + i) / (2 * _PRIOR + graded + i) for i in range(size))
