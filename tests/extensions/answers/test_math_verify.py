"""The grader `math_verify`: its package's own verdicts, within the limits of our processes."""

import numpy as np
import pytest
from extras import import_extra

from jaxrl.rewards import Graders, GradingTask, Response


@pytest.fixture(scope="module")
def grader():
    import_extra("math-verify", "math_verify")
    graders = Graders(("math_verify", {}), cpu_seconds=2.0)
    yield graders
    graders.close()


def grade(grader, truth, *responses):
    return grader.grade([Response(r, np.zeros(1, np.int32), GradingTask(truth)) for r in responses])


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        (r"\frac12", [r"\boxed{0.5}", "so it is $1/2$.", "Answer: 0.5"], ["0.51", "I do not know"]),
        ("#### 18", ["She sells 18 eggs.", "Answer: 18"], ["Answer: 81"]),
        ("[0, 1)", [r"\boxed{[0, 1)}"], [r"\boxed{(0, 1]}"]),
        # Its own rules, where the grader `math` has others: units and signs of comparison do not count.
        ("42", [r"\boxed{\ne 42}", r"\boxed{42 \text{ cm}}"], [r"\boxed{43}"]),
    ],
)
def test_verdicts_are_those_of_math_verify(grader, truth, right, wrong):
    verdicts = grade(grader, truth, *right, *wrong)
    assert [v.correct for v in verdicts] == [True] * len(right) + [False] * len(wrong)
    assert not any(v.failure for v in verdicts)


def test_what_it_read_is_the_prediction(grader):
    verdicts = grade(grader, "7", r"\boxed{7}", r"It is \boxed{x + 1}", "Nothing.")
    assert [v.prediction for v in verdicts] == ["7", "x+1", None]


def test_an_answer_that_it_never_ends_with_costs_that_verdict_alone(grader):
    endless, right = grade(grader, "7", "9**9**9**9", "7")
    assert endless.failure.kind == "timeout" and not endless.correct
    assert right.correct


def test_a_ground_truth_in_which_it_reads_nothing_is_a_failure_and_no_wrong_answer(grader):
    (verdict,) = grade(grader, r"\boxed{}", "7")
    assert (
        verdict.failure.kind == "raised"
        and "no answer in the ground truth" in verdict.failure.message
    )
