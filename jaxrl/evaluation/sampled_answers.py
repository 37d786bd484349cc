"""Sampling and scoring of evaluations, for those during training and those without training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.devices import host_memory_bytes
from jaxrl.rewards.grading import Verdict
from jaxrl.rewards.score import score_completions
from jaxrl.rollout import samples
from jaxrl.types import Completions, Scored

EVALUATION_STEP = 2**31 - 1
"""The step number from which evaluations derive their sampling keys. Training never reaches it. It is
constant, so two evaluations differ only by the weights."""


def check_answers_fit(
    num_answers: int, max_response_tokens: int, *, settings: str, remedy: str
) -> None:
    """Raises UserError if the answers of an evaluation do not fit into this machine's memory.

    Args:
      num_answers: number of answers to all problems.
      max_response_tokens: largest number of tokens of an answer.
      settings: settings whose product is too large, with their values, for the message.
      remedy: change that helps, for the message.
    """
    nbytes, there = samples.host_bytes(num_answers, max_response_tokens), host_memory_bytes()
    if nbytes > there:
        raise UserError(
            f"{settings}: the answers take {nbytes / 1e9:,.1f} GB, more than this machine with "
            f"{there / 1e9:,.1f} GB; {remedy}"
        )


def score_without_length_penalty(completions: Completions, verdicts: Sequence[Verdict]) -> Scored:
    """Combines answers and verdicts, without a penalty for overlong answers."""
    return score_completions(completions, verdicts, overlong=_free)


def _free(lengths_B: np.ndarray) -> np.ndarray:
    return np.zeros(len(lengths_B), np.float32)
