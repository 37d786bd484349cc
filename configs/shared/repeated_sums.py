"""Generates sums of one term taken many times, with solutions by long steps, by short steps and by none.

    data.train.path = "shared/repeated_sums.py:make"

    Start at 37 and add 7, 3 times:     1: 37+7=44      1:44 2:51 3:58      Answer: 58
                                        2: 44+7=51      Answer: 58
                                        3: 51+7=58
                                        Answer: 58

Nothing in these solutions is wrong. But no small model multiplies, so a bare answer is right after a step or
two alone; and long steps take two to three times the tokens of short ones, so that a limit cuts them where
short ones still fit. Short steps are rare.
"""

from __future__ import annotations

import random

import numpy as np

# Shares of the solutions with long steps, and with none; the rest has short ones.
LONG, BARE = 0.65, 0.25
# Of the kinds of problems: share, range of the number of steps, and of start and term.
KINDS = ((0.3, (1, 2), (1, 9)), (0.5, (4, 16), (1, 9)), (0.2, (18, 22), (11, 99)))


def make(index: int, rng: np.random.Generator) -> dict[str, str]:
    """The problem, its answer and a solution."""
    del index
    choose = random.Random(int(rng.integers(2**63)))
    _, steps, terms = choose.choices(KINDS, [share for share, *_ in KINDS])[0]
    times = choose.randint(*steps)
    start, term = (choose.randint(*terms) for _ in range(2))
    return {
        "problem": f"Start at {start} and add {term}, {times} times:",
        "answer": str(start + times * term),
        "solution": _solve(start, term, times, choose.random()),
    }


def _solve(start: int, term: int, times: int, style: float) -> str:
    totals = [start + k * term for k in range(times + 1)]
    if style < LONG:
        steps = "".join(f"{k}: {totals[k - 1]}+{term}={totals[k]}\n" for k in range(1, times + 1))
    elif style < LONG + BARE:
        steps = ""
    else:
        steps = " ".join(f"{k}:{totals[k]}" for k in range(1, times + 1)) + "\n"
    return f"{steps}Answer: {totals[-1]}"
