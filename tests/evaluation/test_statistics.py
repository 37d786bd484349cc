"""Statistics of graded answers: by hand, against enumeration, and properties."""

import collections
import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rewards.evaluation_metrics import (
    Estimate,
    best_at_k,
    estimate,
    maj_at_k,
    pass_at_k,
    sizes,
    statistics_of,
    worst_at_k,
)

# By hand


def test_a_mean_over_prompts_and_its_standard_error():
    assert estimate(np.array([0.0, 1, 1, 0])) == Estimate(0.5, math.sqrt(1 / 3) / 2)
    assert estimate(np.array([0.25, 0.25])) == Estimate(0.25, 0.0)


def test_one_prompt_has_no_standard_error():
    found = estimate(np.array([0.25]))
    assert found.value == 0.25 and math.isnan(found.stderr)


def test_best_of_two_of_three():
    # 1, 2, 6: the largest of two is 1 in 1 of 9 draws, 2 in 3, 6 in 5.
    mean_N, std_N = best_at_k(np.array([[6.0, 1, 2]]), 2)
    assert mean_N == pytest.approx((1 + 6 + 30) / 9)
    assert std_N**2 == pytest.approx((1 + 12 + 180) / 9 - (37 / 9) ** 2)
    # The smallest is 1 in 5 of 9, 2 in 3, 6 in 1.
    assert worst_at_k(np.array([[6.0, 1, 2]]), 2)[0] == pytest.approx((5 + 6 + 6) / 9)


def test_best_of_right_and_wrong_lies_below_pass_at_k():
    one_of_four = np.array([[0, 0, 1, 0]])
    assert best_at_k(one_of_four, 4)[0] == pytest.approx(1 - (3 / 4) ** 4)
    assert pass_at_k(one_of_four, 4) == 1
    assert pass_at_k(one_of_four, 2) == pytest.approx(1 / 2)
    assert pass_at_k(one_of_four, 1) == pytest.approx(1 / 4)


def test_pass_at_k_is_not_estimated_beyond_n():
    with pytest.raises(ValueError, match="pass@5 of 4 answers"):
        pass_at_k(np.ones((1, 4)), 5)


def test_a_tie_goes_to_the_first_drawn():
    # Two draws from 7 and 8 say what the first of them says, whether they agree or tie.
    (mean,), (std,) = maj_at_k(np.array([[1.0, 0]]), [["7", "8"]], 2)
    assert mean == pytest.approx(1 / 2, abs=0.03)
    assert std == pytest.approx(1 / 2, abs=0.03)


def test_no_answer_counts_as_an_answer():
    # Three of four say nothing, the fourth is right: it wins with 3 or 4 of four draws, or first with 2.
    (mean,), _ = maj_at_k(np.array([[0.0, 0, 0, 1]]), [[None, None, None, "7"]], 4)
    assert mean == pytest.approx((1 + 4 * 3 + 6 * 9 / 2) / 256, abs=0.04)
    (mean,), _ = maj_at_k(np.array([[0.0, 0.0]]), [[None, None]], 2)
    assert mean == 0


def test_names_and_sizes():
    assert [sizes(n) for n in (1, 2, 3, 8, 12)] == [(), (2,), (2, 3), (2, 4, 8), (2, 4, 8, 12)]
    score = np.array([[1.0, 0, 1], [0, 0, 1]])
    found = statistics_of(score, score > 0, [["1", "2", "1"], [None, "3", "4"]])
    assert list(found) == [
        "mean@3",
        "std@3",
        *("best@2", "worst@2", "maj@2", "best@3", "worst@3", "maj@3"),
        *("pass@2", "pass@3"),
    ]
    assert found["mean@3"].value == 1 / 2 and found["pass@3"] == Estimate(1.0, 0.0)
    assert found["std@3"].value == pytest.approx(math.sqrt(2 / 9))
    assert found["mean@3"].spread is None and found["best@2"].spread is not None
    assert list(statistics_of(score[:, :1], score[:, :1] > 0, [["1"], ["2"]])) == [
        "mean@1",
        "pass@1",
    ]


# Slow twins


def drawn(scores, k):
    return itertools.product(scores, repeat=k)


def slow_best(scores, k) -> tuple[float, float]:
    found = [max(x) for x in drawn(scores, k)]
    return statistics.fmean(found), statistics.pstdev(found)


def slow_pass(correct, k) -> float:
    groups = list(itertools.combinations(correct, k))
    return sum(any(g) for g in groups) / len(groups)


def verl_majority(scores, answers, k) -> tuple[float, float]:
    """verl's implementation: `bootstrap_metric` of `calc_maj_val`, 1,000 draws, seed 42."""
    np.random.seed(42)
    draws = np.random.choice(len(scores), size=(1000, k), replace=True)
    values = []
    for draw in draws:
        votes = collections.defaultdict(list)
        for i in draw:
            votes[answers[i]].append(scores[i])
        counts = {answer: len(found) for answer, found in votes.items()}
        values.append(votes[max(counts, key=counts.__getitem__)][0])
    return float(np.mean(values)), float(np.std(values))


SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=1, max_size=5)


@given(SCORES, st.integers(1, 4))
def test_best_at_k_equals_the_mean_over_all_draws(scores, k):
    mean_N, std_N = best_at_k(np.array([scores]), k)
    assert (mean_N[0], std_N[0]) == pytest.approx(slow_best(scores, k), abs=1e-7)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_equals_the_mean_over_all_subsets(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    assert pass_at_k(np.array([correct]), k)[0] == pytest.approx(slow_pass(correct, k))


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([None, "a", "b", "c"])),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_the_majority_equals_verls(rows, k):
    scores, answers = zip(*rows, strict=True)
    (mean,), (std,) = maj_at_k(np.array([scores]), [answers], k)
    assert (mean, std) == pytest.approx(verl_majority(scores, answers, k))


# What always holds


@given(st.integers(1, 4), st.integers(1, 9), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_means_bound(N, n, random):
    correct = np.array([[random.random() < 0.4 for _ in range(n)] for _ in range(N)])
    answers = [[random.choice([None, "1", "2", "3"]) for _ in range(n)] for _ in range(N)]
    found = statistics_of(correct, correct, answers)
    order = random.sample(range(n), n)
    shuffled = correct[:, order]
    again = statistics_of(shuffled, shuffled, [[a[i] for i in order] for a in answers])
    for name, value in found.items():
        # A majority is of draws, which are drawn by place.
        tolerance = 6 * 0.5 / math.sqrt(1000) if name.startswith("maj@") else 1e-6
        assert again[name].value == pytest.approx(value.value, abs=tolerance), name
        assert 0 <= value.value <= 1 + 1e-12
    values = {name: e.value for name, e in found.items()}
    mean = values[f"mean@{n}"]
    ks = sizes(n)
    for k in ks:
        assert values[f"worst@{k}"] - 1e-9 <= mean <= values[f"best@{k}"] + 1e-9
        assert values[f"best@{k}"] <= values[f"pass@{k}"] + 1e-9
    assert [values[f"pass@{k}"] for k in ks] == sorted(values[f"pass@{k}"] for k in ks)
    assert pass_at_k(correct, 1).mean() == pytest.approx(mean)


def test_many_answers_stay_finite():
    score = np.zeros((3, 4096))
    score[0, :7] = 1
    found = statistics_of(score, score > 0, [["x"] * 4096] * 3)
    assert all(math.isfinite(e.value) for e in found.values())
    assert found["pass@4096"].value == pytest.approx(1 / 3)
