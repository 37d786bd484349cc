r"""The grader `answer`: compares integers, fractions and short answers by their spelling (DAPO, AIME, GSM8K).

    response -> its last 300 characters -> the text after the last "Answer:", "####" or final "The answer is",
                                           else the last \boxed{}
             -> one spelling per value -> string comparison with the ground truth, spelled the same way

GSM8K's solutions end in "#### N". Markdown uses "####" for headings, so it counts only before a number.
The grader follows verl's `math_dapo` and reads the same window, so an answer must stand at the end of
the response. In addition it knows many spellings of one number: "42.", "$42$", "\boxed{42}", "042",
"42.0", "+42", "42 cm" and "84/2" are 42, "1.5e3" is 1500. Ambiguous texts are wrong: "42 or 43", "not 42",
"\pm 42", "42x", "42!". A unit may be left out, but 45 minutes are not 45 hours.

Covered: numbers, and text or LaTeX that differs in notation only. Not covered: algebra ("x+1" and
"1+x" differ). Text is matched and rewritten, never evaluated. The window bounds the work.
"""

from __future__ import annotations

import collections
import re
from fractions import Fraction

from jaxrl.errors import UserError
from jaxrl.rewards.grading import Grade
from jaxrl.rewards.markup import BOX, SCIENTIFIC, UNITS, closing_brace, without_spacing

# This also bounds the digits of a number.
_WINDOW_CHARS = 300

# "Answer:", "**Answer**:" and "**Answer:** "; Chinese responses write the full-width colon.
# Marks of emphasis before a space belong to it. A possessive group would be shorter, but Python before 3.11.5
# matches it wrongly (gh-106052).
_MARKER = r"answer[*_]*\s*[:\uFF1A](?:[*_]+(?!\S)|(?![*_]+(?!\S)))"
_HASHES = "####"
_ANSWER = re.compile(
    rf"(?i){_MARKER}\s*(?=\S)(?P<said>(?:(?!{_MARKER}|{_HASHES})[^\n])+)"
    rf"|{_HASHES}[ \t]*(?P<marked>(?:(?!{_MARKER}|#)[^\n])+)"
)
# A last sentence: "The answer is 80.", and Minerva's "The final answer is $42$. I hope it is correct."
# "Suppose the answer is 80." and "The answer is 80 or 81." are no answers.
_SENTENCE = re.compile(
    r"(?i)(?:\A|(?<=\n)|(?<=[.!?}$])(?=\s+[*_]*(?-i:[A-Z]))|(?<=answer:)|(?<=answer:\*\*))"
    r"[ \t]*(?:[*_#>-]+[ \t]*)?"
    r"(?:(?:so|thus|hence|then|therefore|finally|and),?[ \t]+)?"
    r"(?:the|my|our)[ \t]+(?:(?:final|correct)[ \t]+)?answer[ \t]+is(?:[ \t]*:\s*|[ \t]+)"
    r"(?P<said>\S[^\n]*?)(?:[ \t]*I hope it is correct\.?)?\s*\Z"
)
# A box in it is found as a box.
_IN_MATH_MODE = re.compile(r"(?!.*\\boxed)(?:\$[^$]+\$|\\\((?:(?!\\\)).)+\\\))\.?")

# Applied once, in this order. A separator becomes a space, never nothing: "4$2" is not 42.
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\u2212", "-"),
        (r"\{,\}|,\\!\s*", ","),  # 1{,}234 and 10,\!080
        (r"(?<=[0-9])\\[,;:]\s*(?=[0-9]{3}(?![0-9]))", ","),  # 1\,234
        # Space of TeX, and the signs that begin and end a formula.
        (r"(?<!\\)\\[,;:! ()\[\]]|\\q?quad(?![A-Za-z])|\\hspace\s*\{[^{}]*\}|\\?\$", " "),
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])", " "),
        (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}", r" \1 "),
        # Fractions of other sizes.
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(frac|sqrt)\s*([0-9]|[A-Za-z](?![A-Za-z]))", r"\\\1{\2}"),  # \frac12, \sqrt2
        # \frac{1}2, in two steps, since TeX takes one digit for each argument.
        (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        # x_{1} is x_1.
        (r"([_^])\s*\{([0-9A-Za-z])\}", r"\1\2"),
    )
)

