"""Generates word problems with one step of arithmetic, for models that can read.

    data.train.path = "shared/word_problems.py:make"

    {"problem": "Anna has 4 apples and buys 3 more. How many apples does Anna have now?", "answer": "7"}

The three kinds are "gain" (a sum), "loss" (a difference, never negative) and "bags" (a product).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.errors import UserError

KINDS = ("gain", "loss", "bags")

_NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack"),
    *("Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Will"),
)
_THINGS = (
    *("apples", "books", "cards", "coins", "eggs"),
    *("flowers", "pens", "shells", "stamps", "toys"),
)
# {who} and {other} are people; {a} and {b} are the numbers.
_STORIES = {
    "gain": (
        "{who} has {a} {things} and buys {b} more.",
        "{who} has {a} {things}. {other} gives {who} {b} more.",
        "{who} finds {a} {things} in the morning and {b} in the evening.",
    ),
    "loss": (
        "{who} has {a} {things} and gives {b} of them to {other}.",
        "{who} has {a} {things} and loses {b} of them.",
        "{who} has {a} {things}. {other} takes {b} of them.",
    ),
    "bags": (
        "{who} has {a} bags with {b} {things} in each.",
        "{who} gets {b} {things} from each of {a} friends.",
        "{who} fills {a} boxes with {b} {things} each.",
    ),
}
_QUESTION = " How many {things} does {who} have now?"


def make(
    index: int, rng: np.random.Generator, *, kinds: Sequence[str] = KINDS, largest: int = 9
) -> dict[str, str]:
    """Returns one problem and its answer; a data function of `data.train.path`.

    Args:
      index: number of the problem; only `rng` decides what it is.
      rng: source of all choices.
      kinds: kinds to choose from, names of `KINDS`.
      largest: largest of the two numbers that are added or multiplied, and of a loss's two parts; the
        smallest is 2.

    Raises:
      UserError: there is no such kind, or `largest` is below 2.
    """
    del index
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise UserError(f"kinds {list(kinds)} must be a choice of {', '.join(KINDS)}")
    if largest < 2:
        raise UserError(f"largest {largest} leaves no number to calculate with; use 2 or more")
    kind = kinds[int(rng.integers(len(kinds)))]
    a, b = (int(number) for number in rng.integers(2, largest + 1, size=2))
    answer = {"gain": a + b, "loss": a, "bags": a * b}[kind]
    who, other = (_NAMES[i] for i in rng.choice(len(_NAMES), size=2, replace=False))
    story = _STORIES[kind][rng.integers(len(_STORIES[kind]))] + _QUESTION
    problem = story.format(
        who=who,
        other=other,
        a=a + b if kind == "loss" else a,
        b=b,
        things=_THINGS[rng.integers(len(_THINGS))],
    )
    return {"problem": problem, "answer": str(answer)}
