"""Parses a text into a kind of answer (`expressions`) by its outermost structure.

The first form that matches wins:

    fixed phrases           "all real numbers", "no solution"        Reals, Empty
    digits in a base        "4210_5", "110 base 2"                   Based
    matrix environments     "\\begin{pmatrix} ... "                  Matrix
    words alone             "Evelyn", "(C)"                          Words
    commas, "or", "and"     "2, 3 and 4"                             Several
    = < > in                "x = 3", "0 < x < 1"                     Relation
    unions                  "(0, 1) \\cup (2, 3)"                    Union
    brackets                "(1, 2)", "[0, 1)", "{1, 2}"             Brackets, Several
    plus or minus           "1 \\pm 2"                               Several
    a clock, a calendar     "8:30", "3 p.m.", "1/2/2020"             Time, Words
    colons                  "3 : 4"                                  Ratio
    everything else         "42", "\\frac12 cm"                      Quantity

Several answers ("42 or 43") and negations ("\\ne 42") are parsed as such, so they equal no single number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxrl_answers.expressions import (
    Answer,
    Based,
    Brackets,
    Empty,
    Matrix,
    Node,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Several,
    Time,
    Union,
    Words,
    expression,
    num,
)
from jaxrl_answers.quantities import quantity
from jaxrl_answers.tokens import MAX_CHARS, WORDS, Token, Unreadable, is_op, tokens_of, undressed
from jaxrl_answers.values import exact

# Items are compared pair by pair.
MAX_ITEMS = 200
_MAX_DEPTH = 20


# Longer words of letters alone are recognised by their length.
_SHORT_WORDS = {"yes", "no", "true", "odd", "even", "none", "both"}
# Commands in the names of points, angles and vectors.
_NAMING_COMMANDS = {"angle", "triangle", "overline", "vec", "hat", "bar", "measuredangle"}
_RELATIONS = {"=", "<", ">", "le", "ge", "ne", "in", "approx", "equiv", "sim"}
_ENVIRONMENT = re.compile(
    r"\\begin\s*\{(?P<name>[pbvBV]?matrix|smallmatrix|array)\}\s*(?:\{[lcr| ]*\})?"
    r"(?P<body>.*)\\end\s*\{(?P=name)\}",
    re.DOTALL,
)
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
_TIME = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?(?::([0-5][0-9]))?(?:([ap])\.?m\.?)?")
_DATE = re.compile(
    r"([0-9]{1,2})/([0-9]{1,2})/([0-9]{4}|[0-9]{2})|([0-9]{4})(?:-([0-9]{1,2})-|/([0-9]{1,2})/)([0-9]{1,2})"
)
_PREAMBLE = re.compile(
    r"(?i)\A(?:(?:so|thus|hence|therefore|and)\b[\s,:]*)?(?:the\s+)?(?:final\s+)?(?:answer|solution|result|value)?\s*(?:is|are|=|:)\s*:?\s*(?=\S)"
)
_ALL_REALS = re.compile(r"(?i)\A(?:all\s+(?:the\s+)?real(?:\s+numbers?|s)?|the\s+real\s+numbers)\Z")
_NOTHING = re.compile(r"(?i)\A(?:no\s+(?:real\s+)?solutions?|none|empty\s+set)\Z")


def read_answer(text: str, *, thousands: bool = True) -> Answer:
    """Parses an answer.

    Args:
      text: answer without the sentence around it.
      thousands: whether commas outside brackets may separate thousands.

    Raises:
      Unreadable: The text is no answer of a known kind.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    text = undressed(text)
    # What follows "the answer is" may be dressed again: in dollars, in a box.
    text = undressed(_PREAMBLE.sub("", text, count=1))
    plain = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace("$", "").split())
    if _ALL_REALS.match(plain):
        return Reals()
    if _NOTHING.match(plain):
        return Empty()
    digits_in_base = _SPELLED_BASE.sub(r"\1_{\2}", text.replace("$", "").strip())
    based = _BASED.fullmatch(digits_in_base)
    # A single letter with digits below is a variable with an index: A_{12}.
    if based and (based[2].isdigit() or len(based[2]) > 1):
        sign, digits, base = based[1], based[2], based[3] or based[4]
        base = _BASES.get(base, base)
        if (
            base.isdigit()
            and 2 <= int(base[:3]) <= 36
            and all(int(c, 36) < int(base[:3]) for c in digits)
        ):
            return Based(sign + (digits.lstrip("0") or "0"), base)
    # A matrix is cut out as a text, since its rows end in "\\" and its cells in "&".
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
        # A determinant is a number, which is not computed.
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
        text = "".join((" " if t.spaced else "") + t.text for t in tokens if t.kind != "op")
        text = " ".join(text.split())
        return Words(text.lower(), capitals=text.isupper())
    # Before relations: "x = 1, y = 2" is two equations, not x = (1, y) = 2.
    several = _split(
        tokens,
        lambda t: is_op(t, ",", ";") or (t.kind == "word" and t.text.lower() in ("or", "and")),
    )
    if len(several) > 1:
        return _several(several, depth)
    relation = _relation(tokens, depth)
    if relation is not None:
        return relation
    # Before brackets: "(0, 1) \cup (2, 3)" begins and ends with one, too.
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
        branches = [_answer(branch, depth + 1) for branch in _plus_minus(tokens)]
        for n, branch in enumerate(branches):
            rational = exact(branch.node) if isinstance(branch, Quantity) else None
            if isinstance(branch, Quantity) and rational is not None:
                # "5 \pm 2" is 7 and 3.
                branches[n] = dataclasses.replace(branch, node=num(rational))
        if branches[0] == branches[1]:
            raise Unreadable("a sign without effect")
        return Several(tuple(branches))
    # Last, since sets in braces have colons as well.
    if (found := _time(tokens) or _date(tokens)) is not None:
        return found
    return _ratio(tokens) or quantity(tokens)


