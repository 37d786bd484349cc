"""Graders that run code in a sandbox: unit tests of programs, and the scorers of reasoning-gym.

A worker of the pool starts a sandbox (`jaxrl.rewards.sandbox`) for each response.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import extract_answer
from jaxrl.rewards.code_tests import read_tests, run_tests
from jaxrl.rewards.grading import (
    RIGHT,
    WRONG,
    Grader,
    GradingTask,
    Response,
    Verdict,
    empty_fault,
    in_worker,
    refusal,
)
from jaxrl.rewards.reward_config import SandboxChoice
from jaxrl.rewards.sandbox.choose import logged_choice
from jaxrl.rewards.sandbox.native import SandboxLimits, run_forked

_BLOCK = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
# No answer to a puzzle needs these. Some scorers evaluate the answer, and these would let it do anything.
_CODE = re.compile(
    r"__|\b(?:import|lambda|exec|eval|open|globals|getattr|setattr)\b|\w\.[A-Za-z_]\w*\s*\("
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Clock time of a call. The sandbox ends slow programs; this ends a worker that hangs, on any machine.
_PATIENCE_S = 1800.0
_MAX_PREDICTION = 300
_MAX_ANSWER = 20_000
# Some scorers deduct 0.01 for form, which is wrong; rounding errors are smaller.
_WHOLE_MARK = 0.999


class CodeGrader(Grader):
    """Runs the last fenced block of a response against the unit tests in the ground truth (`code_tests`).

    Args:
      pool: processes that have the function of `worker`.
      code_sandbox: sandbox of the programs. It is tested now, and a warning lists its gaps. None is enough to
        validate ground truths.
      part_marks: whether the score is the share of passed tests; a program is correct only if it passes all.
    """

    @staticmethod
    def worker() -> Callable[[Any], Any]:
        """Returns `code_tests.run_tests`."""
        return run_tests

    def __init__(
        self, pool: ProcessPool, code_sandbox: SandboxChoice | None, *, part_marks: bool = False
    ):
        self._pool = pool
        self._sandbox = "" if code_sandbox is None else logged_choice(code_sandbox)
        self._part_marks = part_marks

    def begin(self, sample: Response) -> Verdict | Callable[[], Verdict]:
        program = program_of(sample.text)
        if program is None:
            return Verdict.of(False, None)
        # The sandbox has the limit of time; that of the worker is for a worker that hangs.
        asked = (program, sample.row.answer, self._pool.cpu_seconds, self._sandbox)
        future = self._pool.submit("code", asked, patience_s=_PATIENCE_S)
        shown = program[:_MAX_PREDICTION]
        return in_worker(future, functools.partial(self._verdict, shown), shown)

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth holds no unit tests; None if it does."""
        return empty_fault(row) or refusal(lambda: read_tests(row.answer))

    def _verdict(self, shown: str, passed: list[bool] | None) -> Verdict:
        if passed is None:
            # The program ran out of time: it is wrong, and the grader has not failed.
            return Verdict.of(False, shown)
        return _marked(sum(passed) / len(passed), self._part_marks, shown)


def program_of(response: str) -> str | None:
    """Returns the last block of code; None if there is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks and blocks[-1].strip() else None


class ReasoningGymGrader(Grader):
    """Grades by the scorer of a reasoning-gym task; a mark below 1 is wrong.

    The scorer reads `extra["metadata"]` of the row. Its `source_dataset` names the task, else the row's
    source does. The answer is the content of <answer>, else that of `answer.extract_answer`.

    Args:
      pool: processes that have the function of `worker`.
      task: task of all rows; "" takes it from each row.
      part_marks: whether the score follows the mark.
    """

    @staticmethod
    def worker() -> Callable[[tuple[str, str, dict, float]], float | str]:
        """Returns a function to the mark of an answer, or why there is none."""
        # Imported in the worker, since it takes seconds.
        import reasoning_gym
        from reasoning_gym import factory

        scorer_of: Any = factory.get_score_answer_fn
        # It reads word lists from its own folder.
        readable = list(reasoning_gym.__path__)

        def score(argument: tuple[str, str, dict, float]) -> float | str:
            task, answer, entry, seconds = argument
            if task not in factory.DATASETS:
                return f"raised: reasoning-gym has no task {task!r}"
            # A wrong answer, and no failure of the grader, which would be counted and shown.
            if _CODE.search(answer):
                return 0.0
            scorer = scorer_of(task)

            def marked() -> bytes:
                # An exception may be due to the answer or to the scorer; the child then returns no mark.
                return json.dumps(float(scorer(answer, entry))).encode()

            mark = run_forked(marked, SandboxLimits(seconds=seconds), readable)
            if mark is None:
                return f"timeout: the scorer of {task} has taken more than {seconds:g} s"
            try:
                return float(json.loads(mark))
            except ValueError:
                return f"raised: the scorer of {task} gave no mark"

        return score

    def __init__(self, pool: ProcessPool, *, task: str = "", part_marks: bool = False):
        self._pool = pool
        self._task = task
        self._part_marks = part_marks

    def begin(self, sample: Response) -> Verdict | Callable[[], Verdict]:
        row, tagged = sample.row, _TAG.findall(sample.text[-_MAX_ANSWER:])
        answer = tagged[-1].strip() if tagged else extract_answer(sample.text)
        if not answer:
            return Verdict.of(False, None)
        metadata = row.extra["metadata"]
        task = self._task or metadata.get("source_dataset") or row.source
        entry = {
            "question": str(row.extra.get("question", "")),
            "answer": row.answer,
            "metadata": metadata,
        }
        asked = (task, answer, entry, self._pool.cpu_seconds)
        future = self._pool.submit("reasoning_gym", asked, patience_s=_PATIENCE_S)
        shown = answer[:_MAX_PREDICTION]
        return in_worker(future, functools.partial(self._verdict, shown), shown)

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the scorer cannot use the row: an empty ground truth or no metadata; None if it can."""
        if fault := empty_fault(row):
            return fault
        if not isinstance(row.extra.get("metadata"), dict):
            return (
                "has no `metadata` beside its answer, which the scorers of reasoning-gym look at; keep "
                "that field of its rows, or use the grader 'answer' or 'exact'"
            )
        return None

    def _verdict(self, shown: str, mark: float | str) -> Verdict:
        if isinstance(mark, str):
            kind, _, message = mark.partition(": ")
            return Verdict.failed(kind, message, shown)
        return _marked(mark, self._part_marks, shown)


def _marked(mark: float, part_marks: bool, shown: str) -> Verdict:
    correct = mark >= _WHOLE_MARK
    if not part_marks:
        return Verdict.of(correct, shown)
    return Verdict(WRONG + (RIGHT - WRONG) * min(1.0, max(0.0, mark)), correct, shown)
