r"""The kinds of answers, as data: quantities, words, several answers, points, intervals, matrices, relations.

"x = 3"                      Relation(("=",), (label x, 3))
"1 \pm \sqrt{19}"            Several(two quantities)
"(-\infty, 2) \cup [3, 5)"   Union(two Brackets)
"20\text{ miles}"            Quantity(20, unit "mile")
"""

from __future__ import annotations

import dataclasses

from jaxrl.rewards.answer_reader.answer_expressions import Node


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An expression; `degrees`, `percent` and `unit` say what stood behind it."""

    node: Node
    unit: tuple[str, ...] = ()
    known_unit: bool = True
    degrees: bool = False
    percent: bool = False


@dataclasses.dataclass(frozen=True)
class Words:
    """Lower-case words; a single letter is one of several choices."""

    text: str


@dataclasses.dataclass(frozen=True)
class Several:
    """Answers side by side in no order; `braces` if a set is written."""

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
    """Sets of real numbers put together; `without` are taken off."""

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
    """A chain: sides with one operator fewer between them, of = < > le ge ne in approx.

    Attributes:
      labels: of each side its text if it is a name of something, else None.
    """

    operators: tuple[str, ...]
    sides: tuple[Answer | None, ...]
    labels: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Based:
    """Digits in a base."""

    digits: str
    base: str


@dataclasses.dataclass(frozen=True)
class Ratio:
    """a : b : c."""

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
