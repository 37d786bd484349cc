r"""The grader `math`: general mathematics, parsed and compared in worker processes.

    response -> its last answer -> equal as a text or as a number? -> decided here
             -> else (truth, answer) -> a worker: `jaxrl_answers.equality.equal` -> right or wrong

The answer is the last `\boxed{}` anywhere, or the text after "Answer:", "####" or "The answer is" in the last
300 characters, whichever comes last. Boxes joined by a comma, "and" or "or" are one answer with several
parts. docs/answer_reader.md describes the answers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import answer_span, normalize_answer
from jaxrl.rewards.grading import Grader, GradingTask, Response, Verdict, empty_fault, in_worker
from jaxrl_answers.equality import equal
from jaxrl_answers.tokens import BOX, MAX_CHARS, closing_brace, spelled, undressed

# The text between two boxes of one answer: "\boxed{1}, \boxed{2}", "\boxed{1} and \boxed{2}". After a full
# stop, or after nothing but space, the later box replaces the earlier one.
_SPACE = r"(?:[\s$]|\\[,;:! ()\[\]]|\\q?quad)*"
_JOINT = r"(?:[,;&]|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\band\b|\bor\b)"
_BETWEEN = re.compile(rf"{_SPACE}(?:{_JOINT}{_SPACE}){{1,3}}")
_MARKER_OF_LINE = re.compile(
    r"(?i)[\s*#>_-]*(?:(?:the|my|so|thus|final|correct)\s+){0,3}\**(?:answer(?:[*_]*\s*[:\uff1a]|\s+is\s*:?)|####)[\s*_]*"
)
# "We check our answer: 17 * 44 = 748" after a box is no answer; "but then Answer: 41" is one.
_NO_MARKER = re.compile(
    r"\b(?i:our|your|their|this|that|the|an)\s+answer(?:[*_]*\s*[:\uff1a])[*_\s]*\Z"
)
_NUMBER = re.compile(r"-?[0-9]{1,300}(?:\.[0-9]{1,300})?")
_HASHES = "####"


def math_answer(response: str) -> str | None:
    """Returns the last answer of a response, unchanged; None if it has none."""
    box = _last_boxes(response)
    said = answer_span(response)
    if said is None:
        return box[2] if box else None
    start, end = said
    line = _stripped(response[start:end])
    if box is None:
        return line
    if box[0] < start:
        before = response[max(0, start - 100) : start].rpartition("\n")[2]
        aside = _NO_MARKER.search(before) and not _MARKER_OF_LINE.fullmatch(before)
        return box[2] if aside else line
    if box[0] >= end:
        return box[2]
    # "Answer: the sum is $\boxed{42}$." is 42, but further numbers around the box are part of the answer,
    # unless a new sentence brings the box: "Answer: 41. Wait, \boxed{42}".
    before = re.split(r"[.!?]\s+(?=[A-Z])", response[start : box[0]])[-1]
    around = before + response[box[1] : end]
    return line if re.search(r"[0-9]", around) else box[2]


def _stripped(text: str) -> str:
    # The last space of "\ 42\ " belongs to its backslash.
    return re.sub(r"\A\s+|(?<!\\)\s+\Z", "", text)


def _last_boxes(text: str) -> tuple[int, int, str] | None:
    """Returns start, end and content of the last box, joined with the boxes right before it; None without."""
    starts = [match for match in BOX.finditer(text)]
    found: tuple[int, int, str] | None = None
    # An answer in more than eight boxes is a page of them.
    for match in reversed(starts[-8:]):
        end = closing_brace(text, match.end())
        # A box that is not closed was cut off, and what came before it was not the last word.
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
            # The last box is inside this one.
            found = match.start(), end + 1, inside
        else:
            break
    return found


def math_truth(answer: str) -> str:
    """Returns the ground truth of a row, which may be the end of a solution ("#### ...") or its box."""
    _, hashes, after = answer.rpartition(_HASHES)
    if hashes:
        return _stripped(after)
    # A short truth with a box in it may be "\boxed{1} or 2", which is read whole.
    if len(answer) > 100 or answer.count(" ") > 20:
        box = _last_boxes(answer)
        if box is not None:
            return _stripped(box[2])
    return _stripped(answer)


class MathGrader(Grader):
    """Grades mathematics; see the header.

    Args:
      pool: processes that have the function of `worker`.
    """

    @staticmethod
    def worker() -> Callable[[tuple[str, str]], bool]:
        """Returns the comparison of a pair of truth and answer."""
        return lambda pair: equal(*pair)

    def __init__(self, pool: ProcessPool):
        self._pool = pool

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """Returns a verdict on each response; compares equal pairs of truth and answer once."""
        asked: dict[tuple[str, str], Any] = {}
        pairs = []
        for sample in samples:
            if fault := self.validate(sample.row):
                raise UserError(fault)
            truth, answer = math_truth(sample.row.answer), math_answer(sample.text)
            pairs.append((truth, answer))
            # Answers to one prompt are often equal.
            if answer is None or (truth, answer) in asked:
                continue
            first, second = undressed(truth), undressed(answer)
            # The parser would refuse it, in a worker.
            if len(answer) > MAX_CHARS:
                asked[truth, answer] = False
            elif first == second:
                asked[truth, answer] = True
            elif _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second):
                asked[truth, answer] = Fraction(first) == Fraction(second)
            else:
                asked[truth, answer] = self._pool.submit("math", (truth, answer))
        verdicts = []
        for truth, answer in pairs:
            if answer is None:
                verdicts.append(Verdict.of(False, None))
                continue
            shown = normalize_answer(answer) or answer[:MAX_CHARS]
            verdict = functools.partial(Verdict.of, prediction=shown)
            found = asked[truth, answer]
            is_known = isinstance(found, bool)
            verdicts.append(verdict(found) if is_known else in_worker(found, verdict, shown)())
        return verdicts

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth is empty or too long; None if it is neither."""
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
