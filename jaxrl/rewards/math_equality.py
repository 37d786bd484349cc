"""Whether two answers say the same, by kind: numbers by value, sets without order, intervals by their points.

    truth, said -> spelled alike? -> read (`math_answers`) -> one kind held against another -> expressions:
                   exact values, then values at points (`math_values`), then math-verify, which has the
                   last word

math-verify is only asked about expressions, as SymPy objects that were read here, without floats and with
variables that keep their case. Its own reader takes "42!" and "\\neq 42" for 42, drops the base of 4210_5,
and rounds decimals; none of that is used. Runs in a worker (`grader_pool`), since SymPy may take for ever.
"""

from __future__ import annotations

import collections
import functools
import logging
import re
from typing import Any

import math_verify
import mpmath
import sympy

from jaxrl.rewards.math_answers import (
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
    read_answer,
    spelled,
)
from jaxrl.rewards.math_expressions import Node, num
from jaxrl.rewards.math_tokens import Unreadable
from jaxrl.rewards.math_values import Undecided, agree, close, exact, proportional, symbols, value

# It warns that nobody ends it; the worker is ended from outside.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_RADIANS = Node("div", (Node("const", ("pi",)), num(180)))
_HUNDREDTH = Node("div", (num(1), num(100)))
_ARITHMETIC = {
    "num", "neg", "add", "mul", "div", "pow", "fact", "binom", "mixed", "abs", "floor", "ceil",
}  # fmt: skip
_ORDERS = ("<", ">", "le", "ge", "ne")
# An approximation beside the exact value: "1/3 \approx 0.33".
_NEAR = mpmath.mpf("0.01")


def equal(truth: str, said: str) -> bool:
    """The answer `said` is the ground truth `truth`, in another spelling at most."""
    canonical = spelled(said)
    if canonical and canonical == spelled(truth):
        return True
    truths, answers = _readings(truth), _readings(said)
    if not truths and r"\text" in truth:
        # "October 30", "8:34 p.m.": letters and digits in their order.
        return _bare(truth) == _bare(said) != ""
    # "1,234" is a number where it is the truth; who answers "1, 234" gives two.
    return any(_same(t, s) for t in truths[:1] for s in answers)


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text[a-z]*|mbox|mathrm|boxed)(?![A-Za-z])|\\[,;:! ]", "", text)
    return "".join(re.findall(r"[0-9a-z:\\]+", text.lower()))


@functools.lru_cache(maxsize=8192)
def _readings(text: str) -> tuple[Answer, ...]:
    """With commas between thousands, and without."""
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
        if (truth.opening, truth.closing) == (said.opening, said.closing):
            return len(truth.items) == len(said.items) and all(map(_same, truth.items, said.items))
        return False
    if isinstance(truth, Matrix) and isinstance(said, Matrix):
        return (
            len(truth.rows) == len(said.rows)
            and len(truth.rows[0]) == len(said.rows[0])
            and all(
                _same_value(a, b)
                for row, other in zip(truth.rows, said.rows, strict=True)
                for a, b in zip(row, other, strict=True)
            )
        )
    if isinstance(truth, Ratio) and isinstance(said, Ratio):
        return len(truth.items) == len(said.items) and all(
            _same_value(Node("mul", (a, said.items[0])), Node("mul", (b, truth.items[0])))
            for a, b in zip(truth.items, said.items, strict=True)
        )
    if isinstance(truth, Based) or isinstance(said, Based):
        return _same_digits(truth, said)
    if isinstance(truth, Quantity) and isinstance(said, Quantity):
        return _same_quantity(truth, said)
    return _same_set(truth, said)


# Words and digits


def _same_words(truth: Answer, said: Answer) -> bool:
    names = _letters(truth), _letters(said)
    if names[1] is None and isinstance(truth, Words) and isinstance(said, Quantity):
        # "odd" without \\text is read as a product.
        return len(truth.text) > 1 and not said.unit and _product(said.node) == truth.text
    return None not in names and names[0] == names[1]


def _product(node: Node) -> str | None:
    """The letters that are multiplied, in their order; None for anything else."""
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
            return _same_set(truth, said)
        # "15 39/40 or 639/40": one value, said twice.
        units = {item.unit for item in said.items if isinstance(item, Quantity)}
        return len(units) <= 1 and all(_same(truth, item) for item in said.items)
    if not isinstance(said, Several):
        if all(isinstance(x, Relation) for x in truth.items) and _same_set(truth, said):
            return True
        if isinstance(said, Brackets):
            return _same_coordinates(said, truth)
        return len(truth.items) == 1 and _same(truth.items[0], said)
    if len(truth.items) != len(said.items):
        return False
    labels = [_assigned(x) for x in truth.items]
    if len(set(labels)) > 1 and not any(isinstance(x, Relation) for x in said.items):
        # x = 1, y = 2: without names the order counts.
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
    """ "x = 1, y = 2" for the point (1, 2)."""
    labels = [_assigned(x) for x in said.items]
    named = [label for label in labels if label is not None and len(label) == 1]
    return (
        len(named) == len(truth.items) == len(said.items)
        and named == sorted(set(named))
        and (truth.opening, truth.closing) == ("(", ")")
        and all(map(_same, truth.items, said.items))
    )


# Relations


def _plain_name(label: str | None) -> bool:
    """A name of one thing: no sum or product of several."""
    return label is not None and not any(sign in label for sign in "+-*/^|")


