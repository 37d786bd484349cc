"""What a grader is: of each response a verdict, and of each ground truth whether it can be read.

    Response(text, tokens, row) -> Grader -> Verdict(score, correct, prediction), or one with a GraderFailure

A failure is no verdict on the response: the grader ran out of time, or broke. The response counts as wrong,
since a policy must not gain by what breaks its grader; and the failure is counted and shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.errors import UserError
from jaxrl.rewards.answer import Grade
from jaxrl.types import GraderFailure


@dataclasses.dataclass(frozen=True)
class GradingTask:
    """What the data say of a prompt.

    Attributes:
      answer: the ground truth, in the grader's own notation.
      extra: the row's other fields, plain JSON.
      source: name of the data set.
    """

    answer: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Response:
    """What the policy wrote of a response, with the row that it answers.

    What an environment wrote is left out: an answer that a tool gives is not the policy's.

    Attributes:
      text: without special tokens, turns a line apart.
      tokens: int32, end-of-sequence included.
      row: of the prompt.
    """

    text: str
    tokens: np.ndarray
    row: GradingTask


RIGHT, WRONG = 1.0, -1.0
"""DAPO eq. 7."""
UNGRADED = 0.0
"""Score of a response to a prompt that has no ground truth and needs none."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """On one response.

    Attributes:
      score: the reward, from -1 (wrong) to 1 (right).
      correct: the response gives the ground truth.
      prediction: the answer that was found in it; None if there is none.
      failure: of the grader; the response then counts as wrong.
    """

    score: float
    correct: bool
    prediction: str | None = None
    failure: GraderFailure | None = None

    @staticmethod
    def of(correct: bool, prediction: str | None) -> Verdict:
        """Right or wrong, and nothing between."""
        return Verdict(RIGHT if correct else WRONG, correct, prediction)

    @staticmethod
    def failed(kind: str, message: str, prediction: str | None = None) -> Verdict:
        """None, for a reason that lies with the grader."""
        return Verdict(WRONG, False, prediction, GraderFailure(kind, message))


class Grader(Protocol):
    """Judges responses, by itself or in processes that it is given."""

    def grade(self, samples: Sequence[Response]) -> Sequence[Verdict]:
        """A verdict on each. Raises UserError for a ground truth that it cannot read, and for no response."""
        ...

    def validate(self, row: GradingTask) -> str | None:
        """Why the row's ground truth cannot be graded against; None if it can."""
        ...


TextGrader = Callable[[str, str], Grade]
"""(response, ground truth) -> Grade. It raises UserError for a ground truth that it cannot read, and never
for
what a response holds."""


class FunctionGrader:
    """A function of two texts as a grader. It runs in this process and cannot be ended."""

    def __init__(self, function: TextGrader):
        self._function = function

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """What the function says; what it raises, other than UserError, is a failure."""
        return [self._verdict(sample) for sample in samples]

    def validate(self, row: GradingTask) -> str | None:
        """What the function says of the ground truth beside an empty response."""
        return empty_fault(row) or refusal(lambda: self._function("", row.answer))

    def _verdict(self, sample: Response) -> Verdict:
        try:
            grade = self._function(sample.text, sample.row.answer)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise anything
            return Verdict.failed("raised", f"{type(error).__name__}: {error}")
        return Verdict.of(bool(grade.correct), grade.prediction)


def refusal(reads: Callable[[], Any]) -> str | None:
    """The message of the UserError that `reads` raises; None if it raises none."""
    try:
        reads()
    except UserError as error:
        return str(error)
    return None


def empty_fault(row: GradingTask) -> str | None:
    """The fault of a ground truth that is empty, which no grader can do with."""
    if row.answer.strip():
        return None
    return (
        "has an empty ground truth; every prompt needs one: fix or drop it (prompts to train on need none "
        "with reward.grader_weight=0, where other rewards score them)"
    )
