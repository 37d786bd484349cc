r"""Parses a number or an expression with its currency, unit, degrees or percent.

"5 \frac{m}{s}", "5\text{ m/s}", "5 meters per second", "5 米/秒"  ->  5, unit (meter, 1) (second, -1)
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from jaxrl_answers.expressions import Quantity, expression, num
from jaxrl_answers.tokens import (
    FUNCTIONS,
    SYMBOLS,
    UNIT_WORDS,
    UNITS,
    WORDS,
    Token,
    Unreadable,
    is_op,
)

_CURRENCIES = {"$": "dollar", "euro": "euro", "pounds": "gbp"}
# One word for a quotient of units.
_ALIASES = {
    "mph": {"mile": 1, "hour": -1},
    "kph": {"km": 1, "hour": -1},
    "mpg": {"mile": 1, "gallon": -1},
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3}


def quantity(tokens: list[Token]) -> Quantity:
    """Parses a number or an expression with its unit.

    Raises:
      Unreadable: The expression cannot be parsed, or "or", "and", "in" or "not" follows it.
    """
    sign = tokens[:1] if len(tokens) > 1 and is_op(tokens[0], "-", "+") else []
    tokens = tokens[len(sign) :]
    # First, since its primes would be derivatives and its "m" a unit.
    angle = _degrees_and_minutes(tokens, negative=bool(sign) and sign[0].text == "-")
    if angle is not None:
        return angle
    unit: dict[str, int] = {}
    if tokens and tokens[0].kind == "cmd" and tokens[0].text in _CURRENCIES:
        unit[_CURRENCIES[tokens[0].text]] = 1
        tokens = tokens[1:]
    known, degrees, percent = True, False, False
    tokens, suffix = _without_unit(tokens, after_currency=bool(unit))
    if suffix is not None:
        # "\$5 dollars" says it twice, "\$5 cents" two things.
        if suffix.powers.keys() & unit.keys() and suffix.powers != unit:
            raise Unreadable("a currency twice")
        unit |= suffix.powers
        known = suffix.known
        if is_op(tokens[-1], "."):
            tokens = tokens[:-1]
    # In \sin 30^\circ the degrees belong to the argument.
    trigonometric = any(t.kind == "cmd" and t.text in FUNCTIONS for t in tokens)
    last = tokens[-1] if len(tokens) > 1 else None
    if last is not None and last.text == "degree" and last.kind == "cmd" and not trigonometric:
        tokens = tokens[:-1]
        degrees = not unit.keys() & {"celsius", "fahrenheit"}
    elif last is not None and last.text == "%":
        tokens = tokens[:-1]
        percent = True
    named = tuple(sorted((name, power) for name, power in unit.items() if power))
    return Quantity(expression(sign + tokens), named, known, degrees, percent)


def _degrees_and_minutes(tokens: Sequence[Token], *, negative: bool) -> Quantity | None:
    """Parses "30^\\circ 15' 20''" and "30 degrees 15 minutes"; None for other texts."""
    kinds = [
        t.kind if t.kind == "num" else UNITS.get(t.text.lower(), t.text.lower()) for t in tokens
    ]
    parts = []
    for sizes in (("degree",), ("minute", "'"), ("second", "''", "'")):
        if len(kinds) > 1 and kinds[0] == "num" and kinds[1] in sizes:
            mark = 3 if kinds[1:3] == ["'", "'"] and "second" in sizes else 2
            if "second" in sizes and kinds[1] == "'" and mark == 2:
                return None
            parts.append(Fraction(tokens[0].text))
            tokens, kinds = tokens[mark:], kinds[mark:]
        elif not parts:
            return None
    if kinds or len(parts) < 2:
        return None
    # Only the last part may have decimals.
    if any(part >= 60 for part in parts[1:]) or any(p.denominator > 1 for p in parts[:-1]):
        raise Unreadable("60 minutes or more")
    value = sum((part / 60**n for n, part in enumerate(parts)), parts[0] * 0)
    return Quantity(num(-value if negative else value), degrees=True)


def _without_unit(tokens: list[Token], *, after_currency: bool) -> tuple[list[Token], _Unit | None]:
    """Splits tokens into an expression and the unit behind it."""
    for start in range(1, len(tokens)):
        first = tokens[start]
        # A unit begins with a word, a currency, or a bracket or fraction around one.
        if not (
            first.kind == "word"
            or (first.kind == "cmd" and (first.text in _CURRENCIES or first.text == "frac"))
            or (after_currency and is_op(first, "/"))
            or is_op(first, "(", "{")
        ):
            continue
        rest = tokens[start:]
        if not any(t.kind == "word" or t.text in _CURRENCIES for t in rest):
            break
        unit = _Unit(rest)
        try:
            unit.read()
        except _NoUnit:
            continue
        return tokens[:start], unit
    # Otherwise "42 if x > 0" would be read up to its number.
    if tokens and tokens[-1].kind == "word":
        raise Unreadable("words after a number")
    return tokens, None


class _NoUnit(Exception):
    """Tokens are no unit."""


class _Unit:
    """A unit read from tokens.

    Attributes:
      powers: power of each unit by name.
      known: whether all names are known units.
    """

    def __init__(self, tokens: Sequence[Token]):
        self._tokens = list(tokens)
        self.powers: dict[str, int] = {}
        self.known = True

    def read(self) -> None:
        if any(t.kind == "word" and t.text.lower() in WORDS for t in self._tokens):
            raise Unreadable("words after a number")
        power = self._product(1)
        if self._tokens:
            raise _NoUnit
        if not self.powers:
            self.powers = {"unit": power}

    def _is(self, *texts: str) -> bool:
        return bool(self._tokens) and self._tokens[0].text in texts

    def _product(self, sign: int) -> int:
        """Reads factors up to a closing bracket; returns the power that waits for its name."""
        power, direction, joined, count = 1, sign, True, 0
        while self._tokens and not self._is(")", "}"):
            token = self._tokens[0]
            word = token.text.lower() if token.kind == "word" else ""
            # "N*m", "N-m", "sq. cm", and words such as "total" that say nothing.
            if self._is("*", ".", "-", "_") or word in UNIT_WORDS - _POWERS.keys() - {"per"}:
                self._tokens.pop(0)
                joined = joined or token.text == "*"
            elif self._is("/") or word == "per":
                self._tokens.pop(0)
                direction, joined = -sign, True
            elif word in _POWERS:
                self._tokens.pop(0)
                power = _POWERS[word]
            else:
                # "42 kg apples" is no unit, "N m" is one.
                self.known &= joined or token.text in SYMBOLS
                self._factor(direction * power)
                power, direction, joined, count = 1, sign, False, count + 1
        if power == 1 and not count:
            raise _NoUnit
        return power

    def _factor(self, power: int) -> None:
        token = self._tokens.pop(0)
        if token.kind == "cmd" and token.text == "frac":
            for sign in (1, -1):
                if not self._is("{"):
                    raise _NoUnit
                self._tokens.pop(0)
                # \frac{1}{s}
                if sign == 1 and [t.text for t in self._tokens[:2]] == ["1", "}"]:
                    self._tokens.pop(0)
                else:
                    self._product(sign * power)
                self._close("}")
            return
        if is_op(token, "(", "{"):
            inside = _Unit(self._tokens)
            inside._product(1)
            self._tokens = inside._tokens
            self._close({"(": ")", "{": "}"}[token.text])
            self.known &= inside.known
            self._add(inside.powers, power * self._exponent())
        elif token.kind == "cmd" and token.text in _CURRENCIES:
            self._add({_CURRENCIES[token.text]: 1}, power)
        elif token.kind == "word":
            name = SYMBOLS.get(token.text) or UNITS.get(token.text.lower())
            self.known &= name is not None
            # Case tells mW from MW.
            name = name or (token.text if len(token.text) < 4 else token.text.lower())
            self._add(_ALIASES.get(name, {name: 1}), power * self._exponent())
        else:
            raise _NoUnit

    def _add(self, powers: dict[str, int], times: int) -> None:
        for name, power in powers.items():
            self.powers[name] = self.powers.get(name, 0) + power * times

    def _close(self, bracket: str) -> None:
        if not self._is(bracket):
            raise _NoUnit
        self._tokens.pop(0)

    def _exponent(self) -> int:
        # "squared", and "cm2"
        first = self._tokens[0] if self._tokens else None
        if (
            first is not None
            and first.kind in ("word", "num")
            and not (first.kind == "num" and first.spaced)
        ):
            power = {"squared": 2, "2": 2, "cubed": 3, "3": 3}.get(first.text.lower(), 1)
            del self._tokens[: int(power > 1)]
            return power
        if not self._is("^"):
            return 1
        texts = [t.text for t in self._tokens[1:5]]
        braced = texts[:1] == ["{"]
        texts = texts[1:] if braced else texts
        negative = texts[:1] == ["-"]
        digits = texts[int(negative) : int(negative) + 1]
        if not digits or digits[0] not in ("1", "2", "3", "4"):
            raise _NoUnit
        del self._tokens[: 2 + negative + braced]
        if braced:
            self._close("}")
        return -int(digits[0]) if negative else int(digits[0])