def _said_as_relation(truth: Answer, said: Relation) -> bool:
    """ "x = 42", "x \\in [0, 1)", "84/2 = 42", "0 < x < 1" for an answer that is no relation."""
    if said.operators == ("in",):
        right = said.sides[1]
        return _plain_name(said.labels[0]) and right is not None and _same(truth, right)
    if any(op in _ORDERS for op in said.operators):
        return _same_set(truth, said)
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
            # Every side is claimed to be the answer.
            if first is None or not _same_evaluated(truth, first):
                return False
        elif not _plain_name(label) and _is_zero(truth):
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
        return _same_quantity(truth, said, evaluated=False)
    return _same(truth, said)


def _without_approximations(said: Relation) -> list[Answer | None] | None:
    """The sides of "... = exact \\approx decimal" up to the exact one; None if it is no such chain."""
    if "approx" not in said.operators:
        return list(said.sides) if set(said.operators) == {"="} else None
    place = said.operators.index("approx")
    if set(said.operators[:place]) - {"="} or place != len(said.operators) - 1:
        return None
    exact_side, rough = said.sides[place], said.sides[place + 1]
    if not isinstance(exact_side, Quantity) or not isinstance(rough, Quantity):
        return None
    if _is_numeral(exact_side.node) and exact_side.node.kind != "div":
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
    if operators & set(_ORDERS):
        return _same_set(truth, said)
    if operators != {"="}:
        return False
    last = truth.sides[-1]
    if _plain_name(truth.labels[0]) and last is not None:
        if not isinstance(said, Relation):
            return _same(last, said)
        ours, theirs = truth.labels[0], said.labels[0]
        named_alike = ours == theirs or not (_is_variable(ours) and _is_variable(theirs))
        if _plain_name(theirs) and named_alike and _said_as_relation(last, said):
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
    """The left side minus the right one."""
    left, right = equation.sides
    if not isinstance(left, Quantity) or not isinstance(right, Quantity):
        return None
    if left.unit or right.unit:
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))


# Sets of real numbers

_INFINITY = mpmath.inf
_Piece = tuple[Any, bool, Any, bool]


def _same_set(truth: Answer, said: Answer) -> bool:
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
    """Its intervals, and the variable that is in them; None if it is no set of real numbers."""
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
    # "x > 2, x < 5" may mean both at once: only what is apart is put together.
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
    places = [n for n, label in enumerate(labels) if label is not None and _plain_name(label)]
    if len(places) != 1 or not set(operators) <= set(_ORDERS) or len(operators) > 2:
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


# Quantities


def _same_quantity(truth: Quantity, said: Quantity, *, evaluated: bool = True) -> bool:
    if not _same_unit(truth, said):
        return False
    if (truth.percent and said.degrees) or (truth.degrees and said.percent):
        return False
    if evaluated and _is_numeral(truth.node) and _is_unevaluated(said.node):
        return False
    if _same_value(truth.node, said.node):
        # Who says 42% to 42 has counted in percent; who says 0.2% to 0.2 has not.
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
    """Equal in value where one of the two has a sign that stands for a factor."""
    first, second = truth.node, said.node
    if of_truth:
        first = Node("mul", (first, factor))
    else:
        second = Node("mul", (second, factor))
    return _same_value(first, second)


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


def _is_numeral(node: Node) -> bool:
    if node.kind == "neg":
        node = node.parts[0]
    if node.kind == "div":
        return all(part.kind == "num" for part in node.parts)
    return node.kind == "num"


def _is_unevaluated(node: Node) -> bool:
    """A sum or a product that is left to the reader: "6 * 7", "40 + 2"; "5 * 10^3" is none."""
    kinds = node.kinds()
    if not kinds <= _ARITHMETIC:
        return False
    # A power beside a factor is how large numbers are written.
    return "add" in kinds or (
        not kinds & {"pow", "fact", "binom"} and bool(kinds & {"mul", "abs", "floor", "ceil"})
    )


def _same_value(one: Node, other: Node) -> bool:
    if one == other:
        return True
    infinite = [_infinite(x) for x in (one, other)]
    if any(infinite):
        return infinite[0] == infinite[1]
    try:
        if not agree(one, other):
            return False
    except Undecided:
        return False
    if exact(one) is not None and exact(other) is not None:
        return True
    return _proven(one, other)


def _infinite(node: Node) -> int:
    if node.kind == "neg":
        return -_infinite(node.parts[0])
    return int(node == Node("const", ("inf",)))


@functools.lru_cache(maxsize=4096)
def _proven(one: Node, other: Node) -> bool:
    """math-verify's word on two expressions that agree wherever they were tried."""
    first, second = _sympy(one), _sympy(other)
    if sympy.expand(first - second) == 0:
        return True
    return bool(
        math_verify.verify(first, second, numeric_precision=40, strict=True, timeout_seconds=None)
    )


def _sympy(node: Node) -> Any:
    parts = node.parts
    match node.kind:
        case "num":
            return sympy.Rational(parts[0].numerator, parts[0].denominator)
        case "sym":
            return sympy.Symbol(parts[0], positive=True)
        case "const":
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[parts[0]]
    parts = [_sympy(part) for part in parts]
    match node.kind:
        case "add" | "mixed":
            return sympy.Add(*parts)
        case "mul":
            return sympy.Mul(*parts)
        case "div":
            return parts[0] / parts[1]
        case "neg":
            return -parts[0]
        case "pow":
            return sympy.Pow(*parts)
        case "log":
            return sympy.log(parts[0]) / sympy.log(10)
        case _:
            return _SYMPY[node.kind](*parts)


_SYMPY: dict[str, Any] = {
    "fact": sympy.factorial, "abs": sympy.Abs, "binom": sympy.binomial, "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "sinh": sympy.sinh, "cosh": sympy.cosh,
    "tanh": sympy.tanh, "ln": sympy.log, "exp": sympy.exp,
}  # fmt: skip
