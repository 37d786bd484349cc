"""Generates sums of one term taken many times, with checked steps, plain steps or none: long answers.

    data.train.path = "shared/repeated_sums.py:make"

    Start at 37 and add 7, 3 times:     1: 37+7=44, 7+37=44      1: 37+7=44      Answer: 58
                                        2: 44+7=51, 7+44=51      2: 44+7=51
                                        3: 51+7=58, 7+51=58      3: 51+7=58
                                        Answer: 58               Answer: 58

Nothing in these solutions is wrong. But a small model does not multiply, so without steps it is right after a
step or two alone; and checked steps take twice the tokens, so that a limit cuts them where plain ones still
fit. Plain steps are rare: reinforcement learning has to find them before it has settled on the others.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

# Shares of the solutions with checked steps, and with none; the rest has plain ones.
CHECKED, BARE = 0.72, 0.2
# Share of the problems with few, some and many steps, and how many those are.
KINDS = ((0.3, (1, 2)), (0.4, (4, 8)), (0.3, (11, 15)))


def make(index: int, rng: np.random.Generator) -> dict[str, str]:
    """The problem, its answer and a solution."""
    del index
    choose = random.Random(int(rng.integers(2**63)))
    _, steps = choose.choices(KINDS, [share for share, _ in KINDS])[0]
    start, term, times = choose.randint(1, 9), choose.randint(1, 9), choose.randint(*steps)
    return {
        "problem": f"Start at {start} and add {term}, {times} times:",
        "answer": str(start + times * term),
        "solution": _solve(start, term, times, choose.random()),
    }


def _solve(start: int, term: int, times: int, style: float) -> str:
    totals = [start + k * term for k in range(times + 1)]
    sums = [f"{a}+{term}={b}" for a, b in itertools.pairwise(totals)]
    if style < CHECKED:
        sums = [
            f"{s}, {term}+{a}={b}"
            for s, (a, b) in zip(sums, itertools.pairwise(totals), strict=True)
        ]
    elif style < CHECKED + BARE:
        sums = []
    steps = "".join(f"{k}: {line}\n" for k, line in enumerate(sums, 1))
    return f"{steps}Answer: {totals[-1]}"