# Whole words only, and only after a number: a letter after a number may be a factor ("42x", "42m").
_NAMES = "|".join(sorted(filter(str.isascii, UNITS), key=len, reverse=True))
_UNITS = (
    rf"(?:(?:square|sq\.?|cubic)\s+)?(?:{_NAMES}|degrees?|percent|\\?%|°|\^\s*\{{?\s*\\circ\s*\}}?)"
    rf"(?:\s*(?:/|per)\s*(?:{_NAMES}|h|s))?(?:\s*\^\s*[23]|[²³])?"
)

# Markup around an answer, removed until nothing changes.
_WRAPPERS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'\A[\s*`"]+|[\s*`"]+\Z', ""),
        (r"(?<!\.)[.,;\u3002]\Z", ""),  # one full stop; "42..." may go on
        (r"(?s)\A\\boxed\s*\{(.*)\}\Z", r"\1"),
        (r"\A(?:[A-Za-z]|[A-Z]{2})(?:_\w)?\s*=", ""),  # x = 42, AB = 42
    )
)

_UNIT_AT_END = re.compile(rf"(?i)(?<=[0-9)}}])\s*({_UNITS})\Z")
# "\$5", and "$5" where no second dollar ends a formula.
_DOLLARS = re.compile(r"[\s$(\[{]*[-+]?\s*(?:\\\$|\$(?=[^$]*\Z))\s*[-+]?[0-9.]")
# Names of one unit that `UNITS` does not have.
_SAME_UNITS = {
    "%": "percent", "\u00b0": "degree", "degrees": "degree", "h": "hour", "s": "second",
    "mph": "mile/hour", "kph": "km/hour",
}  # fmt: skip

_FRACTION = re.compile(r"([+-]?)\s*\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}")
_NUMERAL = rf"(?:{SCIENTIFIC}|(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(rf"([+-]?)\s*({_NUMERAL})(?:\s*/\s*({_NUMERAL}))?")


def extract_answer(response: str) -> str | None:
    r"""Returns the answer in the last 300 characters of a response; None if there is none.

    It is the text after the last "Answer:", up to the end of the line, or the number after the last
    "####", or a last sentence "The answer is N."; without these, the content of the last `\boxed{...}`.
    """
    span = answer_span(response)
    if span is not None:
        return response[slice(*span)].strip()
    text = response[-_WINDOW_CHARS:]
    opening = collections.deque(BOX.finditer(text), maxlen=1)
    if not opening:
        return None
    start = opening[0].end()
    end = closing_brace(text, start)
    return without_spacing(text[start:end]) if end >= 0 else None


def answer_span(response: str) -> tuple[int, int] | None:
    """Returns the start and end of the answer after "Answer:", "####" or "The answer is"; None if none."""
    before = max(0, len(response) - _WINDOW_CHARS)
    spans = [
        match.span("said" if match["said"] else "marked")
        for match in _ANSWER.finditer(response, before)
        if match["said"] or _is_number(match["marked"])
    ]
    # With a position instead of a cut text, a sentence that starts before the window is not read in part.
    for match in _SENTENCE.finditer(response, before):
        if _IN_MATH_MODE.fullmatch(match["said"]) or _is_number(match["said"]):
            spans.append(match.span("said"))
    if not spans:
        return None
    # The last one: a response may correct itself. Without the end of an emphasis that begins before it:
    # "**Answer: 42**", "**Answer:**42".
    start, end = max(spans)
    line = response[:start].rpartition("\n")[2]
    mark = next((mark for mark in ("**", "__", "*") if line.count(mark) % 2), None)
    said = response[start:end].rstrip()
    if mark and said.startswith(mark):
        start += len(mark)
    elif mark and said.endswith(mark):
        end = start + len(said) - len(mark)
    return start, end


