"""Compares two answers kind by kind: words, several answers, relations, sets, quantities.

one, other  ->  spelled alike?  ->  parsed (`parser`)  ->  compared by kind
             ->  sets as intervals, expressions by value (`values`)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import mpmath

from jaxrl_answers.expressions import (
    Answer,
    Based,
    Brackets,
    Empty,
    Matrix,
    Node,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Several,
    Time,
    Union,
    Words,
    num,
)
from jaxrl_answers.parser import read_answer
from jaxrl_answers.tokens import Unreadable, spelled
from jaxrl_answers.values import (
    Undecided,
    close,
    exact,
    is_numeral,
    proportional,
    same_quantity,
    same_value,
    symbols,
    value,
)

# Relative error allowed in an approximation beside the exact value: "1/3 \approx 0.33".
_NEAR = mpmath.mpf("0.01")
# Operators of inequalities.
ORDERS = ("<", ">", "le", "ge", "ne")
_INFINITY = mpmath.inf
_Piece = tuple[Any, bool, Any, bool]


def equal(one: str, other: str) -> bool:
    """Returns whether two answers are equal; the order does not matter."""
    # Answers that cannot be parsed (limits, cases) can still be spelled alike.
    canonical = spelled(one)
    if canonical and canonical == spelled(other):
        return True
    ours, theirs = _readings(one), _readings(other)
    # Without \text it is a formula, where signs count.
    if not (ours or theirs) and r"\text" in one + other:
        # "October 30", "8:34 p.m.": compare letters and digits.
        return _bare(one) == _bare(other) != ""
    # The first reading is the likelier one: "1,234" is a number, though "1, 234" is two.
    return any(_same(x, y) for x in ours[:1] for y in theirs) and any(
        _same(x, y) for x in ours for y in theirs[:1]
    )


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text[a-z]*|mbox|mathrm|boxed)(?![A-Za-z])|\\[,;:! ]", "", text)
    return "".join(re.findall(r"[0-9a-z:\\]+", text.lower()))


# All answers of a group are compared with one ground truth.
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


# A pair of different kinds is compared by the function of the kind that comes first here.
_KINDS = (
    Relation, Words, Several, Brackets, Matrix, Time, Ratio, Based, Quantity, Union, Reals, Empty
)  # fmt: skip


def _same(one: Answer, other: Answer) -> bool:
    if _KINDS.index(type(one)) > _KINDS.index(type(other)):
        one, other = other, one
    if isinstance(one, Relation):
        return _same_relations(one, other) if isinstance(other, Relation) else _gives(one, other)
    if isinstance(one, Time):
        ratio = one.ratio if isinstance(other, Ratio) else None
        return one == other or (ratio is not None and _same(ratio, other))
    match one, other:
        case Words(), _:
            return _same_words(one, other)
        case Several(), Several():
            return _same_items(one, other)
        case Several(), _:
            return _is_item(one, other)
        case Brackets(), Brackets():
            brackets = (one.opening, one.closing) == (other.opening, other.closing)
            return brackets and _all(_same, one.items, other.items)
        case Matrix(), Matrix():
            return _all(functools.partial(_all, same_value), one.rows, other.rows)
        case Ratio(), Ratio():
            return _same_ratio(one, other)
        case Based(), Based():
            return one == other
        case Based(), Quantity():
            decimal = one.base == "10" and not other.unit
            return decimal and exact(other.node) == int(one.digits)
        case Quantity(), Quantity():
            return same_quantity(one, other)
    return same_set(one, other)


def _same_ratio(one: Ratio, other: Ratio) -> bool:
    if _all(same_value, one.items, other.items):
        return True
    zeros = [[same_value(item, num(0)) for item in ratio.items] for ratio in (one, other)]
    # With a single member that is not 0 all would be equal: 5:0 and 3:0.
    if zeros[0] != zeros[1] or zeros[0].count(False) < 2:
        return False
    # a : b is c : d if a d = b c, and a and c are not 0.
    first = zeros[0].index(False)
    ours = [Node("mul", (item, other.items[first])) for item in one.items]
    theirs = [Node("mul", (item, one.items[first])) for item in other.items]
    return _all(same_value, ours, theirs)


def _all(same: Callable[[Any, Any], bool], ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


# Words


def _same_words(words: Words, other: Answer) -> bool:
    if isinstance(other, Words):
        return words.text == other.text
    # Words never equal a number with a unit, however it is spelled.
    if not isinstance(other, Quantity) or other.unit:
        return False
    # "C" is the choice "(C)", "c" is a variable.
    if other.node.kind == "sym" and other.node.parts[0].isupper():
        return other.node.parts[0].lower() == words.text
    # "odd" without \\text is read as a product. Capitals name points: "AB" is not "ab".
    return len(words.text) > 1 and not words.capitals and _product(other.node) == words.text


def _product(node: Node) -> str | None:
    """Returns the letters of a product of letters; None for other expressions."""
    if node.kind in ("sym", "const"):
        return node.parts[0] if len(node.parts[0]) == 1 else None
    if node.kind != "mul":
        return None
    letters = [_product(part) for part in node.parts]
    return None if None in letters else "".join(map(str, letters))


# Several answers


def _is_item(several: Several, other: Answer) -> bool:
    """Compares several answers with an answer that is not written as several."""
    if all(isinstance(x, Relation) for x in several.items) and same_set(several, other):
        return True
    if isinstance(other, Brackets):
        # "x = 1, y = 2" gives the point (1, 2), in the order of the alphabet, as coordinates are.
        named = [x for x in map(_assigned, several.items) if x is not None and len(x) == 1]
        return (
            len(named) == len(other.items) == len(several.items)
            and named == sorted(set(named))
            and (other.opening, other.closing) == ("(", ")")
            and all(map(_same, other.items, several.items))
        )
    if isinstance(other, Union | Empty | Reals):
        return same_set(several, other)
    # "15 39/40 or 639/40": one value, said twice.
    units = {item.unit for item in several.items if isinstance(item, Quantity)}
    return len(units) <= 1 and all(_same(item, other) for item in several.items)


def _same_items(one: Several, other: Several) -> bool:
    if len(one.items) != len(other.items):
        return False
    labels = [[_assigned(x) for x in several.items] for several in (one, other)]
    for names, unnamed in (labels, labels[::-1]):
        if len(set(names)) > 1 and not any(unnamed):
            # "x = 1, y = 2": without names the order counts.
            return all(map(_same, one.items, other.items))
    values: list[list[Any]] = [
        [
            exact(x.node)
            if isinstance(x, Quantity) and not (x.unit or x.degrees or x.percent)
            else None
            for x in several.items
        ]
        for several in (one, other)
    ]
    if None not in values[0] + values[1]:
        return sorted(values[0]) == sorted(values[1])
    # Equality is not transitive (20% is 20 and 1/5), so items are matched, not picked.
    partner: dict[int, int] = {}

    def matched(n: int, tried: set[int]) -> bool:
        for m, item in enumerate(other.items):
            if m not in tried and _same(one.items[n], item):
                tried.add(m)
                if m not in partner or matched(partner[m], tried):
                    partner[m] = n
                    return True
        return False

    return all(matched(n, set()) for n in range(len(one.items)))


def _assigned(answer: Answer) -> str | None:
    return answer.labels[0] if isinstance(answer, Relation) else None


# Relations


def _gives(relation: Relation, answer: Answer) -> bool:
    """Compares "x = 42", "x \\in [0, 1)", "84/2 = 42" or "0 < x < 1" with an answer without relation."""
    if relation.operators == ("in",):
        right = relation.sides[1]
        return is_plain_name(relation.labels[0]) and right is not None and _same(right, answer)
    if any(op in ORDERS for op in relation.operators):
        return same_set(relation, answer)
    if isinstance(answer, Words):
        return False
    if _is_rounded(relation) and _same(relation.sides[-1] or Empty(), answer):
        return True
    sides = _without_approximations(relation)
    if sides is None:
        return False
    if len(sides) > 1:
        label = relation.labels[0]
        first, *others = sides
        if label is None:
            # Without a name on the left, each side must equal the answer.
            if first is None or not _same_evaluated(first, answer):
                return False
        elif not is_plain_name(label) and (
            (isinstance(answer, Quantity) and exact(answer.node) == 0) or set(label) & set("xyz")
        ):
            # "x + y = 0" is an equation, "a + b = 42" names what was asked for.
            return False
        sides = others
    *middle, last = sides
    if last is None or not _same(last, answer):
        return False
    return all(
        x is not None and (_same_evaluated(x, answer) or relation.labels[n] is not None)
        for n, x in enumerate(middle, start=len(relation.sides) - len(sides))
        if n < len(relation.labels)
    )


def _same_evaluated(one: Answer, other: Answer) -> bool:
    if isinstance(one, Quantity) and isinstance(other, Quantity):
        return same_quantity(one, other, evaluated=False)
    return _same(one, other)


def _is_rounded(relation: Relation) -> bool:
    """Returns whether a relation rounds a value to decimals: "\\approx 8.24", "2/3 \\approx 0.67"."""
    last = relation.sides[-1]
    if relation.operators[-1] != "approx" or not isinstance(last, Quantity):
        return False
    rounded = last.node.kind == "num" and last.node.parts[0].denominator > 1
    named = len(relation.sides) == 2 and (relation.sides[0] is None or relation.labels[0])
    return rounded and (bool(named) or _without_approximations(relation) is not None)


def _without_approximations(relation: Relation) -> list[Answer | None] | None:
    """Returns the sides of "... = exact \\approx decimal" up to the exact one; None for other chains."""
    if "approx" not in relation.operators:
        return list(relation.sides) if set(relation.operators) == {"="} else None
    place = relation.operators.index("approx")
    if set(relation.operators[:place]) - {"="} or place != len(relation.operators) - 1:
        return None
    exact_side, rough = relation.sides[place], relation.sides[place + 1]
    if not isinstance(exact_side, Quantity) or not isinstance(rough, Quantity):
        return None
    # "8.24 \approx 8.2": a decimal is no exact value.
    if is_numeral(exact_side.node) and exact_side.node.kind != "div":
        return None
    try:
        a, b = value(exact_side.node, {}), value(rough.node, {})
    except (Undecided, KeyError):
        return None
    if abs(a - b) > _NEAR * abs(a):
        return None
    return list(relation.sides[: place + 1])


def _same_relations(one: Relation, other: Relation) -> bool:
    for relation, rest in ((one, other), (other, one)):
        named = is_plain_name(relation.labels[0])
        if relation.operators == ("in",) and named and relation.sides[1] is not None:
            return _same(relation.sides[1], rest)
    first, second = one.sides[-1], other.sides[-1]
    if one.operators == other.operators == ("approx",):
        return first is not None and second is not None and _same(first, second)
    for relation, rest in ((one, other), (other, one)):
        if relation.operators == ("approx",) and _is_rounded(relation):
            return relation.sides[1] is not None and _gives(rest, relation.sides[1])
    if set(one.operators + other.operators) & set(ORDERS):
        return same_set(one, other)
    names = one.labels[0], other.labels[0]
    plain = [is_plain_name(name) for name in names]
    # Two different variables: "x = 5" is not "y = 5", but "Area = 5" is.
    alike = names[0] == names[1] or any(n is None or len(n.partition("_")[0]) != 1 for n in names)
    if (all(plain) and alike) or names == (None, None):
        given = second is not None and _gives(one, second)
        if given and first is not None and _gives(other, first):
            return True
    ends = zip(plain, (first, second), strict=True)
    if any(p and not (isinstance(x, Quantity) and symbols(x.node)) for p, x in ends):
        # "x = 5" is solved: "2x = 10" is not the same answer.
        return False
    if not one.operators == other.operators == ("=",):
        return False
    # "y = 2x + 3" and "2x - y + 3 = 0" differ by a factor.
    forms = [_moved(one), _moved(other)]
    return forms[0] is not None and forms[1] is not None and proportional(forms[0], forms[1])


def _moved(equation: Relation) -> Node | None:
    """Returns the left side minus the right side."""
    left, right = equation.sides
    if not isinstance(left, Quantity) or not isinstance(right, Quantity):
        return None
    if left.unit or right.unit:
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))


# Sets of real numbers, compared as intervals: "x > 2", "(2, \\infty)" and "{x | x > 2}" are equal


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


# Without this check the difference of two infinities would be NaN, which equals nothing.
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
                # "(2, 1)" is a point, no interval.
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
    # "0 < x > 1" and "0 < x < \infty" are no intervals that somebody would write.
    if len(operators) == 2 and (
        place != 1 or not low < high or mpmath.isinf(low) or mpmath.isinf(high)
    ):
        return None
    return [(low, low_in, high, high_in)], labels[place] or ""


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    done: list[_Piece] = []
    # At one start the closed piece comes first, so that it takes the open one up.
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
