"""Graders that compare texts: multiple choice, exact text, regular expression."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool
from jaxrl.rewards.answer import extract_answer
from jaxrl.rewards.grading import Grader, GradingTask, Response, Verdict, empty_fault, in_worker

_LABEL = re.compile(r"\(?([A-Z])\)?[.:]?")
# One letter, alone or before the text of its choice: "C", "(C)", "**C.**", "(C) 42", "C: 42", "option C".
_CHOICE = re.compile(
    r"(?i:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s+(?:is\s+)?:?\s*)?"
    r"(?:\(([A-Z])\)|([A-Z])(?![A-Za-z0-9'])(?=\s*(?:[.):\u2014-]|\Z)))[.):]?\s*(?P<rest>.*)",
    re.DOTALL,
)
_DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
_OTHER = re.compile(
    r"(?<![A-Za-z0-9'])\(?[A-Z]\)?(?![A-Za-z0-9'])|\b(?:or|and|not|nor)\b|/", re.ASCII
)
# A longer text after the letter is an argument, not an answer.
_MAX_REST = 200
# Characters of a ground truth, as in the window of `extract_answer`: nested markup takes quadratic time.
_MAX_TRUTH = 300


class ChoiceGrader(Grader):
    """Grades multiple choice: "(C)", "C.", "\\boxed{\\text{C}}", "Answer: (C) 42".

    An answer with a second letter, "or" or "not" is wrong.
    """

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth is not one letter; None if it is."""
        short = len(row.answer) <= _MAX_TRUTH
        if short and _LABEL.fullmatch(_undressed(row.answer).upper()):
            return None
        return f"ground truth {row.answer[:80]!r} is no letter such as 'C' or '(C)'; fix or drop the row"

    def begin(self, sample: Response) -> Verdict:
        label = _LABEL.fullmatch(_undressed(sample.row.answer).upper())
        assert label is not None, "there is no fault"
        said = choice_of(extract_answer(sample.text) or "")
        return Verdict.of(said == label[1], said)


def choice_of(answer: str) -> str | None:
    """Returns the letter that an answer chooses; None if it chooses none or several."""
    text = _undressed(answer)
    # A small letter alone is a choice; in a sentence it is the word "a".
    if len(text) == 1 and text.isalpha():
        text = text.upper()
    match = _CHOICE.fullmatch(text)
    if match is None or len(match["rest"]) > _MAX_REST:
        return None
    # In the text of a choice "I" and "A" may be words.
    if _OTHER.search(re.sub(r"\b(?:I|A)\b(?!\s*[).])", "", match["rest"])):
        return None
    return match[1] or match[2]


def _undressed(text: str) -> str:
    while (bare := _DRESS.sub(r" \1 ", text)) != text:
        text = bare
    return text.strip(" \t\n$*`.").strip()


class ExactGrader(Grader):
    """Compares the answer character by character, except for space.

    Args:
      whole: whether the whole response is the answer, instead of the text after "Answer:" or in a box.
      ignore_case: whether to ignore case.
    """

    def __init__(self, *, whole: bool = False, ignore_case: bool = False):
        self._whole = whole
        self._ignore_case = ignore_case

    def begin(self, sample: Response) -> Verdict:
        said = sample.text if self._whole else extract_answer(sample.text)
        right = said is not None and self._spelled(said) == self._spelled(sample.row.answer)
        return Verdict.of(right, None if said is None else said.strip()[:300])

    def _spelled(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text


class RegexGrader(Grader):
    """Compares the last match of a pattern with the ground truth, space around them aside.

    Workers search, because some texts make a pattern run for ever.

    Args:
      pool: processes that have the function of `worker`.
      pattern: regular expression. Its group is the answer, or the whole match if it has none. "" uses the
        ground truth as the pattern, which must match the end of the response.
      ignore_case: whether to ignore case.
      max_chars: number of characters searched, from the end of the response.
    """

    @staticmethod
    def worker() -> Callable[[tuple[str, int, str]], str | None]:
        """Returns the search for the last match of a pattern in a text, or for its group if it has one."""

        def search(argument: tuple[str, int, str]) -> str | None:
            pattern, flags, text = argument
            found = None
            for match in re.finditer(pattern, text, flags):
                found = match[match.re.groups]
            return found

        return search

    def __init__(
        self,
        pool: ProcessPool,
        *,
        pattern: str = "",
        ignore_case: bool = False,
        max_chars: int = 2000,
    ):
        self._pool = pool
        self._flags = int(re.IGNORECASE) if ignore_case else 0
        self._max_chars = max_chars
        self._pattern = pattern
        if fault := _pattern_fault(pattern, self._flags):
            raise UserError(f"grader_options.pattern {fault}")

    def begin(self, sample: Response) -> Callable[[], Verdict]:
        # At the end, or a response that lists all answers would be right.
        pattern = self._pattern or rf"(?:{sample.row.answer})\W*\Z"
        text = sample.text[-self._max_chars :]
        future = self._pool.submit("regex", (pattern, self._flags, text))
        return in_worker(future, functools.partial(self._verdict, sample.row))

    def validate(self, row: GradingTask) -> str | None:
        """Returns why the ground truth is empty or a malformed pattern; None if it is neither."""
        if fault := empty_fault(row):
            return fault
        fault = None if self._pattern else _pattern_fault(row.answer, self._flags)
        return fault and f"ground truth {fault}"

    def _verdict(self, row: GradingTask, found: str | None) -> Verdict:
        if not self._pattern:
            return Verdict.of(found is not None, found)
        same = str.casefold if self._flags else str.strip
        right = found is not None and same(found.strip()) == same(row.answer.strip())
        return Verdict.of(right, found)


def _pattern_fault(pattern: str, flags: int) -> str | None:
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        return f"{pattern!r} is no regular expression: {error}"
    if compiled.groups > 1:
        return f"{pattern!r} has {compiled.groups} groups; write one around the answer, others as (?:...)"
    return None
