"""Evaluates expressions, exactly if rational, else to 120 digits at fixed points; compares quantities.

Two expressions are equal if they agree to 30 digits at eight points, two of them negative.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from jaxrl_answers.expressions import Node, Quantity, num
from jaxrl_answers.tokens import SYMBOLS

# Limits of exact arithmetic, which would take too long beyond them.
_MAX_BITS = 100_000
_MAX_FACTORIAL = 2000
# Longer sums are exercises, not answers.
MAX_TERMS = 20
# More than are compared, so that rounding does not reach these: e^{-100} begins after 43 digits.
_DIGITS = 120
# Of a size that separates e^(pi sqrt(163)) from the nearest integer. A computer algebra system, tried on all
# pairs that agree, never disagreed and took most of the time.
_TOLERANCE = mpmath.mpf(10) ** -30
# What is left of terms that cancel, as in \sqrt{8} - 2\sqrt{2}; smaller answers are not told apart.
_NOTHING = mpmath.mpf(10) ** -90
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
        case "sum" | "prod":
            try:
                return exact(_written_out(node, {}))
            except (Undecided, KeyError):
                return None
    numbers = [exact(part) for part in parts]
    operation = _EXACT.get(node.kind)
    if operation is None or None in numbers:
        return None
    try:
        value = operation(*numbers)
    except ZeroDivisionError:
        return None
    return value if value is not None and _bits(value) <= _MAX_BITS else None


def _exact_root(radicand: Fraction, index: Fraction) -> Fraction | None:
    # An even root of a negative number is complex, an odd one real: the cube root of -8 is -2.
    if index.denominator != 1 or not 2 <= index <= 64 or (radicand < 0 and index % 2 == 0):
        return None
    # Beyond this the digits below would not be enough.
    if _bits(radicand) > 4096:
        return None
    n = int(index)
    # 4,096 bits are 1,233 digits, of which a root has an n-th.
    with mpmath.workdps(1400 // n + 20):
        parts = [
            int(mpmath.nint(mpmath.root(part, n)))
            for part in (abs(radicand.numerator), radicand.denominator)
        ]
    root = Fraction(parts[0] if radicand >= 0 else -parts[0], parts[1])
    return root if root**n == radicand else None


# Operations on rational numbers. A result of None is irrational or would take too long.
_EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda *terms: sum(terms, Fraction(0)),
    "mixed": lambda *terms: sum(terms, Fraction(0)),
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "abs": abs,
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "pow": lambda base, n: (
        base ** int(n) if n.denominator == 1 and abs(n) * _bits(base) <= _MAX_BITS else None
    ),
    "root": _exact_root,
    "fact": lambda n: (
        Fraction(math.factorial(int(n)))
        if n.denominator == 1 and 0 <= n <= _MAX_FACTORIAL
        else None
    ),
    "binom": lambda n, k: (
        Fraction(math.comb(int(n), int(k)))
        if n.denominator == k.denominator == 1 and 0 <= k <= n <= _MAX_FACTORIAL
        else None
    ),
}


def _written_out(node: Node, at: Mapping[str, Any]) -> Node:
    """Returns the terms of a sum or product, added or multiplied."""
    variable, first, last, term = node.parts
    bounds = [value(bound, at) for bound in (first, last)]
    if any(not isinstance(x, mpmath.mpf) or x != int(x) for x in bounds):
        raise Undecided("a bound is no integer")
    low, high = map(int, bounds)
    if not 0 <= high - low < MAX_TERMS:
        raise Undecided("too many terms, or none")
    terms = [_replaced(term, variable, num(k)) for k in range(low, high + 1)]
    if node.kind == "sum":
        return Node("add", tuple(terms))
    # A product has two operands here.
    return functools.reduce(lambda x, y: Node("mul", (x, y)), terms)


def _replaced(node: Node, variable: Node, by: Node) -> Node:
    if node == variable:
        return by
    # An inner sum over the same name has a variable of its own; only its bounds can mean the outer one.
    if node.kind in ("sum", "prod") and node.parts[0] == variable:
        return dataclasses.replace(
            node,
            parts=(variable, *(_replaced(x, variable, by) for x in node.parts[1:3]), node.parts[3]),
        )
    return dataclasses.replace(
        node,
        parts=tuple(_replaced(x, variable, by) if isinstance(x, Node) else x for x in node.parts),
    )


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


@functools.lru_cache(maxsize=4096)
def symbols(node: Node) -> frozenset[str]:
    """Returns the names of the variables; that of a sum is none."""
    if node.kind == "sym":
        return frozenset((node.parts[0],))
    parts = [symbols(part) for part in node.parts if isinstance(part, Node)]
    if node.kind in ("sum", "prod"):
        return parts[1] | parts[2] | (parts[3] - parts[0])
    return frozenset().union(*parts)


def _in_bounds(node: Node) -> frozenset[str]:
    """Returns the names of the variables that count terms."""
    names = [_in_bounds(part) for part in node.parts if isinstance(part, Node)]
    if node.kind in ("sum", "prod"):
        names += [symbols(bound) for bound in node.parts[1:3]]
    return frozenset().union(*names)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec,
    "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "sinh": mpmath.sinh,
    "cosh": mpmath.cosh,
    "tanh": mpmath.tanh, "ln": mpmath.log, "exp": mpmath.exp, "abs": abs, "floor": mpmath.floor,
    "neg": operator.neg, "mul": operator.mul, "div": operator.truediv,
    "ceil": mpmath.ceil,
    "log": lambda x: mpmath.log(x) / mpmath.log(10),
}  # fmt: skip


def value(node: Node, at: Mapping[str, Any], *, real: bool = False) -> Any:
    """Evaluates an expression to 120 digits.

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
    # Exactly first: the difference of two large numbers would lose its digits.
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
    if node.kind in ("sum", "prod"):
        return _value(_written_out(node, at), at, real)
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
            real = all(isinstance(p, mpmath.mpf) for p in parts)
            return mpmath.fsum(parts) if real else sum(parts)
        case "pow":
            base, exponent = parts
            # Before mpmath tries, which would take minutes.
            if base != 0 and abs(exponent * mpmath.log(abs(base) + 1)) > 200_000:
                raise Undecided("too large")
            return mpmath.power(base, exponent)
        case "root":
            radicand, index = parts
            # mpmath takes the complex root.
            if index in (3, 5, 7, 9, 11) and isinstance(radicand, mpmath.mpf) and radicand < 0:
                return -mpmath.power(-radicand, 1 / index)
            return mpmath.power(radicand, 1 / index)
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
            return _FUNCTIONS[kind](*parts)


