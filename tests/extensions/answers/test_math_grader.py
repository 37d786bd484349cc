"""The grader `math` on whole responses: what is taken for the answer, hostile text, and the data sets."""

import json
import pathlib
import time

import numpy as np
import pytest
from answer_cases import cases

from jaxrl.rewards import Graders, GradingTask, Response
from jaxrl_answers.math_grader import math_answer, math_truth

DATA = pathlib.Path(__file__).parents[3] / "../shared/data"


def sample(text, answer):
    return Response(text, np.zeros(1, np.int32), GradingTask(answer))


@pytest.fixture(scope="module")
def graders():
    graders = Graders(("math", {}), cpu_seconds=2.0)
    yield graders
    graders.close()


@pytest.mark.parametrize(("response", "answer"), cases("math answer"))
def test_the_answer_of_a_response(response, answer):
    assert math_answer(response) == answer


def test_a_box_counts_wherever_it_is_and_other_answers_at_the_end():
    assert math_answer(r"\boxed{42}" + " and so on" * 100) == "42"
    assert math_answer("Answer: 42" + " " * 291) is None


@pytest.mark.parametrize(
    ("field", "truth"),
    [
        ("42", "42"),
        ("He has <<2*3=6>>6.\n#### 6", "6"),
        ("We add the terms, one after the other, " * 5 + r"and get $\boxed{\frac12}$.", r"\frac12"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (" 42 \n", "42"),
        ("\\ 42\\ \n", "\\ 42\\ "),
    ],
)
def test_the_truth_of_a_row(field, truth):
    assert math_truth(field) == truth


@pytest.mark.parametrize("spaced", ["\\ 42\\ ", "42\\ ", "#### 42\\ \n", " 42\t"])
def test_a_space_command_at_an_end_is_no_part_of_a_number(graders, spaced):
    (as_truth,) = graders.grade([sample(r"\boxed{42}", spaced)])
    (as_answer,) = graders.grade([sample(f"Answer: {spaced.removeprefix('#### ')}", "42")])
    assert as_truth.correct and as_answer.correct


@pytest.mark.parametrize("answer", ["", " ", "$$", r"\boxed{}"])
def test_a_ground_truth_without_an_answer_is_a_fault(graders, answer):
    assert graders.validate(GradingTask(answer))


def test_verdicts(graders):
    verdicts = graders.grade(
        [
            sample(r"$\boxed{0.5}$", r"\frac{1}{2}"),
            sample("Answer: x^2 + 2x + 1", "(x+1)^2"),
            sample(r"\boxed{42} or \boxed{43}", "42"),
            sample("I do not know", "42"),
        ]
    )
    assert [v.correct for v in verdicts] == [True, True, False, False]
    assert [v.prediction for v in verdicts] == ["1/2", "x^2+2x+1", "42, 43", None]


HOSTILE = {
    "power tower": "9**9**9",
    "tower in LaTeX": r"9^{9^{9^{9}}}",
    "braces": "{" * 100_000,
    "closed braces": "{" * 900 + "42" + "}" * 900,
    "boxes": r"\boxed{" * 50_000,
    "a set": r"\{" + ", ".join(map(str, range(1000))) + r"\}",
    "a sum": "+".join(["1"] * 500),
    "factorials": "9!!!!!!!!!!",
    "factorial": r"(10^{9})!",
    "binomial": r"\binom{10^{9}}{10^{8}}",
    "expansion": r"(a+b+c+d+e+f+g+h)^{60}",
    "roots": r"\sqrt{" * 55 + "2" + "}" * 55,
    "fractions": r"\frac{1}{1+" * 55 + "1" + "}" * 55,
    "huge number": "9" * 1900,
    "small number": "10^{-99999999}",
    "trigonometry": r"\sin" * 300 + "x",
    "commas": "," * 1900,
    "dollars": "$" * 1900,
    "texts": r"\text{" * 300 + "42" + "}" * 300,
    "old fractions": r"{1 \over " * 200 + "1" + "}" * 200,
    "half-open intervals": "]0;" * 300 + "1[",
    "brackets before a unit": "4 " + "(" * 390 + r"\text{cm}" + ")" * 390,
    "units": r"4\text{ m/s}" * 60,
    "sums in sums": r"\sum_{k=1}^{20}\sum_{j=1}^{20} (k+j+1000)!",
    "sums as bounds": r"\sum_{k=1}^{" * 25 + "2" + "} k" * 25,
    "powers in a sum": r"\sum_{k=1}^{20} 9^{9^k}",
    "a long sum": r"\sum_{k=1}^{10^{99}} k",
    "root": r"\sqrt[64]{" + "9" * 1500 + "}",
    "raised digits": "10" + "\u2079" * 300,
    "code": "__import__('os').system('true')",
    "unicode": "\ud800\x00\u202e42\u0664",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_in_little_time(graders, name):
    text = HOSTILE[name]
    started = time.monotonic()
    samples = [sample(rf"\boxed{{{text}}}", truth) for truth in ("41", "x^2+y", r"\{1,2\}")]
    samples += [sample(f"Answer: {text}", "41"), sample("Answer: 41", "41")]
    verdicts = graders.grade(samples)
    assert [v.correct for v in verdicts] == [False] * 4 + [True]
    assert time.monotonic() - started < 60


def test_what_takes_for_ever_costs_its_time_and_nobody_elses_verdict(graders):
    # Equal wherever it is tried, and far too long to be multiplied out.
    truth = r"(a+b+c+d+e+f+g+h)^{60}"
    slow = r"(a+b+c+d+e+f+g+h)^{30}(b+a+c+d+e+f+g+h)^{30}"
    samples = [sample(rf"\boxed{{{a}}}", t) for a, t in [(slow, truth), ("0.25", r"\frac14")] * 2]
    verdicts = graders.grade(samples)
    assert [v.correct for v in verdicts][1::2] == [True, True]
    failed = [v.failure.kind for v in verdicts if v.failure]
    assert set(failed) <= {"timeout", "memory"} and len(failed) in (0, 2)


# ---- the data sets


def rows_of(name):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("math500", 500),
        ("math_train", 7470),
        ("gsm8k_train", 7473),
        ("gsm8k_test", 1319),
        ("aime_2024", 30),
        ("aime_1983_2023", 975),
        pytest.param("dapo_math_17k", 17243, marks=pytest.mark.long),
    ],
)
def test_every_reference_answer_is_right(graders, name, count):
    answers = [row["answer"] for row in rows_of(name)]
    empty = [n for n, answer in enumerate(answers) if graders.validate(GradingTask(answer))]
    # Two rows of MATH have no answer.
    assert empty == ([5326, 5328] if name == "math_train" else [])
    kept = [str(answer) for answer in answers if answer.strip()]
    texts = [a if "####" in a else rf"Thus $\boxed{{{a}}}$." for a in kept]
    verdicts = graders.grade([sample(t, a) for t, a in zip(texts, kept, strict=True)])
    assert sum(v.correct for v in verdicts) == len(kept) == count


@pytest.mark.parametrize("name", ["math500", pytest.param("math_train", marks=pytest.mark.long)])
def test_another_rows_answer_is_wrong_unless_it_is_equal(graders, name):
    answers = [row["answer"] for row in rows_of(name) if row["answer"].strip()]
    others = answers[1:] + answers[:1]
    verdicts = graders.grade(
        [sample(rf"\boxed{{{o}}}", a) for a, o in zip(answers, others, strict=True)]
    )
    equal = [
        (a, o)
        for a, o, v in zip(answers, others, verdicts, strict=True)
        if v.correct and a.strip() != o.strip()
    ]
    # Looked at by hand: "8" and "K=8", "120" and "120^\circ", "4" and "4 \text{ feet}", and the like.
    assert len(equal) <= 10, equal
