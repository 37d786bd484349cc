r"""Kinds of answers, and a parser of expressions by recursive descent.

Expressions are those of school and contest mathematics.

    2\sin^2 x + 1\frac{1}{2}  ->  Node("add", (Node("mul", (2, Node("pow", ...))), 3/2))

Ambiguous texts are refused: two numbers side by side ("4 2"), a number after a letter ("x2"), a sign after a
sign ("--42"), an unknown command. "2\frac{1}{2}" is a mixed number, `i` the imaginary unit,
`e` Euler's number, \log the decimal logarithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction

from jaxrl_answers.tokens import FUNCTIONS, Token, Unreadable

# Below the limit of Python, which would end the worker.
_MAX_DEPTH = 60
_CONSTANTS = {"pi": "pi", "infty": "inf"}


@dataclasses.dataclass(frozen=True)
class Node:
    """An expression.

    Attributes:
      kind: "num", "sym", "const", "add", "mul", "div", "pow", "neg", "mixed", "fact", "abs", "binom",
        "floor", "ceil", "root", "sum", "prod", or a function's name.
      parts: operands; for "num" a value, for "sym" and "const" a name; for "sum" and "prod" the variable, its
        first and last value, and the term.
    """

    kind: str
    parts: tuple

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes of the expression, this one first."""
        yield self
        for part in self.parts:
            if isinstance(part, Node):
                yield from part.nodes()


# The kinds of answers:
#
#     "x = 3"                      Relation(("=",), (label x, 3))
#     "1 \pm \sqrt{19}"            Several(two quantities)
#     "(-\infty, 2) \cup [3, 5)"   Union(two Brackets)
#     "20\text{ miles}"            Quantity(20, unit (("mile", 1),))


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An expression with its unit.

    Attributes:
      node: expression without the unit.
      unit: names of units with their powers, sorted; empty without one.
      known_unit: whether all words of the unit are known units.
      degrees: whether a degree sign follows.
      percent: whether a percent sign follows.
    """

    node: Node
    unit: tuple[tuple[str, int], ...] = ()
    known_unit: bool = True
    degrees: bool = False
    percent: bool = False


@dataclasses.dataclass(frozen=True)
class Words:
    """Words in lower case; a single letter is the label of a choice.

    Attributes:
      text: words in lower case.
      capitals: whether they were written in capitals only, as the names of points are.
    """

    text: str
    capitals: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Several:
    """Several answers in any order; `braces` marks a set in braces."""

    items: tuple[Answer, ...]
    braces: bool = False


@dataclasses.dataclass(frozen=True)
class Brackets:
    """A point, a tuple, a vector or an interval."""

    opening: str
    items: tuple[Answer, ...]
    closing: str


@dataclasses.dataclass(frozen=True)
class Union:
    """The union of sets of real numbers, minus the sets of `without`."""

    items: tuple[Answer, ...]
    without: tuple[Answer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reals:
    """All real numbers."""


@dataclasses.dataclass(frozen=True)
class Empty:
    """The empty set."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Node, ...], ...]


