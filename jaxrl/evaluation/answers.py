"""How answers are sampled and scored wherever a model is evaluated, inside training and outside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.rewards.grading import Verdict
from jaxrl.rewards.score import score_completions
from jaxrl.types import Completions, Scored

EVALUATION_STEP = 2**31 - 1
"""The step whose keys evaluation samples with. Training never reaches it, and it is the same every time: two
evaluations differ by the weights alone."""


def unpunished(completions: Completions, verdicts: Sequence[Verdict]) -> Scored:
    """Answers with their verdicts; length costs nothing here."""
    return score_completions(completions, verdicts, overlong=_free)


def _free(lengths_B: np.ndarray) -> np.ndarray:
    return np.zeros(len(lengths_B), np.float32)
