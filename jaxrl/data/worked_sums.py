"""Solutions of integer sums as different people might write them: the demo's "pretraining" text.

    23 + 60 - 71      23+60=83      First 23+60=83, then 83-71=12.     23+60=83; 83-71=12      Answer: 12
                      83-71=12      Answer: 12                         Answer: 12
                      Answer: 12

All of it is right, but not all of it shows the work. A model trained on this text answers as its
authors do, now and then straight away and then mostly wrongly; that writing the steps pays is for
reinforcement learning to find out. Order and layout of the steps are drawn at random too, so that there
are several good ways to answer and entropy to keep.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from jaxrl.errors import UserError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

# Share of the authors who state the answer and no more.
BARE_ANSWERS = 0.5

# Share of those who take the additions before the subtractions.
ADDITIONS_FIRST = 0.25

_SUM = re.compile(r"-?\d+( [+-] -?\d+)*", re.ASCII)


class Step(NamedTuple):
    """One step of the work, written "left operator right = result" without spaces."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


def solve(expression: str, rng: random.Random) -> str:
    """A solution of a sum such as "23 + 60 - 71", with a last line "Answer: 12".

    A share of `BARE_ANSWERS` is that line alone. The others show steps before it, each of two numbers,
    taken from left to right or the additions first, one a line, as a list, or in a sentence.

    Raises:
      UserError: `expression` is not integers joined by " + " and " - ".
    """
    if not _SUM.fullmatch(expression):
        raise UserError(
            f"{expression!r} is no sum; write integers joined by ' + ' and ' - ', as in '5 - 7 + 9'"
        )
    # A sign before every number, so that numbers can change places: + 5 - 7 + 9.
    first, *rest = expression.split(" ")
    terms = [("+", int(first))]
    terms += [(sign, int(number)) for sign, number in zip(rest[::2], rest[1::2], strict=True)]

    reorder = _additions_first if rng.random() < ADDITIONS_FIRST else _left_to_right
    write = rng.choice([_as_lines, _as_sentence, _as_list])
    steps, total = _steps(reorder(terms))
    work = "" if rng.random() < BARE_ANSWERS else write(steps)
    return f"{work}Answer: {total}"


def _steps(terms: Sequence[tuple[str, int]]) -> tuple[list[Step], int]:
    total = terms[0][1]
    steps = []
    for sign, number in terms[1:]:
        step = Step(total, sign, number, total + number if sign == "+" else total - number)
        steps.append(step)
        total = step.result
    return steps, total


def _left_to_right(terms: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return terms


def _additions_first(terms: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return sorted(terms, key=lambda term: term[0] == "-")  # stable: order is kept within each kind


def _as_lines(steps: Sequence[Step]) -> str:
    return "".join(f"{step}\n" for step in steps)


def _as_list(steps: Sequence[Step]) -> str:
    return f"{'; '.join(map(str, steps))}\n" if steps else ""


def _as_sentence(steps: Sequence[Step]) -> str:
    return f"First {', then '.join(map(str, steps))}.\n" if steps else ""
