r"""What kind of answer a text is: a quantity, words, several answers, a point, an interval, a matrix, an
equation.

    "x = 3"                      Relation(("=",), (label x, 3))
    "1 \pm \sqrt{19}"            Several(two quantities)
    "(-\infty, 2) \cup [3, 5)"   Union(two Brackets)
    "20\text{ miles}"            Quantity(20, unit "mile")

A text that is several things at once ("42 or 43"), or says what is not so ("\ne 42"), is read as just
that, and so equals no single number. Comparing is the business of `math_equality`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxrl.rewards.math_expressions import Node, expression
from jaxrl.rewards.math_tokens import (
    FUNCTIONS,
    MAX_CHARS,
    UNIT_WORDS,
    UNITS,
    WORDS,
    Token,
    Unreadable,
    tokens_of,
)

MAX_ITEMS = 200
_MAX_DEPTH = 20


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An expression; `degrees`, `percent` and `unit` say what stood behind it."""

    node: Node
    unit: tuple[str, ...] = ()
    known_unit: bool = True
    degrees: bool = False
    percent: bool = False


@dataclasses.dataclass(frozen=True)
class Words:
    """Lower-case words; a single letter is one of several choices."""

    text: str


@dataclasses.dataclass(frozen=True)
class Several:
    """Answers side by side in no order; `braces` if a set is written."""

    items: tuple[Answer, ...]
    braces: bool = False


@dataclasses.dataclass(frozen=True)
class Brackets:
    """A point, a tuple, a vector or an interval."""

    opening: str
    items: tuple[Answer, ...]
    closing: str


