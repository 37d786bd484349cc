"""Evaluates expressions: exactly if they are rational, else to 50 digits at fixed points.

Two expressions are equal if they agree to 30 digits at eight points, two of them negative. 30 digits separate
e^(pi sqrt(163)) from the nearest integer. A computer algebra system, tried on all pairs that agree, never
disagreed and took most of the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from jaxrl.rewards.answer_reader.answer_expressions import Node

# Limits of exact arithmetic, which would take too long beyond them.
_MAX_BITS = 100_000
_MAX_FACTORIAL = 2000
_DIGITS = 50
_TOLERANCE = mpmath.mpf(10) ** -30
_LARGEST = mpmath.mpf(10) ** 100_000


class Undecided(Exception):
    """An expression has no value, or computing it would take too long."""


@functools.lru_cache(maxsize=4096)
def exact(node: Node) -> Fraction | None:
    """Returns the value of a rational expression; None if it is not rational or too long."""
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
    """Returns the names of the variables."""
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
    """Evaluates an expression to 50 digits.

    Args:
      node: expression.
      at: values of its variables by name.
      real: whether each part must be real; the root of a negative variable is not.

    Raises:
      Undecided: The expression has no such value, or it is too large.
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


# Values of a variable at the points; two are negative. No two have a simple ratio.
_POINTS = tuple(
    mpmath.mpf(x) / 100_003
    for x in (137_449, 59_273, 331_777, 211_811, 87_433, -73_471, -190_807, 449_003)
)


def points(names: frozenset[str]) -> list[dict[str, Any]]:
    """Returns eight points: values of the variables by name, negative at the sixth and seventh point."""
    ordered = sorted(names)
    return [
        {
            name: point * (1 + mpmath.mpf(n) * 311 / 997) + (n if k % 2 and point > 0 else 0)
            for n, name in enumerate(ordered)
        }
        for k, point in enumerate(_POINTS)
    ]


def close(one: Any, other: Any) -> bool:
    """Returns whether two numbers are equal except for rounding."""
    return abs(one - other) <= _TOLERANCE * (1 + max(abs(one), abs(other)))


def agree(one: Node, other: Node) -> bool:
    """Returns whether two expressions have equal values at all points where both have one.

    Raises:
      Undecided: Both have a value at too few points.
    """
    first, second = exact(one), exact(other)
    if first is not None and second is not None:
        return first == second
    names = symbols(one) | symbols(other)
    # Without i, points where a root or logarithm is not real do not count.
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
    """Returns whether the ratio is constant and not 0: then "a = 0" and "b = 0" are the same equation."""
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
