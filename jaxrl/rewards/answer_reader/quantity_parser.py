"""Parses a number or an expression with its currency, unit, degrees or percent."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.rewards.answer_reader.answer_expressions import expression
from jaxrl.rewards.answer_reader.answer_kinds import Quantity
from jaxrl.rewards.answer_reader.answer_tokens import (
    FUNCTIONS,
    UNIT_WORDS,
    UNITS,
    WORDS,
    Token,
    Unreadable,
    is_op,
)

_SPEEDS = {"mile": "mph", "km": "kph"}


def quantity(tokens: list[Token]) -> Quantity:
    """Parses a number or an expression with its unit.

    Raises:
      Unreadable: The expression cannot be parsed, or "or", "and", "in" or "not" follows it.
    """
    unit: list[str] = []
    known, degrees, percent = True, False, False
    tokens = list(tokens)
    sign = []
    if len(tokens) > 1 and is_op(tokens[0], "-", "+"):
        sign, tokens = tokens[:1], tokens[1:]
    if tokens and tokens[0].kind == "cmd" and tokens[0].text in ("$", "euro", "pounds"):
        unit.append({"$": "dollar", "euro": "euro", "pounds": "gbp"}[tokens[0].text])
        tokens = tokens[1:]
    tokens = sign + tokens
    trigonometric = any(t.kind == "cmd" and t.text in FUNCTIONS for t in tokens)
    # The exponent of a unit.
    power = ""
    if len(tokens) > 2 and _ends_with_power(tokens):
        power = "^" + next(t.text for t in reversed(tokens) if t.kind == "num")
        while tokens[-1].kind != "word":
            tokens.pop()
    words: list[str] = []
    while len(tokens) > 1 and (
        tokens[-1].kind == "word" or (words and is_op(tokens[-1], "/", "-", "."))
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


def _ends_with_power(tokens: Sequence[Token]) -> bool:
    texts = [t.text for t in tokens]
    if texts[-1] == "}" and len(texts) > 4:
        return texts[-4:-2] == ["^", "{"] and tokens[-5].kind == "word" and tokens[-2].kind == "num"
    return texts[-2] == "^" and tokens[-3].kind == "word" and tokens[-1].kind == "num"


def _unit(words: Sequence[str], power: str) -> tuple[list[str], bool]:
    """Returns the names in the unit, and whether all of them are known."""
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
