"""Compares quantities: value, unit, percent and degrees."""

from __future__ import annotations

from jaxrl.rewards.answer_reader.answer_expressions import Node, num
from jaxrl.rewards.answer_reader.answer_kinds import Quantity
from jaxrl.rewards.answer_reader.answer_values import Undecided, agree, exact

_RADIANS = Node("div", (Node("const", ("pi",)), num(180)))
_HUNDREDTH = Node("div", (num(1), num(100)))
_ARITHMETIC = {
    "num", "neg", "add", "mul", "div", "pow", "fact", "binom", "mixed", "abs", "floor", "ceil",
}  # fmt: skip


def same_quantity(truth: Quantity, said: Quantity, *, evaluated: bool = True) -> bool:
    """Returns whether two quantities are equal.

    Args:
      truth: ground truth.
      said: answer; without a unit it has the unit of the truth.
      evaluated: whether to reject an unevaluated sum or product ("6 * 7").
    """
    if not _same_unit(truth, said):
        return False
    if (truth.percent and said.degrees) or (truth.degrees and said.percent):
        return False
    if evaluated and is_numeral(truth.node) and _is_unevaluated(said.node):
        return False
    if same_value(truth.node, said.node):
        # "42%" is right for the truth 42, which counts percents; "0.2%" is wrong for 0.2.
        share = said.percent and not truth.percent and _is_below_one(truth.node)
        return not share
    if truth.percent != said.percent:
        return _scaled(truth, said, truth.percent, _HUNDREDTH)
    if truth.degrees != said.degrees:
        return _scaled(truth, said, truth.degrees, _RADIANS)
    return False


def _is_below_one(node: Node) -> bool:
    rational = exact(node)
    return rational is not None and abs(rational) < 1


def _scaled(truth: Quantity, said: Quantity, of_truth: bool, factor: Node) -> bool:
    """Compares values after multiplying the one with the sign (percent, degrees) by its factor."""
    first, second = truth.node, said.node
    if of_truth:
        first = Node("mul", (first, factor))
    else:
        second = Node("mul", (second, factor))
    return same_value(first, second)


def _same_unit(truth: Quantity, said: Quantity) -> bool:
    ours = [u for u in truth.unit if u not in ("radian", "unit")]
    theirs = [u for u in said.unit if u not in ("radian", "unit")]
    if said.unit and (truth.percent or truth.degrees):
        return False
    if theirs and ours:
        return set(theirs) <= set(ours)
    if truth.unit and (said.percent or said.degrees):
        return False
    return not theirs or said.known_unit


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
    # Large numbers are written as a factor and a power.
    return "add" in kinds or (
        not kinds & {"pow", "fact", "binom"} and bool(kinds & {"mul", "abs", "floor", "ceil"})
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
