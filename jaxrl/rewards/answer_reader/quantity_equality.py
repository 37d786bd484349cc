"""Compares quantities: value, unit, percent and degrees."""

from __future__ import annotations

from jaxrl.rewards.answer_reader.answer_expressions import Node, num
from jaxrl.rewards.answer_reader.answer_kinds import Quantity
from jaxrl.rewards.answer_reader.answer_values import Undecided, agree, exact

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
    if not _same_unit(one, other):
        return False
    if (one.percent and other.degrees) or (one.degrees and other.percent):
        return False
    if evaluated and (
        (is_numeral(one.node) and _is_unevaluated(other.node))
        or (is_numeral(other.node) and _is_unevaluated(one.node))
    ):
        return False
    if same_value(one.node, other.node):
        # "42%" is 42, which counts percents; "0.2%" is not 0.2.
        return one.percent == other.percent or not _is_below_one(one.node)
    if one.percent != other.percent:
        return _scaled(one, other, one.percent, _HUNDREDTH)
    if one.degrees != other.degrees:
        return _scaled(one, other, one.degrees, _RADIANS)
    return False


def _is_below_one(node: Node) -> bool:
    rational = exact(node)
    return rational is not None and abs(rational) < 1


def _scaled(one: Quantity, other: Quantity, first: bool, factor: Node) -> bool:
    """Compares values after multiplying the one with the sign (percent, degrees) by its factor."""
    left, right = one.node, other.node
    if first:
        left = Node("mul", (left, factor))
    else:
        right = Node("mul", (right, factor))
    return same_value(left, right)


def _same_unit(one: Quantity, other: Quantity) -> bool:
    if (one.unit and (other.percent or other.degrees)) or (
        other.unit and (one.percent or one.degrees)
    ):
        return False
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
    """Returns whether two expressions are equal for all values of their variables."""
    if one == other:
        return True
    infinite = [_infinite(x) for x in (one, other)]
    if any(infinite):
        return infinite[0] == infinite[1]
    try:
        return agree(one, other)
    except Undecided:
        return False


def _infinite(node: Node) -> int:
    if node.kind == "neg":
        return -_infinite(node.parts[0])
    return int(node == Node("const", ("inf",)))
