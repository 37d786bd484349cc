r"""The grader `math_verify`: the package math-verify, to compare with numbers that were measured with it.

It is asked as verl asks it: the ground truth in a box, the whole response, its own defaults. So it reads the
last box, else mathematics in dollars or a number anywhere in the response. docs/answer_reader.md shows where
its verdicts differ from those of the grader `math`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import normalize_answer
from jaxrl.rewards.grading import Grader, Response, Verdict, in_worker
from jaxrl_answers.math_grader import math_truth

_MAX_PREDICTION = 300


class MathVerifyGrader(Grader):
    """Asks math-verify; see the header.

    Args:
      pool: processes that have the function of `worker`.
    """

    @staticmethod
    def worker() -> Callable[[tuple[str, str]], tuple[bool, str | None]]:
        """Returns a function to whether a response gives the truth, and the text of its answer."""
        # Imported in the worker, since it takes a second and brings SymPy.
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

        # It warns that its time limits are off: they are alarms, and the pool has limits of its own.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

        def compare(pair: tuple[str, str]) -> tuple[bool, str | None]:
            truth, response = pair
            gold = parse(rf"\boxed{{{truth}}}", parsing_timeout=None)
            if not gold:
                raise ValueError(f"math-verify reads no answer in the ground truth {truth!r}")
            # The values that it has read, then the text that it has read them from.
            said = parse(response, parsing_timeout=None)
            text = next((item for item in said if isinstance(item, str)), None)
            return verify(gold, said, timeout_seconds=None), text

        return compare

    def __init__(self, pool: ProcessPool):
        self._pool = pool

    def begin(self, sample: Response) -> Callable[[], Verdict]:
        """Asks a worker, and returns what waits for it."""
        asked = math_truth(sample.row.answer), sample.text
        return in_worker(self._pool.submit("math_verify", asked), _verdict)


def _verdict(found: tuple[bool, str | None]) -> Verdict:
    correct, text = found
    shown = text and (normalize_answer(text) or text[:_MAX_PREDICTION])
    return Verdict.of(correct, shown)