@dataclasses.dataclass(frozen=True)
class Union:
    """Sets of real numbers put together; `without` are taken off."""

    items: tuple[Answer, ...]
    without: tuple[Answer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reals:
    """All real numbers."""


@dataclasses.dataclass(frozen=True)
class Empty:
    """The empty set."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Node, ...], ...]


@dataclasses.dataclass(frozen=True)
class Relation:
    """A chain: sides with one operator fewer between them, of = < > le ge ne in approx.

    Attributes:
      labels: of each side its text if it is a name of something, else None.
    """

    operators: tuple[str, ...]
    sides: tuple[Answer | None, ...]
    labels: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Based:
    """Digits in a base."""

    digits: str
    base: str


@dataclasses.dataclass(frozen=True)
class Ratio:
    """a : b : c."""

    items: tuple[Node, ...]


Answer = (
    Quantity
    | Words
    | Several
    | Brackets
    | Union
    | Reals
    | Empty
    | Matrix
    | Relation
    | Based
    | Ratio
)

_RELATIONS = {"=", "<", ">", "le", "ge", "ne", "in", "approx", "equiv", "sim"}
_ENVIRONMENT = re.compile(
    r"\\begin\s*\{(?P<name>[pbvBV]?matrix|smallmatrix|array)\}\s*(?:\{[lcr| ]*\})?"
    r"(?P<body>.*)\\end\s*\{(?P=name)\}",
    re.DOTALL,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BASED = re.compile(
    r"(-?)(?:\\text\s*\{)?\(?([0-9A-Z]+)\)?\}?\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{)?\s*([0-9]+|[a-z]+)\s*\}?\s*\}|([0-9]+))"
)
# 110 \text{ base } 2
_SPELLED_BASE = re.compile(
    r"\A([0-9A-Z]+)\s*(?:\\text\s*\{)?\s*(?:in\s+)?base\s*\}?\s*-?\s*([0-9]+|[a-z]+)\s*\}?\Z"
)
_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip
_PREAMBLE = re.compile(
    r"(?i)\A(?:(?:so|thus|hence|therefore|and)\b[\s,:]*)?(?:the\s+)?(?:final\s+)?(?:answer|solution|result|value)?\s*(?:is|are|=|:)\s*:?\s*(?=\S)"
)
_SPEEDS = {"mile": "mph", "km": "kph"}
_ALL_REALS = re.compile(r"(?i)\A(?:all\s+(?:the\s+)?real(?:\s+numbers?|s)?|the\s+real\s+numbers)\Z")
_NOTHING = re.compile(r"(?i)\A(?:no\s+(?:real\s+)?solutions?|none|empty\s+set)\Z")


def undressed(text: str) -> str:
    """Without Markdown, dollars, a box, and the full stop around an answer."""
    while True:
        before = text
        text = text.strip().strip("`").strip()
        if text.startswith("**") and text.endswith("**") and len(text) > 4:
            text = text[2:-2]
        text = re.sub(r"\A\*\*\s+|\s+\*\*\Z", "", text)
        text = re.sub(r"(?<![.\\])[.,;:\u3002]\s*\Z", "", text)
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and len(text) > len(opening + closing)
                and opening not in text[len(opening) : -len(closing)]
                and not text.endswith(r"\$")
            ):
                text = text[len(opening) : -len(closing)]
        box = _BOX.match(text)
        if box and text.endswith("}") and closing_brace(text, box.end()) == len(text) - 1:
            text = text[box.end() : -1]
        if text == before:
            return text


def closing_brace(text: str, start: int) -> int:
    """Where the brace closes that was opened before `start`; -1 if nowhere."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return -1


def spelled(text: str) -> str:
    """One text for answers that differ in dress alone; empty if nothing is left."""
    text = undressed(text)
    if len(text) > MAX_CHARS:
        return " ".join(text.split())
    try:
        tokens = tokens_of(text)
    except Unreadable:
        return " ".join(text.split())
    out: list[str] = []
    for n, token in enumerate(tokens):
        # Around one token braces say nothing.
        if token.text in "{}" and token.kind == "op":
            if (
                token.text == "{"
                and n + 2 < len(tokens)
                and tokens[n + 2].text == "}"
                and tokens[n + 2].kind == "op"
            ):
                continue
            if (
                token.text == "}"
                and n >= 2
                and tokens[n - 2].text == "{"
                and tokens[n - 2].kind == "op"
            ):
                continue
        out.append(token.text.lower() if token.kind == "word" else token.text)
    return " ".join(out)


def read_answer(text: str, *, thousands: bool = True) -> Answer:
    """What an answer says.

    Args:
      text: without the sentence around it.
      thousands: commas may separate thousands, outside of brackets.

    Raises:
      Unreadable: nothing that is known here.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    text = undressed(text)
    text = undressed(_PREAMBLE.sub("", text, count=1))
    plain = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace("$", "").split())
    if _ALL_REALS.match(plain):
        return Reals()
    if _NOTHING.match(plain):
        return Empty()
    digits_in_base = _SPELLED_BASE.sub(r"\1_{\2}", text.replace("$", "").strip())
    based = _BASED.fullmatch(digits_in_base)
    if based and (based[2].isdigit() or len(based[2]) > 1):
        sign, digits, base = based[1], based[2], based[3] or based[4]
        base = _BASES.get(base, base)
        if (
            base.isdigit()
            and 2 <= int(base[:3]) <= 36
            and all(int(c, 36) < int(base[:3]) for c in digits)
        ):
            return Based(sign + (digits.lstrip("0") or "0"), base)
    environment = _ENVIRONMENT.search(text)
    if environment:
        return _matrix(text, environment)
    return _answer(tokens_of(text, thousands=thousands), 0)


def _matrix(text: str, environment: re.Match[str]) -> Matrix:
    before = text[: environment.start()].strip()
    before = re.sub(r"\\(?:left|right)\b\s*[\[\](|.)]?|[\[(]\Z", "", before).strip()
    after = re.sub(r"\\(?:left|right)\b\s*[\[\](|.)]?|[\])]", "", text[environment.end() :]).strip()
    if (
        after.strip("$. ")
        or "begin" in environment["body"]
        or environment["name"] in ("vmatrix", "Vmatrix")
    ):
        raise Unreadable("something stands around a matrix")
    before = re.sub(r"\A\\?(?:mathbf\{)?[A-Za-z]\}?(?:\^\{?-1\}?)?\s*=", "", before.strip("$ "))
    rows = []
    for line in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr\b", environment["body"]):
        if line.strip() and line.strip() != r"\hline":
            rows.append(tuple(expression(tokens_of(cell)) for cell in line.split("&")))
    if not rows or len({len(row) for row in rows}) != 1:
        raise Unreadable("rows of a matrix differ in length")
    if before:
        factor = (
            Node("neg", (expression(tokens_of("1")),))
            if before == "-"
            else expression(tokens_of(before))
        )
        rows = [tuple(Node("mul", (factor, x)) for x in row) for row in rows]
    return Matrix(tuple(rows))


def _answer(tokens: Sequence[Token], depth: int) -> Answer:
    if depth > _MAX_DEPTH:
        raise Unreadable("nested too deep")
    tokens = list(tokens)
    while tokens and tokens[-1].kind == "op" and tokens[-1].text in ".,;":
        tokens.pop()
    if not tokens:
        raise Unreadable("there is nothing")
    if _all_words(tokens):
        letters = [(" " if t.spaced else "") + t.text.lower() for t in tokens if t.kind != "op"]
        return Words(" ".join("".join(letters).split()))
    several = _split(
        tokens,
        lambda t: _is_op(t, ",", ";") or (t.kind == "word" and t.text.lower() in ("or", "and")),
    )
    if len(several) > 1:
        return _several(several, depth)
    relation = _relation(tokens, depth)
    if relation is not None:
        return relation
    pieces = _split(tokens, lambda t: t.kind == "cmd" and t.text == "cup")
    if len(pieces) > 1:
        return Union(tuple(_answer(piece, depth + 1) for piece in pieces))
    pieces = _split(tokens, lambda t: t.kind == "cmd" and t.text == "setminus")
    if len(pieces) == 2:
        whole, without = (_answer(piece, depth + 1) for piece in pieces)
        return Union((whole,), (without,))
    if len(tokens) == 1 and tokens[0].kind == "cmd":
        if tokens[0].text == "reals":
            return Reals()
        if tokens[0].text == "emptyset":
            return Empty()
    bracketed = _bracketed(tokens, depth)
    if bracketed is not None:
        return bracketed
    if any(t.kind == "cmd" and t.text == "pm" for t in tokens):
        return Several(tuple(_answer(branch, depth + 1) for branch in _plus_minus(tokens)))
    ratio = _split(tokens, lambda t: _is_op(t, ":"))
    if len(ratio) > 1:
        return Ratio(tuple(expression(part) for part in ratio))
    return _quantity(tokens)


def _all_words(tokens: Sequence[Token]) -> bool:
    """Words alone; "Evelyn", "LQSX" and "(C)" without \\text are meant so, too."""
    if all(t.kind == "word" or _is_op(t, "(", ")", "-", "'", ".") for t in tokens):
        return any(t.kind == "word" for t in tokens) and not any(
            t.text.lower() in ("or", "and", "not") and t.kind == "word" for t in tokens
        )
    if not all(t.kind == "sym" and len(t.text) == 1 for t in tokens) or len(tokens) < 2:
        return False
    letters = "".join(t.text for t in tokens)
    return any(c.isupper() for c in letters) or len(letters) > 4


def _is_op(token: Token, *texts: str) -> bool:
    return token.kind == "op" and token.text in texts


def _split(tokens: Sequence[Token], at: Callable[[Token], bool]) -> list[list[Token]]:
    """Parts between the tokens that `at` takes, outside of brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _opens(token)
        if depth < 0 and token.text not in ("]", "[", ")", "("):
            raise Unreadable("brackets do not match")
        if depth == 0 and at(token):
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _opens(token: Token) -> int:
    if token.kind == "op":
        return (token.text in "([{") - (token.text in ")]}")
    if token.kind == "cmd":
        return (token.text in ("{", "langle")) - (token.text in ("}", "rangle"))
    return 0


def _several(parts: list[list[Token]], depth: int) -> Answer:
    # "2, 3, and 4": nothing stands between a comma and its "and".
    kept = [part for part in parts if part]
    if len(kept) > MAX_ITEMS:
        raise Unreadable("too many answers")
    if not parts[0] or not parts[-1] or not kept:
        raise Unreadable("an answer is missing")
    items: list[Answer] = []
    for part in kept:
        item = _answer(part, depth + 1)
        items += item.items if isinstance(item, Several) and not item.braces else (item,)
    if len(items) == 1:
        return items[0]
    return Several(tuple(_with_units(items)))


def _with_units(items: list[Answer]) -> list[Answer]:
    """ "10, 50 and 54 degrees" has degrees in all three."""
    last = items[-1]
    if not isinstance(last, Quantity) or not (last.unit or last.degrees):
        return items
    if any(not isinstance(x, Quantity) or x.unit or x.degrees for x in items[:-1]):
        return items
    return [
        dataclasses.replace(x, unit=last.unit, known_unit=last.known_unit, degrees=last.degrees)
        for x in items
        if isinstance(x, Quantity)
    ]


def _relation(tokens: list[Token], depth: int) -> Answer | None:
    operators: list[str] = []
    sides: list[list[Token]] = [[]]
    level = 0
    for n, token in enumerate(tokens):
        level += _opens(token)
        is_word_in = token.kind == "word" and token.text == "in"
        if (
            level == 0
            and token.text in _RELATIONS
            and (token.kind in ("op", "cmd") or is_word_in)
            and not (_is_op(token, "<") and n == 0 and _is_op(tokens[-1], ">"))
        ):
            operators.append({"equiv": "=", "sim": "approx"}.get(token.text, token.text))
            sides.append([])
        else:
            sides[-1].append(token)
    if not operators:
        return None
    if not sides[-1]:
        raise Unreadable("a relation without its right side")
    if len(operators) > 6:
        raise Unreadable("too long a chain")
    labels = tuple(_label(side) for side in sides)
    read: list[Answer | None] = []
    for n, side in enumerate(sides):
        try:
            read.append(_answer(side, depth + 1) if side else None)
        except Unreadable:
            if labels[n] is None:
                raise
            read.append(None)
    return Relation(tuple(operators), tuple(read), labels)


def _label(tokens: Sequence[Token]) -> str | None:
    """The name of something: "x", "AB", "f(x)", "\\angle ABC", "Area", "a + b"; it has no number."""
    if not tokens or len(tokens) > 30:
        return None
    named = False
    inside = 0
    for token in tokens:
        inside += _opens(token)
        if token.kind == "num":
            # f(3) and x_1 are names.
            if not inside and not _follows(tokens, token, "_"):
                return None
        elif token.kind in ("sym", "word"):
            if token.kind == "word" and token.text.lower() in WORDS:
                return None
            named = True
        elif (
            token.kind == "cmd"
            and token.text
            not in (
                "angle",
                "triangle",
                "overline",
                "vec",
                "hat",
                "bar",
                "measuredangle",
            )
        ) or (token.kind == "op" and token.text not in "(){}[]_',|+-*/^"):
            return None
    if not named:
        return None
    return "".join(t.text for t in tokens if not (t.kind == "op" and t.text in "{}"))


def _follows(tokens: Sequence[Token], token: Token, text: str) -> bool:
    place = next(n for n, t in enumerate(tokens) if t is token)
    return place > 0 and tokens[place - 1].text == text


def _bracketed(tokens: list[Token], depth: int) -> Answer | None:
    """What stands in one pair of brackets; None if it is an expression after all."""
    first, last = tokens[0], tokens[-1]
    pair = (first.text, last.text)
    if len(tokens) < 2:
        return None
    if first.kind == "cmd" and pair == ("{", "}") and last.kind == "cmd":
        inner = tokens[1:-1]
        if not _whole(tokens):
            return None
        if not inner:
            return Empty()
        condition = _split(inner, lambda t: _is_op(t, "|", ":"))
        if len(condition) == 2 and _is_bound(condition[0]):
            return _answer(condition[1], depth + 1)
        content = _answer(inner, depth + 1)
        items = content.items if isinstance(content, Several) else (content,)
        return Several(items, braces=True)
    angles = first.kind == "cmd" and pair == ("langle", "rangle")
    signs = _is_op(first, "<") and _is_op(last, ">")
    if angles or signs or (_is_op(first, "(", "[") and _is_op(last, ")", "]") and _whole(tokens)):
        inner = tokens[1:-1]
        parts = _split(inner, lambda t: _is_op(t, ",", ";"))
        if len(parts) > MAX_ITEMS:
            raise Unreadable("too many parts")
        if len(parts) > 1:
            opening, closing = ("(", ")") if angles or signs else pair
            return Brackets(opening, tuple(_answer(p, depth + 1) for p in parts), closing)
        if pair == ("(", ")") and inner and _all_words(inner):
            return _answer(inner, depth + 1)
        if (
            pair == ("(", ")")
            and len(inner) == 1
            and inner[0].kind == "sym"
            and inner[0].text.isupper()
        ):
            return Words(inner[0].text.lower())
    if _is_op(first, "{") and _is_op(last, "}") and _whole(tokens):
        return _answer(tokens[1:-1], depth + 1)
    return None


def _is_bound(tokens: Sequence[Token]) -> bool:
    """What stands before the bar in {x | x > 0} and {x \\in R : x > 0}."""
    kinds = [t.kind for t in tokens[:1]]
    return kinds == ["sym"] and [t.text for t in tokens[1:]] in ([], ["in", "reals"])


def _whole(tokens: Sequence[Token]) -> bool:
    """The first bracket closes with the last token."""
    depth = 0
    for n, token in enumerate(tokens):
        depth += _opens(token)
        if depth == 0:
            return n == len(tokens) - 1
    return False


def _plus_minus(tokens: Sequence[Token]) -> list[list[Token]]:
    places = [n for n, t in enumerate(tokens) if t.kind == "cmd" and t.text == "pm"]
    if len(places) > 2:
        raise Unreadable("too many signs")
    branches = [list(tokens)]
    for place in places:
        branches = [
            [*b[:place], Token("op", sign), *b[place + 1 :]] for b in branches for sign in "+-"
        ]
    # 1 \pm 2 \pm 3 has two branches with equal signs or four; who writes one of them means one thing.
    if len(places) == 2:
        raise Unreadable("two signs that may go together or not")
    return branches


def _quantity(tokens: list[Token]) -> Quantity:
    unit: list[str] = []
    known, degrees, percent = True, False, False
    tokens = list(tokens)
    sign = []
    if len(tokens) > 1 and _is_op(tokens[0], "-", "+"):
        sign, tokens = tokens[:1], tokens[1:]
    if tokens and tokens[0].kind == "cmd" and tokens[0].text in ("$", "euro", "pounds"):
        unit.append({"$": "dollar", "euro": "euro", "pounds": "gbp"}[tokens[0].text])
        tokens = tokens[1:]
    tokens = sign + tokens
    trigonometric = any(t.kind == "cmd" and t.text in FUNCTIONS for t in tokens)
    # The exponent of a unit.
    power = ""
    if len(tokens) > 2 and _ends_with_power_of_word(tokens):
        power = "^" + next(t.text for t in reversed(tokens) if t.kind == "num")
        while tokens[-1].kind != "word":
            tokens.pop()
    words: list[str] = []
    while len(tokens) > 1 and (
        tokens[-1].kind == "word" or (words and _is_op(tokens[-1], "/", "-", "."))
    ):
        words.insert(0, tokens.pop().text.lower())
    if words:
        name, known = _unit(words, power)
        unit += name
    if (
        len(tokens) > 1
        and tokens[-1].text == "degree"
        and tokens[-1].kind == "cmd"
        and not trigonometric
    ):
        tokens.pop()
        degrees = True
    elif len(tokens) > 1 and tokens[-1].text == "%":
        tokens.pop()
        percent = True
    if len(set(unit)) != len(unit):
        unit = list(dict.fromkeys(unit))
    return Quantity(expression(tokens), tuple(unit), known, degrees, percent)


def _ends_with_power_of_word(tokens: Sequence[Token]) -> bool:
    texts = [t.text for t in tokens]
    if texts[-1] == "}" and len(texts) > 4:
        return texts[-4:-2] == ["^", "{"] and tokens[-5].kind == "word" and tokens[-2].kind == "num"
    return texts[-2] == "^" and tokens[-3].kind == "word" and tokens[-1].kind == "num"


def _unit(words: Sequence[str], power: str) -> tuple[list[str], bool]:
    """The unit's name, and whether all of it is known."""
    if any(word in WORDS for word in words):
        raise Unreadable("words after a number")
    names, known = [], True
    for word in words:
        if word in ("square", "sq"):
            power = "^2"
        elif word == "cubic":
            power = "^3"
        elif word in UNITS:
            names.append(UNITS[word])
        elif word in UNIT_WORDS or word in "/-.":
            if word in ("per", "/"):
                names.append("per")
        else:
            names.append(word)
            known = False
    if names[1:] == ["per", "hour"] and names[0] in _SPEEDS:
        names = [_SPEEDS[names[0]]]
    if len(names) > 1 and "per" not in names:
        # "42 kg apples"
        known = False
    if power and names:
        names[-1] += power
    return names or ["unit" + power], known
