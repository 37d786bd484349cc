"""Solutions of integer sums as different people might write them: the demo's "pretraining" text.

    23 + 60 - 71      23+60=83      First 23+60=83, then 83-71=12.     23+60=83; 83-71=12      Answer: 12
                      83-71=12      Answer: 12                         Answer: 12
                      Answer: 12

Not all of it shows the work, and authors who do not are right only half of the time. A model trained on
this text answers as they do, often straight away and then mostly wrongly; that writing the steps pays
is for reinforcement learning to find out. Order and layout of the steps are drawn at random too, so
that there are several good ways to answer and entropy to keep.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from jaxrl.errors import UserError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

# Share of the authors who state an answer and no more, how many of these are wrong, and by how much.
BARE_ANSWERS = 0.5
WRONG_BARE_ANSWERS = 0.5
_SLIPS = (-10, -3, -2, -1, 1, 2, 3, 10)

# Share of those who take the additions before the subtractions.
ADDITIONS_FIRST = 0.25

_SUM = re.compile(r"-?\d+( [+-] -?\d+)*", re.ASCII)


class SumStep(NamedTuple):
    """One step of the work, written "left operator right = result" without spaces."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


def solve(expression: str, rng: random.Random) -> str:
    """A solution of a sum such as "23 + 60 - 71", with a last line "Answer: 12".

    A share of `BARE_ANSWERS` is that line alone, and a share of these is wrong. The others show
    steps before it, all of them right, each of two numbers,
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
    if rng.random() >= BARE_ANSWERS:
        return f"{write(steps)}Answer: {total}"
    slip = rng.choice(_SLIPS) if rng.random() < WRONG_BARE_ANSWERS else 0
    return f"Answer: {total + slip}"


def _steps(terms: Sequence[tuple[str, int]]) -> tuple[list[SumStep], int]:
    total = terms[0][1]
    steps = []
    for sign, number in terms[1:]:
        step = SumStep(total, sign, number, total + number if sign == "+" else total - number)
        steps.append(step)
        total = step.result
    return steps, total


def _left_to_right(terms: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return terms


def _additions_first(terms: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return sorted(terms, key=lambda term: term[0] == "-")  # stable: order is kept within each kind


def _as_lines(steps: Sequence[SumStep]) -> str:
    return "".join(f"{step}\n" for step in steps)


def _as_list(steps: Sequence[SumStep]) -> str:
    return f"{'; '.join(map(str, steps))}\n" if steps else ""


def _as_sentence(steps: Sequence[SumStep]) -> str:
    return f"First {', then '.join(map(str, steps))}.\n" if steps else ""


def against_a_slip(solution: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """A pair for a reward model: the solution with the right last line, and with a wrong one."""
    work, _, _ = solution.rpartition("Answer: ")
    return f"{work}Answer: {answer}", f"{work}Answer: {int(answer) + rng.choice(_SLIPS)}"


def against_a_guess(solution: str, answer: str) -> tuple[str, str] | None:
    """A pair for a cost model: a solution with its steps, and the answer alone; None without steps."""
    work, _, _ = solution.rpartition("Answer: ")
    return (f"{work}Answer: {answer}", f"Answer: {answer}") if work else None
