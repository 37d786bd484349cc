"""Graders that run what a response holds: code against unit tests, and the scorers of reasoning-gym.

Both run in a sandbox (`jaxrl.rewards.sandbox`), which a worker of the pool starts for each response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.rewards.answer import extract_answer
from jaxrl.rewards.code_tests import read_tests
from jaxrl.rewards.grading import (
    RIGHT,
    WRONG,
    GradingTask,
    Response,
    Verdict,
    empty_fault,
    refusal,
)

CODE, TASK = "code", "reasoning_gym"
"""Names of what they ask a pool for."""

_BLOCK = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Sandboxes end programs by themselves. This ends a worker that hangs, however busy the machine is.
_PATIENCE_S = 1800.0
_MAX_PREDICTION = 300
_MAX_ANSWER = 20_000
# A mark of 0.99 is a rounding error away from a whole one, or a deduction for form.
_WHOLE_MARK = 0.999


class CodeGrader:
    """A Python program against the unit tests that are the row's ground truth (`code_tests`).

    The program is the last fenced block of the response.

    Args:
      pool: processes that have `code_tests.run_tests` under the name `CODE`.
      sandbox: name of the sandbox of programs (`sandbox.SANDBOXES`).
      part_marks: the score follows the share of passed tests; right is still who passes all.
    """

    def __init__(self, pool: ProcessPool, sandbox: str, *, part_marks: bool = False):
        self._pool = pool
        self._sandbox = sandbox
        self._part_marks = part_marks

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """A verdict on each."""
        asked: list[Any] = []
        for sample in samples:
            if fault := self.validate(sample.row):
                raise UserError(fault)
            program = program_of(sample.text)
            asked.append(program and (program, self._submit(program, sample.row.answer)))
        return [Verdict.of(False, None) if x is None else self._verdict(*x) for x in asked]

    def validate(self, row: GradingTask) -> str | None:
        """That they are no tests."""
        return empty_fault(row) or refusal(lambda: read_tests(row.answer))

    def _submit(self, program: str, tests: str) -> Any:
        asked = (program, tests, self._pool.cpu_seconds, self._sandbox)
        return self._pool.submit(CODE, asked, patience_s=_PATIENCE_S)

    def _verdict(self, program: str, future: Any) -> Verdict:
        shown = program[:_MAX_PREDICTION]
        try:
            passed = future.result()
        except WorkerFault as fault:
            return Verdict.failed(fault.kind, str(fault), shown)
        if passed is None:
            # The program's own doing: it is wrong, and nothing has failed.
            return Verdict.of(False, shown)
        return _marked(sum(passed) / len(passed), self._part_marks, shown)


def program_of(response: str) -> str | None:
    """The last block of code; None if there is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks and blocks[-1].strip() else None


class ReasoningGymGrader:
    """The scorer of a task of reasoning-gym. A mark below 1 is wrong.

    The row has what the scorer looks at in `extra["metadata"]`; the task is its `source_dataset`, else the
    row's source. The answer is what stands in <answer>, else what other graders take.

    Args:
      pool: processes that have `load_scorer`'s function under the name `TASK`.
      task: of all rows, if they do not say it.
      part_marks: the score follows the mark.
    """

    def __init__(self, pool: ProcessPool, *, task: str = "", part_marks: bool = False):
        self._pool = pool
        self._task = task
        self._part_marks = part_marks

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """A verdict on each."""
        asked: list[Any] = []
        for sample in samples:
            if fault := self.validate(sample.row):
                raise UserError(fault)
            answer = tagged_answer(sample.text)
            asked.append(answer and (answer, self._submit(answer, sample.row)))
        return [Verdict.of(False, None) if not x else self._verdict(*x) for x in asked]

    def validate(self, row: GradingTask) -> str | None:
        """That there is no task, or nothing that its scorer could look at."""
        if fault := empty_fault(row):
            return fault
        if not isinstance(row.extra.get("metadata"), dict):
            return (
                "has no `metadata` beside its answer, which the scorers of reasoning-gym look at; keep "
                "that field of its rows, or use the grader 'answer' or 'exact'"
            )
        return None

    def _submit(self, answer: str, row: GradingTask) -> Any:
        metadata = row.extra["metadata"]
        task = self._task or metadata.get("source_dataset") or row.source
        entry = {
            "question": str(row.extra.get("question", "")),
            "answer": row.answer,
            "metadata": metadata,
        }
        asked = (task, answer, entry, self._pool.cpu_seconds)
        return self._pool.submit(TASK, asked, patience_s=_PATIENCE_S)

    def _verdict(self, answer: str, future: Any) -> Verdict:
        shown = answer[:_MAX_PREDICTION]
        try:
            mark = future.result()
        except WorkerFault as fault:
            return Verdict.failed(fault.kind, str(fault), shown)
        if isinstance(mark, str):
            kind, _, message = mark.partition(": ")
            return Verdict.failed(kind, message, shown)
        return _marked(mark, self._part_marks, shown)


def tagged_answer(response: str) -> str | None:
    """What stands in the last <answer>, else what `answer.extract_answer` finds."""
    tagged = _TAG.findall(response[-_MAX_ANSWER:])
    return tagged[-1].strip() if tagged else extract_answer(response)


def _marked(mark: float, part_marks: bool, shown: str) -> Verdict:
    correct = mark >= _WHOLE_MARK
    if not part_marks:
        return Verdict.of(correct, shown)
    return Verdict(WRONG + (RIGHT - WRONG) * min(1.0, max(0.0, mark)), correct, shown)
