"""The interface of graders: they give each response a verdict and validate ground truths.

    Response(text, tokens, row) -> Grader -> Verdict(score, correct, prediction, failure)

A failure says that the grader ran out of time or broke. The response then counts as wrong, because a policy
must not gain by breaking its grader. Failures are counted and logged.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.types import TRUTHS, GraderFailure
from jaxrl.user_code import load_function


@dataclasses.dataclass(frozen=True)
class GradingTask:
    """The row of a prompt, as graders see it.

    Attributes:
      answer: ground truth, in the notation of the grader; of several the first.
      extra: other fields of the row, plain JSON.
      source: name of the data set.
    """

    answer: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""

    @property
    def members(self) -> list[GradingTask]:
        """The task once for each of its ground truths."""
        truths = self.extra.get(TRUTHS) or [self.answer]
        return [dataclasses.replace(self, answer=truth) for truth in truths]


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


@dataclasses.dataclass(frozen=True)
class Grade:
    """What a function of response and ground truth finds.

    Attributes:
      correct: whether the response gives the ground truth.
      prediction: the answer of the response; None if it has none.
    """

    correct: bool
    prediction: str | None


TextGrader = Callable[[str, str], Grade]
"""(response, ground truth) -> Grade. It raises UserError only for a malformed ground truth."""

RIGHT, WRONG = 1.0, -1.0
"""DAPO eq. 7."""
UNGRADED = 0.0
"""Score of a response to a prompt that needs no ground truth and has none."""
# Some scorers of reasoning-gym deduct 0.01 for form, which is wrong; rounding errors are smaller.
_WHOLE_MARK = 0.999


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
        # Wrong rather than ungraded: a policy must not gain by breaking its grader.
        return Verdict(WRONG, False, prediction, GraderFailure(kind, message))


def in_worker(
    future: concurrent.futures.Future[Any],
    verdict: Callable[[Any], Verdict],
    prediction: str | None = None,
) -> Callable[[], Verdict]:
    """Returns a function that waits for a worker process and makes a verdict of its result.

    Args:
      future: result of the worker.
      verdict: makes the verdict from that result.
      prediction: answer of the response, for the verdict if the worker fails.
    """

    def wait() -> Verdict:
        try:
            return verdict(future.result())
        except WorkerFault as fault:
            return Verdict.failed(fault.kind, str(fault), prediction)

    return wait


class Grader:
    """Grades responses, in this process or in those of a pool; by default one at a time, by `begin`.

    The constructor of a built-in grader takes its options by keyword, after the pool if it has a `worker`.
    """

    reads_all = False
    """Whether it reads all ground truths of a row itself; otherwise it gets one at a time (`Graders`)."""

    worker: Callable[[], Callable[[Any], Any]] | None = None
    """Makes, in a process of the pool, the function that answers there under the grader's name."""

    def grade(self, samples: Sequence[Response]) -> Sequence[Verdict]:
        """Returns a verdict on each response; raises UserError only for a malformed ground truth."""
        begun = []
        for sample in samples:
            if fault := self.validate(sample.row):
                raise UserError(fault)
            begun.append(self.begin(sample))
        # Waits only after all have started, so that the workers grade at the same time.
        return [x if isinstance(x, Verdict) else x() for x in begun]

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the row's ground truth cannot be used; None if it can. An empty one cannot."""
        return empty_fault(row)

    def begin(self, sample: Response) -> Verdict | Callable[[], Verdict]:
        """Grades one response, or asks a worker to and returns what waits for it."""
        raise NotImplementedError


class FunctionGrader(Grader):
    """Grades by a function of two texts in this process, which no time limit can end."""

    def __init__(self, function: TextGrader):
        self._function = function

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """Returns the function's verdicts; any exception but UserError is a failure of the grader."""
        verdicts = []
        for sample in samples:
            try:
                grade = self._function(sample.text, sample.row.answer)
                verdicts.append(Verdict.of(bool(grade.correct), grade.prediction))
            except UserError:
                raise
            except Exception as error:  # a user's function may raise anything
                verdicts.append(Verdict.failed("raised", f"{type(error).__name__}: {error}"))
        return verdicts

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the function refuses the ground truth, tried with an empty response."""
        return empty_fault(row) or refusal(lambda: self._function("", row.answer))


class PathGrader(FunctionGrader):
    """Calls a user's function of two texts in a worker, which can be ended if it hangs."""

    def __init__(self, path: str, pool: ProcessPool):
        # Loaded here as well, so that a wrong path is reported before a process starts.
        super().__init__(
            load_function(path, "grader", takes=("response", "answer"), own_process=True)
        )
        self._path = path
        self._pool = pool

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """Returns the function's verdicts; whatever it does costs its own verdict alone."""
        # All are asked before the first is waited for.
        asked = [self._pool.submit(self._path, (s.text, s.row.answer)) for s in samples]
        verdicts = []
        for future in asked:
            try:
                grade = future.result()
                verdicts.append(Verdict.of(bool(grade.correct), grade.prediction))
            except WorkerFault as fault:
                verdicts.append(Verdict.failed(fault.kind, str(fault)))
            except AttributeError as error:
                why = f"grader {self._path!r} returned no Grade: {error}"
                verdicts.append(Verdict.failed("raised", why))
        return verdicts


def refusal(reads: Callable[[], Any]) -> str | None:
    """Returns the message of the UserError that `reads` raises; None if it raises none."""
    try:
        reads()
    except UserError as error:
        return str(error)
    return None


def marked(mark: float, part_marks: bool, shown: str) -> Verdict:
    """The verdict of a mark from 0 to 1, whose score follows the mark if it `part_marks`."""
    correct = mark >= _WHOLE_MARK
    if not part_marks:
        return Verdict.of(correct, shown)
    return Verdict(WRONG + (RIGHT - WRONG) * min(1.0, max(0.0, mark)), correct, shown)


def empty_fault(row: GradingTask) -> str | None:
    """Returns an error message if the ground truth is empty, else None."""
    if row.answer.strip():
        return None
    return (
        "has an empty ground truth; every prompt needs one: fix or drop it (prompts to train on need none "
        "with reward.grader_weight=0, where other rewards score them)"
    )