def _ratio(tokens: Sequence[Token]) -> Ratio | None:
    parts = _split(tokens, lambda t: is_op(t, ":"))
    return Ratio(tuple(expression(part) for part in parts)) if len(parts) > 1 else None


def _time(tokens: Sequence[Token]) -> Time | None:
    """Parses a time of day; None for other texts. "2 : 30" is a ratio, since a time is not written so."""
    letters = [t for t in tokens if t.kind != "num" and not is_op(t, ":", ".")]
    clock = tokens[: next((n for n, t in enumerate(tokens) if t in letters), len(tokens))]
    match = _TIME.fullmatch("".join(t.text for t in tokens).lower())
    # "3am" is a product, "3 am" and \text{am} are not.
    if any(t.spaced for t in clock[1:]) or (letters and not letters[0].spaced):
        return None
    if match is None:
        spelled = "".join(t.text for t in clock)
        words = bool(letters) and letters[0].text.isalpha()
        if words and ":" in spelled and _TIME.fullmatch(spelled):
            # No ratio whose last member is a product of letters: all of those with a 0 would be equal.
            raise Unreadable("a time with other words than am and pm")
        return None
    written = [part for part in match.group(1, 2, 3) if part]
    hour, *others = map(int, written)
    if not (1 <= hour <= 12 if letters else hour <= 24 and others):
        return None
    if letters:
        clock_of_day = (hour % 12 + 12 * (match[4] == "p"), *(others or [0]))
        return Time(clock_of_day, any_half=False)
    # No member of a ratio begins with a 0.
    is_ratio = not any(part[0] == "0" and len(part) > 1 for part in written)
    return Time((hour, *others), 1 <= hour <= 12, _ratio(tokens) if is_ratio else None)


def _date(tokens: Sequence[Token]) -> Words | None:
    """Parses "1/2/2020" and "2020-01-02", which are no quotients and differences; None for other texts."""
    match = _DATE.fullmatch("".join(t.text for t in tokens))
    if match is None or any(t.spaced for t in tokens[1:]):
        return None
    return Words(" ".join(str(int(part)) for part in match.groups() if part))


def _all_words(tokens: Sequence[Token]) -> bool:
    """Returns whether there are only words: in \\text, or like "Evelyn", "LQSX" and "(C)"."""
    if all(t.kind == "word" or is_op(t, "(", ")", "-", "'", ".") for t in tokens):
        return any(t.kind == "word" for t in tokens) and not any(
            t.text.lower() in ("or", "and", "not") and t.kind == "word" for t in tokens
        )
    # Letters with a capital are a name; small ones are a product, unless they are many.
    if not all(t.kind == "sym" and len(t.text) == 1 for t in tokens) or len(tokens) < 2:
        return False
    letters = "".join(t.text for t in tokens)
    return any(c.isupper() for c in letters) or len(letters) > 4 or letters in _SHORT_WORDS