def normalize_answer(text: str) -> str:
    r"""Returns one spelling for all spellings of an answer.

    Numbers become integers or fractions in lowest terms: "1,234.50" -> "2469/2". Other texts
    lose their markup only: "$x = \dfrac{\pi}2$." -> "\frac{\pi}{2}".

    Returns:
      The spelling; empty if nothing is left or if the text has more than 300 characters.
    """
    if len(text) > _WINDOW_CHARS:
        return ""
    text, _ = _undressed(text)
    # Numbers have one spelling by their value.
    if number := _number(text):
        return number
    # Keep single spaces, and only between two words or numbers and after commas.
    text = " ".join(text.split())
    text = re.sub(r"(?<![0-9A-Za-z.]) | (?![0-9A-Za-z.])", "", text)
    return text.replace(",", ", ").strip()


def grade_answer(response: str, answer: str) -> Grade:
    """Grades `response` against the ground truth `answer`, which may be a GSM8K solution ("... #### 18").

    Raises:
      UserError: The normalised ground truth is empty, so no response could be right.
    """
    truth = normalize_answer(answer.rpartition(_HASHES)[2])
    if not truth:
        raise UserError(
            f"ground truth {answer[:80]!r} cannot be graded: it must hold an answer of at most "
            f"{_WINDOW_CHARS} characters; fix or drop the row"
        )
    said = extract_answer(response) or ""
    prediction = normalize_answer(said) or None
    # Either may leave its unit out, and "5 units" says nothing about their kind.
    units = {_undressed(text)[1] for text in (said, answer.rpartition(_HASHES)[2])}
    correct = prediction == truth and len(units - {"", "unit", "radian"}) < 2
    return Grade(correct=correct, prediction=prediction)


def grade_gsm8k(response: str, solution: str) -> Grade:
    """Grades `response` against the final answer of a GSM8K solution: "... #### 1,234".

    A number alone is a solution too, because `data.row_layouts` has extracted it already.

    Raises:
      UserError: The solution has no "####" with an answer after it and is no number.
    """
    _, hashes, answer = solution.rpartition(_HASHES)
    answer = answer.strip()
    if not answer or not (hashes or _NUMBER.fullmatch(answer)):
        raise UserError(
            f"GSM8K solution ending in {solution[-80:]!r} has no final answer: it must end with "
            f"'#### N', or be the number N alone; fix the row, or use the grader 'answer' for other answers"
        )
    return grade_answer(response, answer)


def _is_number(text: str) -> bool:
    return _number(_undressed(text)[0]) is not None


def _undressed(text: str) -> tuple[str, str]:
    """Removes notation that carries no value, the markup around an answer and its unit; returns both."""
    unit = "dollar" if _DOLLARS.match(text) else ""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    before = None
    while text != before:
        before = text
        for pattern, replacement in _WRAPPERS:
            # Each change shortens the text, so the loop ends.
            text = pattern.sub(replacement, text)
        if match := _UNIT_AT_END.search(text):
            unit = unit or _unit_name(match[1])
            text = text[: match.start()]
    return text, unit


def _unit_name(unit: str) -> str:
    """Returns one name for all names of a unit: "Square Feet" and "ft^2" are "foot2"."""
    unit = re.sub(r"\^.*circ.*", "degree", unit.lower()).replace("\\", "")
    unit = unit.replace("\u00b2", "2").replace("\u00b3", "3")
    match = re.fullmatch(r"(?:(sq\w*\.?|cubic)\s+)?(.*?)[\s^]*([23]?)", unit)
    assert match is not None
    power = {"s": "2", "c": "3"}[match[1][0]] if match[1] else match[3]
    names = [UNITS.get(name, name) for name in re.split(r"\s*/\s*|\s+per\s+", match[2])]
    return "/".join(_SAME_UNITS.get(name, name) for name in names) + power


def _number(text: str) -> str | None:
    """Returns a number in lowest terms; None if `text` is no number."""
    fraction = _FRACTION.fullmatch(text)
    match = _NUMBER.fullmatch("{}{}/{}".format(*fraction.groups()) if fraction else text)
    if match is None:
        return None
    sign, above, below = match.groups()
    # Exact, so that .1 and 1/10 have one spelling, and 0.30000000000000004 is not .3.
    denominator = Fraction((below or "1").replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(above.replace(",", "")) / denominator
    return str(-value if sign == "-" else value)
