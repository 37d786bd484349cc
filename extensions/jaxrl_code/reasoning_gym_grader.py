"""The scorers of reasoning-gym, in forked processes that are locked down: several evaluate the answer."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import extract_answer
from jaxrl.rewards.grading import (
    Grader,
    GradingTask,
    Response,
    Verdict,
    empty_fault,
    in_worker,
    marked,
)
from jaxrl.rewards.reward_config import SandboxChoice
from jaxrl_code.sandbox import check_landlock
from jaxrl_code.sandbox.native import SandboxLimits, run_forked

# No answer to a puzzle needs these. Some scorers evaluate the answer, and these would let it do anything.
_CODE = re.compile(
    r"__|\b(?:import|lambda|exec|eval|open|globals|getattr|setattr)\b|\w\.[A-Za-z_]\w*\s*\("
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Clock time of a call. The limit of processor time ends slow scorers; this ends a worker that hangs.
_PATIENCE_S = 1800.0
_MAX_PREDICTION = 300
_MAX_ANSWER = 20_000


class ReasoningGymGrader(Grader):
    """Grades by the scorer of a reasoning-gym task; a mark below 1 is wrong.

    The scorer reads `extra["metadata"]` of the row. Its `source_dataset` names the task, else the row's
    source does. The answer is the content of <answer>, else that of `answer.extract_answer`.

    Args:
      pool: processes that have the function of `worker`.
      code_sandbox: "none" for scorers that run with the rights of this user; otherwise Landlock is tested
        now. None is enough to validate rows.
      task: task of all rows; "" takes it from each row.
      part_marks: whether the score follows the mark.
    """

    @staticmethod
    def worker() -> Callable[[tuple[str, str, dict, float, bool]], float | str]:
        """Returns a function to the mark of an answer, or why there is none."""
        # Imported in the worker, since it takes seconds.
        import reasoning_gym
        from reasoning_gym import factory

        scorer_of: Any = factory.get_score_answer_fn
        # It reads word lists from its own folder.
        readable = list(reasoning_gym.__path__)

        def score(argument: tuple[str, str, dict, float, bool]) -> float | str:
            task, answer, entry, seconds, locked = argument
            if task not in factory.DATASETS:
                return f"raised: reasoning-gym has no task {task!r}"
            # A wrong answer, and no failure of the grader, which would be counted and shown.
            if _CODE.search(answer):
                return 0.0
            scorer = scorer_of(task)

            def mark_of_answer() -> bytes:
                # An exception may be due to the answer or to the scorer; the child then returns no mark.
                return json.dumps(float(scorer(answer, entry))).encode()

            mark = run_forked(
                mark_of_answer, SandboxLimits(seconds=seconds), readable, locked=locked
            )
            if mark is None:
                return f"timeout: the scorer of {task} has taken more than {seconds:g} s"
            try:
                return float(json.loads(mark))
            except ValueError:
                return f"raised: the scorer of {task} gave no mark"

        return score

    def __init__(
        self,
        pool: ProcessPool,
        code_sandbox: SandboxChoice | None,
        *,
        task: str = "",
        part_marks: bool = False,
    ):
        self._pool = pool
        self._locked = code_sandbox != "none"
        if self._locked and code_sandbox is not None:
            check_landlock()
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
        asked = (task, answer, entry, self._pool.cpu_seconds, self._locked)
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
        return marked(mark, self._part_marks, shown)
