"""The interface of graders: they give each response a verdict and validate ground truths.

    Response(text, tokens, row) -> Grader -> Verdict(score, correct, prediction, failure)

A failure says that the grader ran out of time or broke. The response then counts as wrong, because a policy
must not gain by breaking its grader. Failures are counted and logged.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.errors import UserError
from jaxrl.process_pool import WorkerFault
from jaxrl.rewards.answer import Grade
from jaxrl.types import GraderFailure


@dataclasses.dataclass(frozen=True)
class GradingTask:
    """The row of a prompt, as graders see it.

    Attributes:
      answer: ground truth, in the notation of the grader.
      extra: other fields of the row, plain JSON.
      source: name of the data set.
    """

    answer: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Response:
    """A response: the policy's own turns, and the row of its prompt.

    The turns of an environment are left out, because an answer given by a tool is not the policy's.

    Attributes:
      text: text without special tokens, one line break between turns.
      tokens: int32 tokens, end-of-sequence included.
      row: row of the prompt.
    """

    text: str
    tokens: np.ndarray
    row: GradingTask


RIGHT, WRONG = 1.0, -1.0
"""DAPO eq. 7."""
UNGRADED = 0.0
"""Score of a response to a prompt that needs no ground truth and has none."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A grader's verdict on one response.

    Attributes:
      score: reward, from -1 (wrong) to 1 (right).
      correct: whether the response gives the ground truth.
      prediction: answer of the response; None if it has none.
      failure: failure of the grader; the response then counts as wrong.
    """

    score: float
    correct: bool
    prediction: str | None = None
    failure: GraderFailure | None = None

    @staticmethod
    def of(correct: bool, prediction: str | None) -> Verdict:
        """A verdict without part marks."""
        return Verdict(RIGHT if correct else WRONG, correct, prediction)

    @staticmethod
    def failed(kind: str, message: str, prediction: str | None = None) -> Verdict:
        """A verdict of a grader that failed."""
        return Verdict(WRONG, False, prediction, GraderFailure(kind, message))


class Grader(Protocol):
    """Grades responses, in this process or in those of a pool."""

    def grade(self, samples: Sequence[Response]) -> Sequence[Verdict]:
        """Returns a verdict on each response; raises UserError only for a malformed ground truth."""
        ...

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the row's ground truth cannot be used; None if it can."""
        ...


@dataclasses.dataclass(frozen=True)
class PendingVerdict:
    """A verdict for which a worker process computes.

    Attributes:
      future: result of the worker.
      verdict: makes the verdict from that result.
      prediction: answer of the response, for the verdict if the worker fails.
    """

    future: concurrent.futures.Future[Any]
    verdict: Callable[[Any], Verdict]
    prediction: str | None = None

    def wait(self) -> Verdict:
        try:
            return self.verdict(self.future.result())
        except WorkerFault as fault:
            return Verdict.failed(fault.kind, str(fault), self.prediction)


class SampleGrader:
    """A grader that looks at one response at a time; it validates each ground truth first."""

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """Returns a verdict on each response; raises UserError for a malformed ground truth."""
        begun = []
        for sample in samples:
            if fault := self.validate(sample.row):
                raise UserError(fault)
            begun.append(self.begin(sample))
        return [x.wait() if isinstance(x, PendingVerdict) else x for x in begun]

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the row's ground truth cannot be used: by default only if it is empty."""
        return empty_fault(row)

    def begin(self, sample: Response) -> Verdict | PendingVerdict:
        """Grades one response, or asks a worker to."""
        raise NotImplementedError


TextGrader = Callable[[str, str], Grade]
"""(response, ground truth) -> Grade. It raises UserError only for a malformed ground truth."""


class FunctionGrader:
    """Grades by a function of two texts in this process, which no time limit can end."""

    def __init__(self, function: TextGrader):
        self._function = function

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """Returns the function's verdicts; any exception but UserError is a failure of the grader."""
        return [self._verdict(sample) for sample in samples]

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the function refuses the ground truth, tried with an empty response."""
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
    """Returns the message of the UserError that `reads` raises; None if it raises none."""
    try:
        reads()
    except UserError as error:
        return str(error)
    return None


def empty_fault(row: GradingTask) -> str | None:
    """Returns an error message if the ground truth is empty, else None."""
    if row.answer.strip():
        return None
    return (
        "has an empty ground truth; every prompt needs one: fix or drop it (prompts to train on need none "
        "with reward.grader_weight=0, where other rewards score them)"
    )
