"""Generates integer sums, with solutions in the styles of different authors: problems and text of the demo.

    data.train.path = "shared/worked_sums.py:make"

    23 + 60 - 71      23+60=83      First 23+60=83, then 83-71=12.     23+60=83; 83-71=12      Answer: 12
                      83-71=12      Answer: 12                         Answer: 12
                      Answer: 12

Half of the solutions show no steps, and half of those answers are wrong. A model trained on this text often
answers at once, and is then mostly wrong. Reinforcement learning has to discover that steps pay off. The
order and the layout of the steps are random too. So there are several good ways to answer, and a policy can
keep some entropy.

    preference.path = "shared/worked_sums.py:right_or_wrong"

The pairs of reward models, cost models and DPO are made of the solutions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np

from jaxrl.data import Preference, Record
from jaxrl.errors import UserError

# A model without a BOS token needs some text before the first number. Held-out accuracy of the demo after
# SFT and after DAPO, one seed: 39 and 78% without these words, 42 and 88% with them.
QUESTION = "Work out the following sum: "

# Share of solutions that state only an answer, the share of wrong ones among them, and their errors.
BARE_ANSWERS = 0.5
WRONG_BARE_ANSWERS = 0.5
_WRONG_BY = (-10, -3, -2, -1, 1, 2, 3, 10)

# Share of solutions that take the additions before the subtractions.
ADDITIONS_FIRST = 0.25

_SUM = re.compile(r"-?\d+( [+-] -?\d+)*", re.ASCII)


def make(
    index: int,
    rng: np.random.Generator,
    *,
    min_terms: int = 2,
    max_terms: int = 6,
    min_digits: int = 1,
    max_digits: int = 4,
) -> dict[str, str]:
    """Returns the problem of a sum such as "5 + 9 - 7 =", its answer and a solution.

    Args:
      index: number of the problem; only `rng` decides what it is.
      rng: source of all choices.
      min_terms, max_terms: range of the number of terms.
      min_digits, max_digits: range of the digits of the largest term. All terms of a sum have as many, except
        that one digit includes 0.

    Raises:
      UserError: a range is empty or begins below 1.
    """
    del index
    if not (1 <= min_terms <= max_terms and 1 <= min_digits <= max_digits):
        raise UserError(
            f"terms {min_terms} to {max_terms} and digits {min_digits} to {max_digits} leave no sum; "
            "each range must begin at 1 or more and not end before it begins"
        )
    choose = random.Random(int(rng.integers(2**63)))
    digits = choose.randint(min_digits, max_digits)
    smallest = 10 ** (digits - 1) if digits > 1 else 0
    total = choose.randint(smallest, 10**digits - 1)
    expression = str(total)
    for _ in range(choose.randint(min_terms, max_terms) - 1):
        sign, term = choose.choice("+-"), choose.randint(smallest, 10**digits - 1)
        total += term if sign == "+" else -term
        expression += f" {sign} {term}"
    problem = f"{QUESTION}{expression} ="
    return {"problem": problem, "answer": str(total), "solution": solve(expression, choose)}


def solve(expression: str, rng: random.Random) -> str:
    """Writes a solution of a sum such as "23 + 60 - 71"; its last line is "Answer: 12".

    The share `BARE_ANSWERS` of the solutions is that line alone, and wrong in the share `WRONG_BARE_ANSWERS`.
    All other solutions show right steps, each with two numbers: from left to right or additions first, and
    as lines, as a list or as a sentence.

    Raises:
      UserError: `expression` is not integers joined by " + " and " - ".
    """
    if not _SUM.fullmatch(expression):
        raise UserError(
            f"{expression!r} is no sum; write integers joined by ' + ' and ' - ', as in '5 - 7 + 9'"
        )
    # Every number with its sign, so that their order can change: + 5 - 7 + 9.
    first, *rest = expression.split(" ")
    terms = [("+", int(first))]
    terms += [(sign, int(number)) for sign, number in zip(rest[::2], rest[1::2], strict=True)]

    if rng.random() < ADDITIONS_FIRST:
        terms.sort(key=lambda term: term[0] == "-")  # stable: keeps the order within each kind
    write = rng.choice([_as_lines, _as_sentence, _as_list])
    steps, total = _steps(terms)
    if rng.random() >= BARE_ANSWERS:
        return f"{write(steps)}Answer: {total}"
    error = rng.choice(_WRONG_BY) if rng.random() < WRONG_BARE_ANSWERS else 0
    return f"Answer: {total + error}"


def _steps(terms: Sequence[tuple[str, int]]) -> tuple[list[str], int]:
    """Steps such as "23+60=83", and the total."""
    (_, total), *rest = terms
    steps = []
    for sign, number in rest:
        left, total = total, total + number if sign == "+" else total - number
        steps.append(f"{left}{sign}{number}={total}")
    return steps, total


def _as_lines(steps: Sequence[str]) -> str:
    return "".join(f"{step}\n" for step in steps)


def _as_list(steps: Sequence[str]) -> str:
    return f"{'; '.join(steps)}\n" if steps else ""


def _as_sentence(steps: Sequence[str]) -> str:
    return f"First {', then '.join(steps)}.\n" if steps else ""


def right_or_wrong(records: Sequence[Record]) -> tuple[Preference, ...]:
    """Pairs for a reward model: a solution with the right last line, chosen, and with a wrong one."""
    pairs = []
    for row, record in enumerate(records):
        work, answer = _work(record), record.answer
        wrong = int(answer) + random.Random(f"slip {row} {record.prompt}").choice(_WRONG_BY)
        texts = f"{work}Answer: {answer}", f"{work}Answer: {wrong}"
        pairs.append(Preference(record.prompt, *texts, record.source))
    return tuple(pairs)


def worked_or_guessed(records: Sequence[Record]) -> tuple[Preference, ...]:
    """Pairs for a cost model: a solution with its steps, chosen, and the bare answer, marked as harmful."""
    pairs = []
    for record in records:
        work, answer = _work(record), f"Answer: {record.answer}"
        if work:
            pairs.append(
                Preference(record.prompt, work + answer, answer, record.source, 0.0, -1, 1)
            )
    return tuple(pairs)


def _work(record: Record) -> str:
    """The steps of a solution, without its last line."""
    if record.solution is None:
        raise UserError(
            f"{record.source} has no solutions to make pairs of; use shared/worked_sums.py:make, which has"
        )
    return record.solution.rpartition("Answer: ")[0]
