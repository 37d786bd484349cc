r"""A rule grader for integers, fractions and short answers (DAPO, AIME, GSM8K).

    response -> its last 300 characters -> what follows the last "Answer:" or "####", else the last \boxed{}
             -> one spelling for one value -> string equality with the ground truth, spelled alike

"####" is how GSM8K's solutions end; as it is a heading to Markdown too, it counts where a number follows.
It starts from verl's `math_dapo` and reads the same window, so an answer must stand at the end of
the response. Unlike verl it knows the many spellings of one number: "42.", "$42$", "\boxed{42}",
"042", "42.0", "+42", "42 cm" and "84/2" are 42. What may be something else is not: "42 or 43",
"not 42", "\pm 42", "42x", "42!".

Covered: numbers, and text or LaTeX that differs in notation only. Not covered: algebra ("x+1" and
"1+x" differ). Text is matched and rewritten, never evaluated, and the cut bounds all the work.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from jaxrl.errors import UserError

# Also bounds the digits of any number that is parsed.
_WINDOW_CHARS = 300

_MARKER = r"answer\**\s*[:\uFF1A]"  # the full-width colon is what Chinese responses write
_HASHES = "####"
_ANSWER = re.compile(
    rf"(?i){_MARKER}\s*(?=\S)(?P<said>(?:(?!{_MARKER}|{_HASHES})[^\n])+)"
    rf"|{_HASHES}[ \t]*(?P<marked>(?:(?!{_MARKER}|#)[^\n])+)"
)

# Applied once, in this order. What separates becomes a space, never nothing: "4$2" is not 42.
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\u2212", "-"),
        (r"\{,\}|,\\!\s*", ","),  # 1{,}234 and 10,\!080
        (r"(?<=[0-9])\\[,;:]\s*(?=[0-9]{3}(?![0-9]))", ","),  # 1\,234
        (r"(?<!\\)\\[,;:! ()\[\]]|\\?\$", " "),
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])", " "),
        (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(frac|sqrt)\s*([0-9]|[A-Za-z](?![A-Za-z]))", r"\\\1{\2}"),  # \frac12, \sqrt2
        (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (r"([_^])\s*\{([0-9A-Za-z])\}", r"\1\2"),
    )
)

# Whole words only, and only after a number: a letter after a number may be a factor ("42x", "42m").
_UNITS = (
    r"(?:(?:square|sq\.?|cubic)\s+)?"
    r"(?:units?|degrees?|radians?|dollars?|cents?|usd|euros?|percent|\\?%|°|\^\s*\{?\s*\\circ\s*\}?"
    r"|mph|km/h|miles?|feet|foot|ft|inch(?:es)?|yards?|(?:centi|milli|kilo)?met(?:er|re)s?|[ckm]m"
    r"|(?:kilo)?grams?|kg|pounds?|lbs?|ounces?|gallons?|lit(?:er|re)s?|acres?"
    r"|seconds?|min(?:ute)?s?|hours?|days?|weeks?|months?|years?"
    r"|points?|ways?|people|students?|integers?|digits?|edges?|meals?|pieces?)"
    r"(?:\s*\^\s*[23]|[²³])?"
)

# Wrappers around the answer, taken off until none is left.
_WRAPPERS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'\A[\s*`"]+|[\s*`"]+\Z', ""),
        (r"(?<!\.)[.,;\u3002]\Z", ""),  # one full stop; "42..." may go on
        (r"(?s)\A\\boxed\s*\{(.*)\}\Z", r"\1"),
        (r"\A(?:[A-Za-z]|[A-Z]{2})(?:_\w)?\s*=", ""),  # x = 42, AB = 42
        (rf"(?i)(?<=[0-9)}}])\s*{_UNITS}\Z", ""),
    )
)

_FRACTION = re.compile(r"([+-]?)\s*\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}")
_NUMERAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(rf"([+-]?)\s*({_NUMERAL})(?:\s*/\s*({_NUMERAL}))?")


@dataclasses.dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    Attributes:
      correct: the response gives the ground truth.
      prediction: the answer found in it, as `normalize_answer` spells it; None if there is none.
    """

    correct: bool
    prediction: str | None


