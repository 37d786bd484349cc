"""Compares sets of real numbers as intervals: "x > 2", "(2, \\infty)" and "{x | x > 2}" are equal."""

from __future__ import annotations

from typing import Any

import mpmath

from jaxrl.rewards.answer_reader.answer_expressions import Node
from jaxrl.rewards.answer_reader.answer_kinds import (
    Answer,
    Brackets,
    Empty,
    Quantity,
    Reals,
    Relation,
    Several,
    Union,
)
from jaxrl.rewards.answer_reader.answer_values import Undecided, close, value

# Operators of inequalities.
ORDERS = ("<", ">", "le", "ge", "ne")
_INFINITY = mpmath.inf
_Piece = tuple[Any, bool, Any, bool]


def same_set(truth: Answer, said: Answer) -> bool:
    """Returns whether two answers are the same set of real numbers; False if one is no such set."""
    try:
        one, other = _pieces(truth), _pieces(said)
    except (Undecided, KeyError):
        return False
    if one is None or other is None or (one[1] and other[1] and one[1] != other[1]):
        return False
    first, second = _merged(one[0]), _merged(other[0])
    return len(first) == len(second) and all(
        a[1] == b[1] and a[3] == b[3] and _same_end(a[0], b[0]) and _same_end(a[2], b[2])
        for a, b in zip(first, second, strict=True)
    )


def _same_end(one: Any, other: Any) -> bool:
    return one == other or (mpmath.isfinite(one) and mpmath.isfinite(other) and close(one, other))


def _pieces(answer: Answer) -> tuple[list[_Piece], str] | None:
    """Returns the intervals of a set and its variable's name; None if it is no set of real numbers."""
    match answer:
        case Reals():
            return [(-_INFINITY, False, _INFINITY, False)], ""
        case Empty():
            return [], ""
        case Brackets(opening, (low, high), closing):
            a, b = _end(low), _end(high)
            return (
                ([(a, opening == "[", b, closing == "]")], "")
                if a < b or (a == b and opening + closing == "[]")
                else None
            )
        case Union(items, without):
            joined = _joined(items)
            if joined is None or not without:
                return joined
            holes = _joined(without)
            return None if holes is None else (_minus(joined[0], holes[0]), joined[1])
        case Several(items, braces) if braces:
            return [(x, True, x, True) for x in map(_end, items)], ""
        case Several(items) if all(isinstance(x, Relation) for x in items):
            return _joined(items)
        case Relation():
            return _of_order(answer)
    return None


def _joined(items: tuple[Answer, ...]) -> tuple[list[_Piece], str] | None:
    found = [_pieces(item) for item in items]
    if any(one is None for one in found):
        return None
    names = {one[1] for one in found if one is not None and one[1]}
    if len(names) > 1:
        return None
    pieces = [piece for one in found if one is not None for piece in one[0]]
    # "x > 2, x < 5" may mean a union or an intersection, so relations that overlap are refused.
    if isinstance(items[0], Relation) and len(_merged(pieces)) != len(pieces):
        return None
    return pieces, next(iter(names), "")


def _end(answer: Answer) -> Any:
    if not isinstance(answer, Quantity) or answer.unit or answer.percent:
        raise Undecided("no number")
    node, sign = answer.node, 1
    if node.kind == "neg":
        node, sign = node.parts[0], -1
    if node == Node("const", ("inf",)):
        return sign * _INFINITY
    end = value(answer.node, {})
    if abs(mpmath.im(end)) > 0:
        raise Undecided("no real number")
    return mpmath.re(end)


def _of_order(relation: Relation) -> tuple[list[_Piece], str] | None:
    operators, sides, labels = relation.operators, relation.sides, relation.labels
    places = [n for n, label in enumerate(labels) if label is not None and is_plain_name(label)]
    if len(places) != 1 or not set(operators) <= set(ORDERS) or len(operators) > 2:
        return None
    place = places[0]
    low, low_in, high, high_in = -_INFINITY, False, _INFINITY, False
    for n, operator in enumerate(operators):
        if place not in (n, n + 1):
            return None
        other = sides[n + 1] if place == n else sides[n]
        if other is None:
            return None
        end = _end(other)
        if operator == "ne":
            if len(operators) > 1:
                return None
            return [(low, False, end, False), (end, False, high, False)], labels[place] or ""
        below = (operator in (">", "ge")) == (place == n)
        if below:
            low, low_in = end, operator in ("le", "ge")
        else:
            high, high_in = end, operator in ("le", "ge")
    if len(operators) == 2 and (
        place != 1 or not low < high or mpmath.isinf(low) or mpmath.isinf(high)
    ):
        return None
    return [(low, low_in, high, high_in)], labels[place] or ""


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    done: list[_Piece] = []
    for low, low_in, high, high_in in sorted(pieces, key=lambda p: (p[0], not p[1])):
        if done:
            a, a_in, b, b_in = done[-1]
            if low < b or (low == b and (low_in or b_in)):
                if high > b:
                    b, b_in = high, high_in
                elif high == b:
                    b_in = b_in or high_in
                done[-1] = (a, a_in, b, b_in)
                continue
        done.append((low, low_in, high, high_in))
    return done


def _minus(pieces: list[_Piece], holes: list[_Piece]) -> list[_Piece]:
    for low, low_in, high, high_in in holes:
        kept: list[_Piece] = []
        for a, a_in, b, b_in in pieces:
            if high < a or low > b:
                kept.append((a, a_in, b, b_in))
                continue
            if a < low or (a == low and a_in and not low_in):
                kept.append((a, a_in, low, not low_in))
            if high < b or (high == b and b_in and not high_in):
                kept.append((high, not high_in, b, b_in))
        pieces = kept
    return pieces


def is_plain_name(label: str | None) -> bool:
    """Returns whether a label is one name, not a sum or product."""
    return label is not None and not any(sign in label for sign in "+-*/^|")