def _split(tokens: Sequence[Token], at: Callable[[Token], bool]) -> list[list[Token]]:
    """Splits at the tokens outside brackets for which `at` is true."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _opens(token)
        # Half-open intervals may close with what opens elsewhere: ]0, 1[.
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
    # In "2, 3, and 4" the part between the comma and "and" is empty.
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
    *others, last = items
    # The unit of the last item is that of all: "10, 50 and 54 degrees".
    plain = [x for x in others if isinstance(x, Quantity) and not (x.unit or x.degrees)]
    if isinstance(last, Quantity) and (last.unit or last.degrees) and len(plain) == len(others):
        unit = {"unit": last.unit, "known_unit": last.known_unit, "degrees": last.degrees}
        return Several((*(dataclasses.replace(x, **unit) for x in plain), last))
    return Several(tuple(items))


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
            # "<1, 2>" is a vector.
            and not (is_op(token, "<") and n == 0 and is_op(tokens[-1], ">"))
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
    if set(operators) == {"="} and labels[0] is None and labels[-1] and len(labels[-1]) == 1:
        # "5 = x"
        sides, labels = sides[::-1], labels[::-1]
    read: list[Answer | None] = []
    for n, side in enumerate(sides):
        try:
            read.append(_answer(side, depth + 1) if side else None)
        # "f(x)" or "Area" need not be an expression, because they name one.
        except Unreadable:
            if labels[n] is None:
                raise
            read.append(None)
    return Relation(tuple(operators), tuple(read), labels)


def _label(tokens: Sequence[Token]) -> str | None:
    """Returns a name such as "x", "AB", "f(x)", "\\angle ABC", "Area" or "a + b"; None if it has a number."""
    if not tokens or len(tokens) > 30:
        return None
    named = False
    inside = 0
    for n, token in enumerate(tokens):
        inside += _opens(token)
        if token.kind == "num":
            # f(3) and x_1 are names.
            if not inside and not (n and tokens[n - 1].text == "_"):
                return None
        elif token.kind in ("sym", "word"):
            if token.kind == "word" and token.text.lower() in WORDS:
                return None
            named = True
        elif token.text not in (_NAMING_COMMANDS if token.kind == "cmd" else "(){}[]_',|+-*/^"):
            return None
    if not named:
        return None
    return "".join(t.text for t in tokens if not (t.kind == "op" and t.text in "{}"))


def _bracketed(tokens: list[Token], depth: int) -> Answer | None:
    """Parses a pair of brackets around everything; None if there is none or it belongs to an expression."""
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
        condition = _split(inner, lambda t: is_op(t, "|", ":"))
        # {x | x > 0} or {x \in R : x > 0}
        bound, texts = condition[0][:1], [t.text for t in condition[0][1:]]
        named = bool(bound) and bound[0].kind == "sym" and texts in ([], ["in", "reals"])
        if len(condition) == 2 and named:
            return _answer(condition[1], depth + 1)
        content = _answer(inner, depth + 1)
        items = content.items if isinstance(content, Several) else (content,)
        return Several(items, braces=True)
    angles = first.kind == "cmd" and pair == ("langle", "rangle")
    signs = is_op(first, "<") and is_op(last, ">")
    if angles or signs or (is_op(first, "(", "[") and is_op(last, ")", "]") and _whole(tokens)):
        inner = tokens[1:-1]
        parts = _split(inner, lambda t: is_op(t, ",", ";"))
        if len(parts) > MAX_ITEMS:
            raise Unreadable("too many parts")
        # Vectors in angles are compared as points.
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
    if is_op(first, "{") and is_op(last, "}") and _whole(tokens):
        return _answer(tokens[1:-1], depth + 1)
    return None


def _whole(tokens: Sequence[Token]) -> bool:
    """Returns whether the first bracket closes with the last token."""
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
    # 1 \pm 2 \pm 3 may mean two branches, with equal signs, or four.
    if len(places) == 2:
        raise Unreadable("two signs that may go together or not")
    return branches