def extract_answer(response: str) -> str | None:
    r"""What follows the last "Answer:" or "#### ", up to the line's end, else is in the last `\boxed{...}`.

    After "####" it has to be a number. Only the last 300 characters are read; None if there is nothing.
    """
    span = answer_span(response)
    if span is not None:
        return response[slice(*span)].strip()
    return _last_box(response[-_WINDOW_CHARS:])


def answer_span(response: str) -> tuple[int, int] | None:
    """From where to where the last "Answer:" or "#### " is followed by an answer; None if there is none."""
    before = max(0, len(response) - _WINDOW_CHARS)
    spans = [
        match.span("said" if match["said"] else "marked")
        for match in _ANSWER.finditer(response[before:])
        if match["said"] or _is_number(match["marked"])
    ]
    return (before + spans[-1][0], before + spans[-1][1]) if spans else None


def normalize_answer(text: str) -> str:
    r"""One spelling for all spellings of an answer.

    Numbers become integers or fractions in lowest terms: "1,234.50" -> "2469/2". Other text
    loses its dress only: "$x = \dfrac{\pi}2$." -> "\frac{\pi}{2}".

    Returns:
      The spelling; empty if nothing is left, or if the text is longer than the 300 characters in
      which an answer is looked for.
    """
    if len(text) > _WINDOW_CHARS:
        return ""
    text = _undressed(text)
    return _number(text) or _expression(text)


def grade_answer(response: str, answer: str) -> Grade:
    """Grades `response` against the ground truth `answer`, which may be a GSM8K solution ("... #### 18").

    Raises:
      UserError: the ground truth normalises to nothing, so no response could ever be right.
    """
    truth = normalize_answer(answer.rpartition(_HASHES)[2])
    if not truth:
        raise UserError(
            f"ground truth {answer[:80]!r} cannot be graded: it must hold an answer of at most "
            f"{_WINDOW_CHARS} characters; fix or drop the row"
        )
    prediction = normalize_answer(extract_answer(response) or "") or None
    return Grade(correct=prediction == truth, prediction=prediction)


def grade_gsm8k(response: str, solution: str) -> Grade:
    """`grade_answer` against the final answer of a GSM8K solution; raises as `gsm8k_answer`."""
    return grade_answer(response, gsm8k_answer(solution))


def gsm8k_answer(solution: str) -> str:
    """The final answer of a GSM8K solution as it stands there: "... #### 1,234" -> "1,234".

    A number alone is one that was taken out already, as `data.row_layouts` does.

    Raises:
      UserError: there is no "####", or nothing after it, and it is no number.
    """
    _, hashes, answer = solution.rpartition(_HASHES)
    answer = answer.strip()
    if not answer or not (hashes or _NUMBER.fullmatch(answer)):
        raise UserError(
            f"GSM8K solution ending in {solution[-80:]!r} has no final answer: it must end with "
            f"'#### N', or be the number N alone; fix the row, or use the grader 'answer' for other answers"
        )
    return answer


def _last_box(text: str) -> str | None:
    """What the last box holds, braces balanced; None if there is no box or it never closes."""
    _, opening, rest = text.rpartition(r"\boxed{")
    if not opening:
        return None
    depth = 1
    for i, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:i].strip()
    return None


def _is_number(text: str) -> bool:
    return _number(_undressed(text)) is not None


def _undressed(text: str) -> str:
    """Without notation that carries no value, and without what stands around the answer."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _unwrap(text)


def _unwrap(text: str) -> str:
    """Takes off what stands around an answer. Every change shortens the text, so this ends."""
    while True:
        before = text
        for pattern, replacement in _WRAPPERS:
            text = pattern.sub(replacement, text)
        if text == before:
            return text


def _number(text: str) -> str | None:
    """The number that `text` is, in lowest terms; None if it is anything else."""
    fraction = _FRACTION.fullmatch(text)
    match = _NUMBER.fullmatch("{}{}/{}".format(*fraction.groups()) if fraction else text)
    if match is None:
        return None
    sign, above, below = match.groups()
    denominator = Fraction((below or "1").replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(above.replace(",", "")) / denominator
    return str(-value if sign == "-" else value)


def _expression(text: str) -> str:
    """`text` with single spaces, and those only between two words or numbers and after commas."""
    text = " ".join(text.split())
    text = re.sub(r"(?<![0-9A-Za-z.]) | (?![0-9A-Za-z.])", "", text)
    return text.replace(",", ", ").strip()
