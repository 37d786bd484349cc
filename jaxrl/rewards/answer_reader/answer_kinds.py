r"""The kinds of answers as dataclasses: quantities, words, several answers, points, intervals, relations.

"x = 3"                      Relation(("=",), (label x, 3))
"1 \pm \sqrt{19}"            Several(two quantities)
"(-\infty, 2) \cup [3, 5)"   Union(two Brackets)
"20\text{ miles}"            Quantity(20, unit (("mile", 1),))
"""

from __future__ import annotations

import dataclasses

from jaxrl.rewards.answer_reader.answer_expressions import Node


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
)
