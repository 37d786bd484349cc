"""Compares two answers kind by kind: words, several answers, relations, sets, quantities.

truth, said  ->  spelled alike?  ->  parsed (`answer_parser`)  ->  compared by kind
             ->  sets as intervals (`real_sets`), expressions by value (`quantity_equality`)
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import mpmath

from jaxrl.rewards.answer_reader.answer_expressions import Node
from jaxrl.rewards.answer_reader.answer_kinds import (
    Answer,
    Based,
    Brackets,
    Empty,
    Matrix,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Several,
    Union,
    Words,
)
from jaxrl.rewards.answer_reader.answer_markup import spelled
from jaxrl.rewards.answer_reader.answer_parser import read_answer
from jaxrl.rewards.answer_reader.answer_tokens import Unreadable
from jaxrl.rewards.answer_reader.answer_values import Undecided, exact, proportional, symbols, value
from jaxrl.rewards.answer_reader.quantity_equality import is_numeral, same_quantity, same_value
from jaxrl.rewards.answer_reader.real_sets import ORDERS, is_plain_name, same_set

# Relative error allowed in an approximation beside the exact value: "1/3 \approx 0.33".
_NEAR = mpmath.mpf("0.01")


def equal(truth: str, said: str) -> bool:
    """Returns whether the answer `said` equals the ground truth `truth`."""
    canonical = spelled(said)
    if canonical and canonical == spelled(truth):
        return True
    truths, answers = _readings(truth), _readings(said)
    if not truths and r"\text" in truth:
        # "October 30", "8:34 p.m.": compare letters and digits.
        return _bare(truth) == _bare(said) != ""
    # The truth "1,234" is a number; the answer "1, 234" may be two.
    return any(_same(t, s) for t in truths[:1] for s in answers)


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text[a-z]*|mbox|mathrm|boxed)(?![A-Za-z])|\\[,;:! ]", "", text)
    return "".join(re.findall(r"[0-9a-z:\\]+", text.lower()))


@functools.lru_cache(maxsize=8192)
def _readings(text: str) -> tuple[Answer, ...]:
    """Parses a text with commas as separators of thousands, and as separators of items."""
    found: list[Answer] = []
    for thousands in (True, False) if "," in text else (True,):
        try:
            answer = read_answer(text, thousands=thousands)
        except (Unreadable, RecursionError):
            continue
        if answer not in found:
            found.append(answer)
    return tuple(found)


def _same(truth: Answer, said: Answer) -> bool:
    if isinstance(truth, Relation):
        return _is_relation(truth, said)
    if isinstance(said, Relation):
        return _said_as_relation(truth, said)
    if isinstance(truth, Words) or isinstance(said, Words):
        return _same_words(truth, said)
    if isinstance(truth, Several) or isinstance(said, Several):
        return _same_items(truth, said)
    if isinstance(truth, Brackets) and isinstance(said, Brackets):
        brackets = (truth.opening, truth.closing) == (said.opening, said.closing)
        return brackets and _all(_same, truth.items, said.items)
    if isinstance(truth, Matrix) and isinstance(said, Matrix):
        return _all(functools.partial(_all, same_value), truth.rows, said.rows)
    if isinstance(truth, Ratio) and isinstance(said, Ratio):
        ours = [Node("mul", (item, said.items[0])) for item in truth.items]
        theirs = [Node("mul", (item, truth.items[0])) for item in said.items]
        return _all(same_value, ours, theirs)
    if isinstance(truth, Based) or isinstance(said, Based):
        return _same_digits(truth, said)
    if isinstance(truth, Quantity) and isinstance(said, Quantity):
        return same_quantity(truth, said)
    return same_set(truth, said)


def _all(same: Callable[[Any, Any], bool], ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


# Words and digits


def _same_words(truth: Answer, said: Answer) -> bool:
    names = _letters(truth), _letters(said)
    if names[1] is None and isinstance(truth, Words) and isinstance(said, Quantity):
        # "odd" without \\text is read as a product.
        return len(truth.text) > 1 and not said.unit and _product(said.node) == truth.text
    return None not in names and names[0] == names[1]


def _product(node: Node) -> str | None:
    """Returns the letters of a product of letters; None for other expressions."""
    if node.kind in ("sym", "const"):
        return node.parts[0] if len(node.parts[0]) == 1 else None
    if node.kind != "mul":
        return None
    letters = [_product(part) for part in node.parts]
    return None if None in letters else "".join(map(str, letters))


def _letters(answer: Answer) -> str | None:
    if isinstance(answer, Words):
        return answer.text
    # "C" is the choice "(C)", "c" is a variable.
    if isinstance(answer, Quantity) and answer.node.kind == "sym":
        name = answer.node.parts[0]
        return name.lower() if name.isupper() and not answer.unit else None
    return None


def _same_digits(truth: Answer, said: Answer) -> bool:
    if isinstance(truth, Based) and isinstance(said, Based):
        return truth == said
    based, other = (truth, said) if isinstance(truth, Based) else (said, truth)
    assert isinstance(based, Based), "one of the two is"
    if based.base != "10" or not isinstance(other, Quantity) or other.unit:
        return False
    return exact(other.node) == int(based.digits)


# Several answers


def _same_items(truth: Answer, said: Answer) -> bool:
    if not isinstance(truth, Several):
        assert isinstance(said, Several), "one of the two is"
        if isinstance(truth, Brackets):
            return _same_coordinates(truth, said)
        if isinstance(truth, Union | Empty | Reals):
            return same_set(truth, said)
        # "15 39/40 or 639/40": one value, said twice.
        units = {item.unit for item in said.items if isinstance(item, Quantity)}
        return len(units) <= 1 and all(_same(truth, item) for item in said.items)
    if not isinstance(said, Several):
        if all(isinstance(x, Relation) for x in truth.items) and same_set(truth, said):
            return True
        if isinstance(said, Brackets):
            return _same_coordinates(said, truth)
        return len(truth.items) == 1 and _same(truth.items[0], said)
    if len(truth.items) != len(said.items):
        return False
    labels = [_assigned(x) for x in truth.items]
    if len(set(labels)) > 1 and not any(isinstance(x, Relation) for x in said.items):
        # For the truth "x = 1, y = 2" an answer without names must keep the order.
        return all(map(_same, truth.items, said.items))
    rest = list(said.items)
    exacts = collections.Counter(_rational(x) for x in rest)
    for item in truth.items:
        key = _rational(item)
        if key is not None and not exacts[key] and all(_rational(x) is not None for x in rest):
            return False
        match = next((n for n, x in enumerate(rest) if _same(item, x)), None)
        if match is None:
            return False
        rest.pop(match)
    return True


def _rational(answer: Answer) -> Any:
    if isinstance(answer, Quantity) and not (answer.unit or answer.degrees or answer.percent):
        return exact(answer.node)
    return None


def _assigned(answer: Answer) -> str | None:
    return answer.labels[0] if isinstance(answer, Relation) else None


def _same_coordinates(truth: Brackets, said: Several) -> bool:
    """Returns whether "x = 1, y = 2" gives the point (1, 2)."""
    labels = [_assigned(x) for x in said.items]
    named = [label for label in labels if label is not None and len(label) == 1]
    return (
        len(named) == len(truth.items) == len(said.items)
        and named == sorted(set(named))
        and (truth.opening, truth.closing) == ("(", ")")
        and all(map(_same, truth.items, said.items))
    )


# Relations


def _said_as_relation(truth: Answer, said: Relation) -> bool:
    """Compares "x = 42", "x \\in [0, 1)", "84/2 = 42" or "0 < x < 1" with a truth that is no relation."""
    if said.operators == ("in",):
        right = said.sides[1]
        return is_plain_name(said.labels[0]) and right is not None and _same(truth, right)
    if any(op in ORDERS for op in said.operators):
        return same_set(truth, said)
    if isinstance(truth, Words):
        return False
    sides = _without_approximations(said)
    if sides is None:
        return False
    if len(sides) == 2 and said.labels[0] is None and _is_variable(said.labels[1]):
        # "42 = x"
        return sides[0] is not None and _same(truth, sides[0])
    if len(sides) > 1:
        label = said.labels[0]
        first, *others = sides
        if label is None:
            # Without a name on the left, each side must equal the truth.
            if first is None or not _same_evaluated(truth, first):
                return False
        elif not is_plain_name(label) and _is_zero(truth):
            # "x + y = 0" is an equation.
            return False
        sides = others
    *middle, last = sides
    if last is None or not _same(truth, last):
        return False
    return all(
        x is not None and (_same_evaluated(truth, x) or said.labels[n] is not None)
        for n, x in enumerate(middle, start=len(said.sides) - len(sides))
        if n < len(said.labels)
    )


def _same_evaluated(truth: Answer, said: Answer) -> bool:
    if isinstance(truth, Quantity) and isinstance(said, Quantity):
        return same_quantity(truth, said, evaluated=False)
    return _same(truth, said)


def _without_approximations(said: Relation) -> list[Answer | None] | None:
    """Returns the sides of "... = exact \\approx decimal" up to the exact one; None for other chains."""
    if "approx" not in said.operators:
        return list(said.sides) if set(said.operators) == {"="} else None
    place = said.operators.index("approx")
    if set(said.operators[:place]) - {"="} or place != len(said.operators) - 1:
        return None
    exact_side, rough = said.sides[place], said.sides[place + 1]
    if not isinstance(exact_side, Quantity) or not isinstance(rough, Quantity):
        return None
    if is_numeral(exact_side.node) and exact_side.node.kind != "div":
        return None
    try:
        a, b = value(exact_side.node, {}), value(rough.node, {})
    except (Undecided, KeyError):
        return None
    if abs(a - b) > _NEAR * abs(a):
        return None
    return list(said.sides[: place + 1])


def _is_zero(answer: Answer) -> bool:
    return isinstance(answer, Quantity) and exact(answer.node) == 0


def _is_relation(truth: Relation, said: Answer) -> bool:
    operators = set(truth.operators)
    if truth.operators == ("in",) and truth.sides[1] is not None:
        return _same(truth.sides[1], said)
    if truth.operators == ("approx",) and truth.sides[1] is not None:
        if (
            isinstance(said, Relation)
            and said.operators == ("approx",)
            and said.sides[1] is not None
        ):
            said = said.sides[1]
        return _same(truth.sides[1], said)
    if operators & set(ORDERS):
        return same_set(truth, said)
    if operators != {"="}:
        return False
    last = truth.sides[-1]
    if is_plain_name(truth.labels[0]) and last is not None:
        if not isinstance(said, Relation):
            return _same(last, said)
        ours, theirs = truth.labels[0], said.labels[0]
        named_alike = ours == theirs or not (_is_variable(ours) and _is_variable(theirs))
        if is_plain_name(theirs) and named_alike and _said_as_relation(last, said):
            return True
        if not (isinstance(last, Quantity) and symbols(last.node)):
            return False
    return _same_equation(truth, said)


def _is_variable(label: str | None) -> bool:
    return label is not None and len(label.partition("_")[0]) == 1


def _same_equation(truth: Relation, said: Answer) -> bool:
    if not isinstance(said, Relation) or not truth.operators == said.operators == ("=",):
        return False
    forms = [_moved(truth), _moved(said)]
    return forms[0] is not None and forms[1] is not None and proportional(forms[0], forms[1])


def _moved(equation: Relation) -> Node | None:
    """Returns the left side minus the right side."""
    left, right = equation.sides
    if not isinstance(left, Quantity) or not isinstance(right, Quantity):
        return None
    if left.unit or right.unit:
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))
