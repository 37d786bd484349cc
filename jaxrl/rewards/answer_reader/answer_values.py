"""What an expression is worth: exactly where it is rational, else in many digits at chosen points.

Two expressions are equal if they agree to 30 digits at eight points, negative ones among them. 30 digits tell
e^(pi sqrt(163)) from the integer next to it. A computer algebra system, asked about the pairs that agree,
never contradicted it and took most of the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from jaxrl.rewards.answer_reader.answer_expressions import Node

# Exact arithmetic above these would take longer than an answer is worth.
_MAX_BITS = 100_000
_MAX_FACTORIAL = 2000
_DIGITS = 50
_TOLERANCE = mpmath.mpf(10) ** -30
_LARGEST = mpmath.mpf(10) ** 100_000


class Undecided(Exception):
    """There is no number, or it would take too much to find it."""


@functools.lru_cache(maxsize=4096)
def exact(node: Node) -> Fraction | None:
    """The rational number that an expression is; None if it is none, or too long."""
    parts = node.parts
    match node.kind:
        case "num":
            return parts[0]
        case "sym" | "const":
            return None
    values = [exact(part) for part in parts]
    if any(value is None for value in values):
        return None
    numbers = [value for value in values if value is not None]
    try:
        return _arithmetic(node.kind, numbers)
    except ZeroDivisionError:
        return None


def _arithmetic(kind: str, numbers: list[Fraction]) -> Fraction | None:
    first = numbers[0]
    match kind:
        case "add" | "mixed":
            value = sum(numbers, Fraction(0))
        case "mul":
            value = first * numbers[1]
        case "div":
            value = first / numbers[1]
        case "neg":
            value = -first
        case "abs":
            value = abs(first)
        case "pow":
            exponent = numbers[1]
            if exponent.denominator != 1 or abs(exponent) * _bits(first) > _MAX_BITS:
                return None
            value = first ** int(exponent)
        case "fact":
            if first.denominator != 1 or not 0 <= first <= _MAX_FACTORIAL:
                return None
            value = Fraction(math.factorial(int(first)))
        case "binom":
            top, bottom = numbers
            if (
                top.denominator != 1
                or bottom.denominator != 1
                or not 0 <= bottom <= top <= _MAX_FACTORIAL
            ):
                return None
            value = Fraction(math.comb(int(top), int(bottom)))
        case "floor":
            value = Fraction(math.floor(first))
        case "ceil":
            value = Fraction(math.ceil(first))
        case _:
            return None
    return value if _bits(value) <= _MAX_BITS else None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


@functools.lru_cache(maxsize=4096)
def symbols(node: Node) -> frozenset[str]:
    """The variables of an expression."""
    return frozenset(part.parts[0] for part in node.nodes() if part.kind == "sym")


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec,
    "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "sinh": mpmath.sinh,
    "cosh": mpmath.cosh,
    "tanh": mpmath.tanh, "ln": mpmath.log, "exp": mpmath.exp, "abs": abs, "floor": mpmath.floor,
    "ceil": mpmath.ceil,
    "log": lambda x: mpmath.log(x) / mpmath.log(10),
}  # fmt: skip


def value(node: Node, at: Mapping[str, Any], *, real: bool = False) -> Any:
    """The number that an expression is where its variables have these values, to 50 digits.

    Args:
      node: the expression.
      at: values by name.
      real: no part of it may be anything but a real number, as in the root of a variable below 0.

    Raises:
      Undecided: there is none.
    """
    with mpmath.workdps(_DIGITS):
        try:
            return _value(node, at, real)
        except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise Undecided(str(error)) from error


def _value(node: Node, at: Mapping[str, Any], real: bool) -> Any:
    known = exact(node)
    if known is not None:
        return mpmath.mpf(known.numerator) / known.denominator
    if node.kind == "sym":
        return at[node.parts[0]]
    if node.kind == "const":
        name = node.parts[0]
        if name == "inf":
            raise Undecided("infinity")
        return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1)}[name]
    parts = [_value(part, at, real) for part in node.parts]
    result = _operation(node.kind, parts)
    if not mpmath.isfinite(result) or abs(result) > _LARGEST:
        raise Undecided("too large")
    if (
        real
        and isinstance(result, mpmath.mpc)
        and abs(result.imag) > _TOLERANCE * (1 + abs(result))
    ):
        raise Undecided("no real number")
    return result


def _operation(kind: str, parts: list[Any]) -> Any:
    match kind:
        case "add" | "mixed":
            return (
                mpmath.fsum(parts) if all(isinstance(p, mpmath.mpf) for p in parts) else sum(parts)
            )
        case "mul":
            return parts[0] * parts[1]
        case "div":
            return parts[0] / parts[1]
        case "neg":
            return -parts[0]
        case "pow":
            base, exponent = parts
            if base != 0 and abs(exponent * mpmath.log(abs(base) + 1)) > 200_000:
                raise Undecided("too large")
            return mpmath.power(base, exponent)
        case "fact":
            if not isinstance(parts[0], mpmath.mpf) or abs(parts[0]) > _MAX_FACTORIAL:
                raise Undecided("too large")
            return mpmath.gamma(parts[0] + 1)
        case "binom":
            if any(abs(p) > _MAX_FACTORIAL for p in parts):
                raise Undecided("too large")
            return mpmath.binomial(*parts)
        case _:
            if kind == "exp" and abs(parts[0]) > 200_000:
                raise Undecided("too large")
            return _FUNCTIONS[kind](parts[0])


# Of each variable, as many values; the last ones are negative. Chosen so that no two are in a simple ratio.
_POINTS = tuple(
    mpmath.mpf(x) / 100_003
    for x in (137_449, 59_273, 331_777, 211_811, 87_433, -73_471, -190_807, 449_003)
)


def points(names: frozenset[str]) -> list[dict[str, Any]]:
    """Values of the variables to try, 8 of them; of negative ones are those of the sixth and seventh."""
    ordered = sorted(names)
    return [
        {
            name: point * (1 + mpmath.mpf(n) * 311 / 997) + (n if k % 2 and point > 0 else 0)
            for n, name in enumerate(ordered)
        }
        for k, point in enumerate(_POINTS)
    ]


def close(one: Any, other: Any) -> bool:
    """Equal but for rounding."""
    return abs(one - other) <= _TOLERANCE * (1 + max(abs(one), abs(other)))


def agree(one: Node, other: Node) -> bool:
    """The expressions have one value wherever both have one.

    Raises:
      Undecided: they have not, at enough points.
    """
    first, second = exact(one), exact(other)
    if first is not None and second is not None:
        return first == second
    names = symbols(one) | symbols(other)
    # Roots and logarithms of variables are those of what is taken to be positive.
    imaginary = Node("const", ("i",))
    real = bool(names) and not any(imaginary in node.nodes() for node in (one, other))
    decided = 0
    for at in points(names) if names else [{}]:
        try:
            a, b = value(one, at, real=real), value(other, at, real=real)
        except Undecided:
            continue
        decided += 1
        if not close(a, b):
            return False
    if decided < (3 if names else 1):
        raise Undecided("too few points")
    return True


def proportional(one: Node, other: Node) -> bool:
    """The one is the other times a number that is not 0; so two equations "... = 0" say the same."""
    names = symbols(one) | symbols(other)
    if not names or symbols(one) != symbols(other):
        return False
    ratio, decided = None, 0
    for at in points(names):
        try:
            a, b = value(one, at), value(other, at)
        except Undecided:
            continue
        if close(a, 0) or close(b, 0):
            if close(a, 0) != close(b, 0):
                return False
            continue
        decided += 1
        ratio = a / b if ratio is None else ratio
        if not close(a / b, ratio):
            return False
    return decided >= 4
