"""Graders that only look at letters: multiple choice, the exact text, a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.rewards.answer import extract_answer
from jaxrl.rewards.grading import GradingTask, Response, Verdict, empty_fault

SEARCH = "regex"
"""The name of the search among a pool's functions."""

_LABEL = re.compile(r"\(?([A-Z])\)?[.:]?")
# One letter, by itself or before what it stands for: "C", "(C)", "**C.**", "(C) 42", "C: 42", "option C".
_CHOICE = re.compile(
    r"(?i:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s+(?:is\s+)?:?\s*)?"
    r"(?:\(([A-Z])\)|([A-Z])(?![A-Za-z0-9'])(?=\s*(?:[.):\u2014-]|\Z)))[.):]?\s*(?P<rest>.*)",
    re.DOTALL,
)
_DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
_OTHER = re.compile(
    r"(?<![A-Za-z0-9'])\(?[A-Z]\)?(?![A-Za-z0-9'])|\b(?:or|and|not|nor)\b|/", re.ASCII
)
# Longer texts around a letter are arguments, not answers.
_MAX_REST = 200
# Of a ground truth, as `extract_answer` cuts a response: what is nested takes quadratic time to take off.
_MAX_TRUTH = 300


class ChoiceGrader:
    """One letter out of several: "(C)", "C.", "\\boxed{\\text{C}}", "Answer: (C) 42".

    A second letter, "or" and "not" make the answer wrong, whatever the first one is.
    """

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """A verdict on each."""
        return [self._verdict(sample) for sample in samples]

    def validate(self, row: GradingTask) -> str | None:
        """Anything but a letter."""
        short = len(row.answer) <= _MAX_TRUTH
        if short and _LABEL.fullmatch(_undressed(row.answer).upper()):
            return None
        return f"ground truth {row.answer[:80]!r} is no letter such as 'C' or '(C)'; fix or drop the row"

    def _verdict(self, sample: Response) -> Verdict:
        if fault := self.validate(sample.row):
            raise UserError(fault)
        label = _LABEL.fullmatch(_undressed(sample.row.answer).upper())
        assert label is not None, "there is no fault"
        said = choice_of(extract_answer(sample.text) or "")
        return Verdict.of(said == label[1], said)


def choice_of(answer: str) -> str | None:
    """The letter that an answer chooses; None if it chooses none, or more than one."""
    text = _undressed(answer)
    if len(text) == 1 and text.isalpha():
        text = text.upper()
    match = _CHOICE.fullmatch(text)
    if match is None or len(match["rest"]) > _MAX_REST:
        return None
    # Of what the letter stands for "I" and "A" may be words.
    if _OTHER.search(re.sub(r"\b(?:I|A)\b(?!\s*[).])", "", match["rest"])):
        return None
    return match[1] or match[2]


def _undressed(text: str) -> str:
    while (bare := _DRESS.sub(r" \1 ", text)) != text:
        text = bare
    return text.strip(" \t\n$*`.").strip()


class ExactGrader:
    """The answer, character by character, but for space around it.

    Args:
      whole: the whole response is the answer, not what follows "Answer:" or stands in a box.
      ignore_case: capital letters are small ones.
    """

    def __init__(self, *, whole: bool = False, ignore_case: bool = False):
        self._whole = whole
        self._ignore_case = ignore_case

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """A verdict on each."""
        return [self._verdict(sample) for sample in samples]

    def validate(self, row: GradingTask) -> str | None:
        """That it is empty."""
        return empty_fault(row)

    def _verdict(self, sample: Response) -> Verdict:
        if fault := self.validate(sample.row):
            raise UserError(fault)
        said = sample.text if self._whole else extract_answer(sample.text)
        right = said is not None and self._spelled(said) == self._spelled(sample.row.answer)
        return Verdict.of(right, None if said is None else said.strip()[:300])

    def _spelled(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text


class RegexGrader:
    """What a pattern finds last in the response, held against the ground truth as `ExactGrader` does.

    A pattern may take for ever on a text that is written for it, so that it is searched for in a worker.

    Args:
      pool: processes that have `load_search`'s function under the name `SEARCH`.
      pattern: with one group, which is the answer, or none; then the whole match is. "" takes the ground
        truth for the pattern, which the end of the response has to match.
      ignore_case: as the flag of `re`.
      max_chars: only the end of a response is searched.
    """

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

    def grade(self, samples: Sequence[Response]) -> list[Verdict]:
        """A verdict on each."""
        asked = []
        for sample in samples:
            if fault := self.validate(sample.row):
                raise UserError(fault)
            pattern = self._pattern or rf"(?:{sample.row.answer})\W*\Z"
            text = sample.text[-self._max_chars :]
            asked.append(self._pool.submit(SEARCH, (pattern, self._flags, text)))
        return [
            self._verdict(sample.row, future) for sample, future in zip(samples, asked, strict=True)
        ]

    def validate(self, row: GradingTask) -> str | None:
        """That it is empty, or no pattern where it has to be one."""
        if fault := empty_fault(row):
            return fault
        fault = None if self._pattern else _pattern_fault(row.answer, self._flags)
        return fault and f"ground truth {fault}"

    def _verdict(self, row: GradingTask, asked) -> Verdict:
        try:
            found: str | None = asked.result()
        except WorkerFault as fault:
            return Verdict.failed(fault.kind, str(fault))
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


def search(argument: tuple[str, int, str]) -> str | None:
    """The last match of a pattern in a text, its group if it has one; runs in a worker."""
    pattern, flags, text = argument
    found = None
    for match in re.finditer(pattern, text, flags):
        found = match[match.re.groups]
    return found