# Values of a variable at the points; two are negative. No two have a simple ratio.
_POINTS = tuple(
    mpmath.mpf(x) / 100_003
    for x in (137_449, 59_273, 331_777, 211_811, 87_433, -73_471, -190_807, 449_003)
)


def points(names: frozenset[str], counts: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Returns eight points: values of the variables by name, negative at the sixth and seventh point.

    Args:
      names: names of the variables.
      counts: names of those that bound a sum, which are 3, 4, 5, ...
    """
    ordered = sorted(names)
    return [
        {
            name: mpmath.mpf(3 + k + 2 * n)
            if name in counts
            else point * (1 + mpmath.mpf(n) * 311 / 997) + (n if k % 2 and point > 0 else 0)
            for n, name in enumerate(ordered)
        }
        for k, point in enumerate(_POINTS)
    ]


def close(one: Any, other: Any) -> bool:
    """Returns whether two numbers are equal except for rounding."""
    return abs(one - other) <= max(_NOTHING, _TOLERANCE * max(abs(one), abs(other)))


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
        # A ratio of numbers near 0 is noise, but both must be 0 at the same points.
        if close(a, 0) or close(b, 0):
            if close(a, 0) != close(b, 0):
                return False
            continue
        decided += 1
        ratio = a / b if ratio is None else ratio
        if not close(a / b, ratio):
            return False
    return decided >= 4


# Quantities: value, unit, percent and degrees

_RADIANS = Node("div", (Node("const", ("pi",)), num(180)))
_HUNDREDTH = Node("div", (num(1), num(100)))
_ARITHMETIC = {
    "num", "neg", "add", "mul", "div", "pow", "root", "fact", "binom", "mixed", "abs", "floor", "ceil",
}  # fmt: skip
# A number from here on may be written as a sum of powers: 2^{100} - 2.
_LARGE = 10**6


def same_quantity(one: Quantity, other: Quantity, *, evaluated: bool = True) -> bool:
    """Returns whether two quantities are equal; a unit may be left out of one of them.

    Args:
      one: quantity.
      other: quantity.
      evaluated: whether a number differs from an unevaluated sum or product ("6 * 7").
    """
    # "5 m" has no unit, since m may be a variable.
    if bool(one.unit) != bool(other.unit):
        letters = symbols(one.node) | symbols(other.node)
        one, other = _with_letters(one, letters), _with_letters(other, letters)
    if not _same_unit(one, other):
        return False
    if (one.percent and other.degrees) or (one.degrees and other.percent):
        return False
    if evaluated and (
        (is_numeral(one.node) and _is_unevaluated(other.node))
        or (is_numeral(other.node) and _is_unevaluated(one.node))
    ):
        return False
    if evaluated and (one.node.kind, other.node.kind) == ("add", "add"):
        terms = [[exact(term) for term in x.node.parts] for x in (one, other)]
        known = [sorted(term for term in some if term is not None) for some in terms]
        if not any(None in some for some in terms) and known[0] != known[1]:
            # "3 - 1" and "4 - 2" are results of games, "555-1234" and "554-1233" numbers of telephones.
            return False
    if same_value(one.node, other.node):
        # "42%" is 42, which counts percents; "0.2%" is not 0.2.
        rational = exact(one.node)
        counts = rational is None or rational == 0 or abs(rational) >= 1
        return one.percent == other.percent or counts
    for sign, factor in (("percent", _HUNDREDTH), ("degrees", _RADIANS)):
        signed, plain = (one, other) if getattr(one, sign) else (other, one)
        if getattr(signed, sign) and not getattr(plain, sign):
            return same_value(Node("mul", (signed.node, factor)), plain.node)
    return False


def _with_letters(found: Quantity, letters: frozenset[str]) -> Quantity:
    """Returns "5 meters" as the product of 5 and m, if m is among the letters; else the quantity itself."""
    node = found.node
    for name, power in found.unit:
        letter = next((x for x in sorted(letters) if SYMBOLS.get(x) == name), None)
        if letter is None:
            return found
        node = Node("mul", (node, Node("pow", (Node("sym", (letter,)), num(power)))))
    return dataclasses.replace(found, node=node, unit=())


def _same_unit(one: Quantity, other: Quantity) -> bool:
    if (one.unit and (other.percent or other.degrees)) or (
        other.unit and (one.percent or one.degrees)
    ):
        return False
    # "5 radians" is the number 5, and "5 units" says nothing about the kind of units.
    ours, theirs = (
        [u for u in q.unit if u not in (("radian", 1), ("unit", 1))] for q in (one, other)
    )
    if ours and theirs:
        return ours == theirs and one.known_unit == other.known_unit
    return one.known_unit and other.known_unit


def is_numeral(node: Node) -> bool:
    """Returns whether an expression is a number or a fraction of two numbers, signed or not."""
    if node.kind == "neg":
        node = node.parts[0]
    if node.kind == "div":
        return all(part.kind == "num" for part in node.parts)
    return node.kind == "num"


def _is_unevaluated(node: Node) -> bool:
    """Returns whether a sum or product is unevaluated: "6 * 7", "40 + 2", but not "5 * 10^3"."""
    kinds = {part.kind for part in node.nodes()}
    if not kinds <= _ARITHMETIC:
        return False
    if "add" in kinds:
        rational = exact(node)
        return "pow" not in kinds or rational is None or abs(rational) < _LARGE
    # Large numbers are written as a factor and a power.
    return not kinds & {"pow", "root", "fact", "binom"} and bool(
        kinds & {"mul", "abs", "floor", "ceil"}
    )


def same_value(one: Node, other: Node) -> bool:
    """Returns whether two expressions are equal for all values of their variables.

    They are if they agree at all points where both have a value; False if these are too few.
    """
    if one == other:
        return True
    infinite = [_infinite(x) for x in (one, other)]
    if any(infinite):
        return infinite[0] == infinite[1]
    first, second = exact(one), exact(other)
    if first is not None and second is not None:
        return first == second
    names = symbols(one) | symbols(other)
    # Without i, points where a root or logarithm is not real do not count.
    imaginary = Node("const", ("i",))
    real = bool(names) and not any(imaginary in node.nodes() for node in (one, other))
    decided = 0
    counts = _in_bounds(one) | _in_bounds(other)
    for at in points(names, counts) if names else [{}]:
        try:
            a, b = value(one, at, real=real), value(other, at, real=real)
        except Undecided:
            continue
        decided += 1
        if not close(a, b):
            return False
    # One or two points may agree by chance.
    return decided >= (3 if names else 1)


def _infinite(node: Node) -> int:
    if node.kind == "neg":
        return -_infinite(node.parts[0])
    return int(node == Node("const", ("inf",)))
