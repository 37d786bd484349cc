import itertools
import random
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data import Preference, Record
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

worked_sums = sys.modules[load_function("shared/worked_sums.py:make", "data function").__module__]
STEP = re.compile(r"(-?\d+)([+-])(-?\d+)=(-?\d+)")


@st.composite
def sums(draw):
    numbers = draw(st.lists(st.integers(-99, 999), min_size=1, max_size=6))
    signs = draw(st.lists(st.sampled_from("+-"), min_size=len(numbers) - 1, max_size=5))
    rest = zip(signs, numbers[1:], strict=False)
    expression = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in rest)
    total = numbers[0] + sum(
        n if s == "+" else -n for s, n in zip(signs, numbers[1:], strict=False)
    )
    return expression, len(numbers), total


@settings(deadline=None)
@given(sums(), st.integers(0, 100))
def test_every_step_is_true_and_the_last_line_is_the_sum(problem, seed):
    expression, num_terms, total = problem
    *work, answer = worked_sums.solve(expression, random.Random(seed)).split("\n")

    steps = STEP.findall("\n".join(work))

    assert len(steps) in (0, num_terms - 1)
    for left, sign, right, result in steps:
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    for before, after in itertools.pairwise(steps):
        assert after[0] == before[3]
    if work:
        assert answer == f"Answer: {total}"


@pytest.mark.parametrize("text", ["", "5 *  7", "5 + ", "5 + x", "5 + 7\n", "__import__('os')"])
def test_what_is_no_sum_is_refused(text):
    with pytest.raises(UserError, match="is no sum"):
        worked_sums.solve(text, random.Random(0))


def sum_of(problem: str) -> int:
    """The value of "5 + 9 - 7 =", by hand."""
    first, *rest = problem.removeprefix(worked_sums.QUESTION).removesuffix(" =").split(" ")
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return int(first) + sum(int(n) if sign == "+" else -int(n) for sign, n in pairs)


def rows(seed: int, **options) -> list[dict[str, str]]:
    return [worked_sums.make(n, np.random.default_rng((seed, n)), **options) for n in range(300)]


def test_generated_sums_have_right_answers_and_the_asked_sizes():
    made = rows(3, min_terms=3, max_terms=4, min_digits=1, max_digits=2)
    for row in made:
        assert int(row["answer"]) == sum_of(row["problem"])
        assert "=" not in row["solution"] or row["solution"].endswith(f"Answer: {row['answer']}")
    terms = [re.findall(r"\d+", row["problem"]) for row in made]
    assert {len(numbers) for numbers in terms} == {3, 4}
    assert {len(number) for numbers in terms for number in numbers} == {1, 2}
    # All terms of a sum have as many digits, and 0 is one of them.
    assert all(len({len(number) for number in numbers}) == 1 for numbers in terms)
    assert any("0" in numbers for numbers in terms)
    assert {"+" in row["problem"] for row in made} == {True, False}


@pytest.mark.parametrize(
    "options",
    [{"min_terms": 0}, {"min_terms": 9}, {"max_digits": 0}, {"min_digits": 3, "max_digits": 2}],
)
def test_ranges_without_a_sum_are_refused(options):
    with pytest.raises(UserError, match="leave no sum"):
        worked_sums.make(0, np.random.default_rng(0), **options)


def test_pairs_are_made_of_solutions():
    records = [
        Record("5 - 7 =", "-2", "sums", "5-7=-2\nAnswer: -2"),
        Record("1 + 1 =", "2", "sums", "Answer: 5"),
    ]
    (worked,) = worked_sums.worked_or_guessed(records)
    assert worked == Preference(
        "5 - 7 =", "5-7=-2\nAnswer: -2", "Answer: -2", "sums", chosen_harm=-1, rejected_harm=1
    )
    pairs = worked_sums.right_or_wrong(records)
    assert [pair.chosen for pair in pairs] == ["5-7=-2\nAnswer: -2", "Answer: 2"]
    for pair in pairs:
        right, wrong = (text.rpartition("Answer: ") for text in (pair.chosen, pair.rejected))
        assert right[0] == wrong[0] and abs(int(right[2]) - int(wrong[2])) in (1, 2, 3, 10)
    with pytest.raises(UserError, match="sums has no solutions to make pairs of"):
        worked_sums.right_or_wrong([Record("1 + 1 =", "2", "sums")])
