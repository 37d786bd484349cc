"""How answers are sampled and graded wherever a model is evaluated, inside training and outside."""

from __future__ import annotations

import numpy as np

from jaxrl.rewards.score import Grader, score_completions
from jaxrl.types import Completions, Scored

EVALUATION_STEP = 2**31 - 1
"""The step whose keys evaluation samples with. Training never reaches it, and it is the same every time: two
evaluations differ by the weights alone."""


def graded(completions: Completions, grade: Grader) -> Scored:
    """Right or wrong; length costs nothing here."""
    return score_completions(completions, grade=grade, overlong=_unpunished)


def _unpunished(lengths_B: np.ndarray) -> np.ndarray:
    return np.zeros(len(lengths_B), np.float32)