@dataclasses.dataclass(frozen=True)
class Relation:
    """A chain of equations or inequalities, such as 0 < x < 1.

    Attributes:
      operators: operators between the sides: = < > le ge ne in approx.
      sides: parsed sides, one more than operators; None if a side is missing or only a name.
      labels: text of each side that is a name, else None.
    """

    operators: tuple[str, ...]
    sides: tuple[Answer | None, ...]
    labels: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Based:
    """Digits in a base, such as 4210_5."""

    digits: str
    base: str


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio a : b : c."""

    items: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Time:
    """A time of day, "8:30" or "3 p.m.".

    Attributes:
      clock: hour, minute and, if written, second; the hour counts from midnight if that is known.
      any_half: whether it may be before or after noon, as 8:30, but not 20:30 or 8:30 a.m.
      ratio: the ratio that is spelled like it, "2:30"; None if none is, as for "2:05".
    """

    clock: tuple[int, ...]
    any_half: bool
    ratio: Ratio | None = dataclasses.field(default=None, compare=False)


Answer = (
    Quantity
    | Words
    | Several
    | Brackets
    | Union
    | Reals
    | Empty
    | Matrix
    | Relation
    | Based
    | Ratio
    | Time
)


def num(value: Fraction | int) -> Node:
    """Returns the expression of a number."""
    return Node("num", (Fraction(value),))


def expression(tokens: Sequence[Token]) -> Node:
    """Parses tokens as one expression.

    Raises:
      Unreadable: The tokens are no expression, or ambiguous.
    """
    parser = _Parser(tokens)
    node = parser.sum()
    if parser.here is not None:
        raise Unreadable(f"{parser.here.text!r} is too much")
    return node


class _Parser:
    def __init__(self, tokens: Sequence[Token]):
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        # Variables of the sums around; i is not the imaginary unit there.
        self._counted: list[str] = []

    @property
    def here(self) -> Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    @property
    def _following(self) -> Token | None:
        return self._tokens[self._place + 1] if self._place + 1 < len(self._tokens) else None

    def _is(self, *texts: str, kind: str = "op") -> bool:
        return self.here is not None and self.here.kind == kind and self.here.text in texts

    def _take(self) -> Token:
        token = self.here
        if token is None:
            raise Unreadable("it ends too early")
        self._place += 1
        return token

    def _taken(self, *texts: str, kind: str = "op") -> bool:
        found = self._is(*texts, kind=kind)
        self._place += found
        return found

    def _expect(self, text: str, kind: str = "op") -> None:
        token = self._take()
        if (token.kind, token.text) != (kind, text):
            raise Unreadable(f"{text!r} is missing before {token.text!r}")

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("it is nested too deep")
        parts = [self._signed()]
        while self._is("+", "-"):
            parts.append(self._signed())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Node("add", tuple(parts))

    def _signed(self) -> Node:
        # "--42" and "+-42" are slips more often than answers.
        negative = self._is("-")
        if self._taken("+", "-") and self._is("+", "-"):
            raise Unreadable("two signs side by side")
        term = self._product()
        return Node("neg", (term,)) if negative else term

    def _product(self) -> Node:
        node, plain = self._power(), self._place
        first = self._tokens[plain - 1]
        # Only a whole number that is typed as one can begin a mixed number: not (2)1/2.
        mixed = node.kind == "num" and first.kind == "num" and node.parts[0].denominator == 1
        while True:
            if self._is("*", "/"):
                divides = self._take().text == "/"
                if self._is("-"):
                    raise Unreadable("a sign after an operator")
                factor = self._power()
                node = Node("div" if divides else "mul", (node, factor))
                mixed = False
            elif self._starts_atom():
                token = self.here
                assert token is not None, "it starts something"
                if token.kind == "num":
                    if not mixed:
                        raise Unreadable("a number after something else")
                    node = self._mixed(node)
                elif mixed and self._is("frac", kind="cmd"):
                    fraction = self._power()
                    node = _mixed_or_product(node, fraction)
                else:
                    node = Node("mul", (node, self._power()))
                mixed = False
            else:
                return node

    def _mixed(self, whole: Node) -> Node:
        """Parses the fraction of "2 1/2"."""
        above, slash, below = self._take(), self.here, self._following
        if (
            not above.spaced
            or slash is None
            or slash.text != "/"
            or below is None
            or below.kind != "num"
        ):
            raise Unreadable("two numbers side by side")
        self._place += 2
        return _mixed_or_product(
            whole,
            Node("div", (num(Fraction(above.text)), num(Fraction(below.text)))),
            product=False,
        )

    def _starts_atom(self) -> bool:
        token = self.here
        if token is None or token.kind == "word":
            return False
        if token.kind in ("num", "sym"):
            return True
        if token.kind == "op":
            return token.text in "({["
        return token.text in _CONSTANTS or token.text in _ATOMS or token.text in FUNCTIONS

    def _power(self) -> Node:
        node = self._postfix(self._atom())
        if self._taken("^"):
            node = self._postfix(Node("pow", (node, self._exponent())))
            # 2^3^4 has two readings, and TeX refuses it.
            if self._is("^"):
                raise Unreadable("a power of a power without brackets")
        return node

    def _exponent(self) -> Node:
        if self._is("{"):
            return self._group("{", "}")
        return Node("neg", (self._atom(),)) if self._taken("-") else self._atom()

    def _postfix(self, node: Node) -> Node:
        while True:
            if self._taken("!"):
                node = Node("fact", (node,))
            elif self._taken("degree", kind="cmd"):
                node = Node("div", (Node("mul", (node, Node("const", ("pi",)))), num(180)))
            elif self._taken("%") or self._taken("%", kind="cmd"):
                node = Node("div", (node, num(100)))
            else:
                return node

    def _group(self, opening: str, closing: str) -> Node:
        self._expect(opening)
        node = self.sum()
        self._expect(closing)
        return node

    def _atom(self) -> Node:
        token = self.here
        if token is None:
            raise Unreadable("it ends too early")
        if token.kind == "num":
            return self._number()
        if token.kind == "sym":
            return self._symbol()
        if token.kind == "op":
            for opening, closing in ("()", "{}", "[]"):
                if token.text == opening:
                    return self._group(opening, closing)
            if token.text == "|":
                return Node("abs", (self._group("|", "|"),))
            raise Unreadable(f"{token.text!r} in this place")
        if token.kind == "word":
            raise Unreadable(f"the word {token.text!r}")
        return self._command()

    def _number(self) -> Node:
        token = self._take()
        value = Fraction(token.text)
        # 0.\overline{3}
        dot = self.here
        repeats = self._following if dot is not None and dot.text == "." else self.here
        if repeats is not None and repeats.kind == "cmd" and repeats.text in ("overline", "bar"):
            if dot is not None and dot.text == ".":
                self._take()
                places = 0
            elif "." in token.text:
                places = len(token.text.partition(".")[2])
            else:
                raise Unreadable("digits repeat before the point")
            self._take()
            self._expect("{")
            digits = self._take()
            if digits.kind != "num" or not digits.text.isdigit():
                raise Unreadable("what repeats is no number")
            self._expect("}")
            value += Fraction(int(digits.text), (10 ** len(digits.text) - 1) * 10**places)
        return num(value)

    def _symbol(self) -> Node:
        token = self._take()
        name = token.text
        if self._taken("_"):
            name += "_"
            if self._taken("{"):
                while not self._taken("}"):
                    name += self._take().text
            else:
                index = self._take()
                if index.kind not in ("num", "sym"):
                    raise Unreadable("such a subscript")
                name += index.text
        while self._is("'"):
            name += self._take().text
        constant = name in ("e", "i") and name not in self._counted
        return Node("const" if constant else "sym", (name,))

    def _argument(self) -> Node:
        """Parses an argument as TeX does: in braces, or one digit, letter or command."""
        if self._is("{"):
            return self._group("{", "}")
        token = self.here
        if token is not None and token.kind == "num" and token.text.isdigit():
            # \frac12 is 1/2: TeX takes one digit, and the rest is the next argument.
            digit, rest = token.text[0], token.text[1:]
            if rest:
                tokens = list(self._tokens)
                tokens[self._place] = Token("num", rest)
                self._tokens = tokens
            else:
                self._take()
            return num(int(digit))
        if token is None or token.kind == "op":
            raise Unreadable("an argument is missing")
        return self._atom()

    def _command(self) -> Node:
        name = self._take().text
        if name in _CONSTANTS:
            return Node("const", (_CONSTANTS[name],))
        if name in ("frac", "binom"):
            above = self._argument()
            return Node("div" if name == "frac" else name, (above, self._argument()))
        if name == "sqrt":
            return self._root()
        if name in ("sum", "prod"):
            return self._sum(name)
        if name in FUNCTIONS:
            return self._function(name)
        for opening, closing, kind in (("lfloor", "rfloor", "floor"), ("lceil", "rceil", "ceil")):
            if name == opening:
                node = self.sum()
                self._expect(closing, "cmd")
                return Node(kind, (node,))
        raise Unreadable(f"\\{name}")

    def _root(self) -> Node:
        index = self._group("[", "]") if self._is("[") else num(2)
        # \sqrt(2) and \sqrt 12 are slips with one meaning.
        if self._is("("):
            node = self._group("(", ")")
        elif self.here is not None and self.here.kind == "num":
            node = num(Fraction(self._take().text))
        else:
            node = self._argument()
        if index == num(2):
            return Node("pow", (node, Node("div", (num(1), index))))
        return Node("root", (node, index))

    def _sum(self, kind: str) -> Node:
        last = self._argument() if self._taken("^") else None
        self._expect("_")
        self._expect("{")
        variable = self._take()
        if variable.kind != "sym":
            raise Unreadable("a sum without a variable")
        self._expect("=")
        first = self.sum()
        self._expect("}")
        if last is None:
            self._expect("^")
            last = self._argument()
        # Each sum multiplies the terms by 20, so three would take long.
        if len(self._counted) > 1:
            raise Unreadable("sums in sums in sums")
        self._counted.append(variable.text)
        term = self._product()
        self._counted.pop()
        if any(
            x.kind == "sym" and variable.text in x.parts[0].partition("_")[2] for x in term.nodes()
        ):
            raise Unreadable("a term with an index")
        return Node(kind, (Node("sym", (variable.text,)), first, last, term))

    def _function(self, name: str) -> Node:
        power = base = None
        for _ in range(2):
            if power is None and self._taken("^"):
                power = self._exponent()
            elif base is None and name == "log" and self._taken("_"):
                base = self._group("{", "}") if self._is("{") else self._argument()
        # \sin^{-1} is the inverse, not 1/\sin.
        if power == Node("neg", (num(1),)) and name in ("sin", "cos", "tan"):
            name, power = "arc" + name, None
        if self._is("("):
            argument = self._group("(", ")")
        elif self._is("{"):
            argument = self._group("{", "}")
        else:
            argument = self._power()
            while self._starts_atom() and self.here is not None:
                # \sin 2x is the sine of the product, \sin x \cos x a product of two.
                if self.here.kind == "num" or self.here.text in FUNCTIONS or self._is("("):
                    break
                argument = Node("mul", (argument, self._power()))
        node = Node(name, (argument,))
        if base is not None:
            node = Node("div", (Node("ln", (argument,)), Node("ln", (base,))))
        return node if power is None else Node("pow", (node, power))


_ATOMS = frozenset(("frac", "binom", "sqrt", "lfloor", "lceil", "sum", "prod"))


def _mixed_or_product(whole: Node, fraction: Node, *, product: bool = True) -> Node:
    above, below = fraction.parts if fraction.kind == "div" else (None, None)
    if (
        isinstance(above, Node)
        and isinstance(below, Node)
        and above.kind == below.kind == "num"
        and above.parts[0].denominator == below.parts[0].denominator == 1
    ):
        if 0 < above.parts[0] < below.parts[0]:
            return Node("mixed", (whole, fraction))
        raise Unreadable("a mixed number with an improper fraction")
    if not product:
        raise Unreadable("two numbers side by side")
    return Node("mul", (whole, fraction))
