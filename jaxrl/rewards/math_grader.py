r"""The grader `math`: general mathematics, parsed and compared in worker processes.

    response -> the answer that it ends with -> the same text as the truth, or a plain number? -> decided here
             -> else (truth, answer) -> a worker: `answer_reader.answer_equality.equal` -> right or wrong

The answer is the last `\boxed{}`, wherever it stands, or what follows "Answer:" or "####" in the last 300
characters; of several the last one. Boxes side by side ("\boxed{1} or \boxed{2}") are one answer with two
parts. `answer_reader` says what an answer may look like.
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Sequence
from fractions import Fraction

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.rewards.answer import answer_span, normalize_answer
from jaxrl.rewards.answer_reader import BOX, MAX_CHARS, closing_brace, spelled, undressed
from jaxrl.rewards.grading import GradingTask, Response, Verdict, empty_fault

EQUAL = "math"
"""The name of the comparison among a pool's functions."""

# Between two boxes that belong together.
_BETWEEN = re.compile(
    r"(?:[\s$.,;:&]|\\[,;()\[\]]|\\q?quad|\\text\s*\{[^{}]{0,12}\}|\band\b|\bor\b){0,20}"
)
_MARKER_OF_LINE = re.compile(
    r"(?i)[\s*#>_-]*(?:(?:the|my|so|thus|final|correct)\s+){0,3}\**(?:answer(?:[*_]*\s*[:\uff1a]|\s+is\s*:?)|####)[\s*_]*"
)
_NUMBER = re.compile(r"-?[0-9]{1,300}(?:\.[0-9]{1,300})?")
_HASHES = "####"


def math_answer(response: str) -> str | None:
    """The answer that a response ends with, as it stands there; None if it has none."""
    box = _last_boxes(response)
    said = answer_span(response)
    if said is None:
        return box[2] if box else None
    start, end = said
    line = response[start:end].strip()
    if box is None:
        return line
    if box[0] < start:
        # "..., \\boxed{44}. We check our answer: 17 * 44 = 748" ends with the box.
        before = response[max(0, start - 100) : start].rpartition("\n")[2]
        return line if _MARKER_OF_LINE.fullmatch(before) else box[2]
    if box[0] >= end:
        return box[2]
    # "Answer: the sum is $\boxed{42}$." says 42; what has more numbers than the box's says more.
    around = response[start : box[0]] + response[box[1] : end]
    return line if re.search(r"[0-9]", around) else box[2]


def _last_boxes(text: str) -> tuple[int, int, str] | None:
    """Where the last box begins and ends, and what is in it, with those right before it; None without."""
    starts = [match for match in BOX.finditer(text)]
    found: tuple[int, int, str] | None = None
    for match in reversed(starts[-8:]):
        end = closing_brace(text, match.end())
        if end < 0 or end - match.end() > 4 * MAX_CHARS:
            if found is None:
                return None
            break
        inside = text[match.end() : end]
        if found is None:
            found = match.start(), end + 1, inside
        elif end < found[0] and _BETWEEN.fullmatch(text[end + 1 : found[0]]):
            found = match.start(), found[1], f"{inside}, {found[2]}"
        elif end >= found[1]:
            # The last one stands in this one.
            found = match.start(), end + 1, inside
        else:
            break
    return found


def math_truth(answer: str) -> str:
    """The ground truth of a row: an answer, or a solution that ends in "#### ..." or has it in a box."""
    _, hashes, after = answer.rpartition(_HASHES)
    if hashes:
        return after.strip()
    if len(answer) > 100 or answer.count(" ") > 20:
        box = _last_boxes(answer)
        if box is not None:
            return box[2].strip()
    return answer.strip()


class MathGrader:
    """See the header."""

    def __init__(self, pool: ProcessPool):
        """Args: processes that have `load_equality`'s function under the name `EQUAL`."""
        self._pool = pool

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """A verdict on each; pairs of a truth and an answer that occur more than once are compared once."""
        answers = [math_answer(sample.text) for sample in samples]
        pairs = [
            (self._truth(sample.row), answer)
            for sample, answer in zip(samples, answers, strict=True)
        ]
        asked: dict[tuple[str, str], concurrent.futures.Future[bool] | bool] = {}
        for truth, answer in pairs:
            if answer is not None and (truth, answer) not in asked:
                decided = _decided(truth, answer)
                asked[truth, answer] = (
                    self._pool.submit(EQUAL, (truth, answer)) if decided is None else decided
                )
        return [
            Verdict.of(False, None) if answer is None else _verdict(asked[truth, answer], answer)
            for truth, answer in pairs
        ]

    def validate(self, row: GradingTask) -> str | None:
        """That it is empty, or too long."""
        truth = math_truth(row.answer)
        if fault := empty_fault(row):
            return fault
        if not spelled(truth):
            return f"ground truth {row.answer[:80]!r} holds no answer; fix or drop the row"
        if len(truth) > MAX_CHARS:
            return (
                f"ground truth {truth[:80]!r}... has {len(truth)} characters; at most {MAX_CHARS} are "
                "read: name the field that holds the answer alone"
            )
        return None

    def _truth(self, row: GradingTask) -> str:
        if fault := self.validate(row):
            raise UserError(fault)
        return math_truth(row.answer)


def _decided(truth: str, answer: str) -> bool | None:
    """What needs no mathematics; None for the rest."""
    if len(answer) > MAX_CHARS:
        return False
    first, second = undressed(truth), undressed(answer)
    if first == second:
        return True
    if _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second):
        return Fraction(first) == Fraction(second)
    return None


def _verdict(asked: concurrent.futures.Future[bool] | bool, answer: str) -> Verdict:
    shown = normalize_answer(answer) or answer[:MAX_CHARS]
    if isinstance(asked, bool):
        return Verdict.of(asked, shown)
    try:
        return Verdict.of(asked.result(), shown)
    except WorkerFault as fault:
        return Verdict.failed(fault.kind, str(fault), shown)
