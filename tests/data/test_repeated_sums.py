"""Problems of long answers: every step and answer of their solutions is right, in each of three styles."""

import re
from collections import Counter

import numpy as np

from jaxrl.user_code import load_function

make = load_function("shared/repeated_sums.py:make", "data function")


def test_every_solution_is_right_in_each_style():
    styles = Counter()
    for n in range(200):
        row = make(n, np.random.default_rng((1, n)))
        start, term, times = map(int, re.findall(r"\d+", row["problem"]))
        totals = [start + k * term for k in range(times + 1)]
        work, _, answer = row["solution"].rpartition("Answer: ")
        assert int(answer) == int(row["answer"]) == totals[-1]
        steps = [tuple(map(int, re.findall(r"\d+", line))) for line in work.splitlines()]
        plain = [(k, totals[k - 1], term, totals[k]) for k in range(1, times + 1)]
        checked = [(k, a, b, c, b, a, c) for k, a, b, c in plain]
        styles[[checked, plain, []].index(steps)] += 1
    assert styles[0] > styles[2] > styles[1] > 0
