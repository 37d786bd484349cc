"""Multiple choice, the exact text, a pattern."""

import time

import numpy as np
import pytest

from jaxrl.rewards import Graders, GradingTask, Response
from jaxrl.rewards.simple_graders import choice_of


def sample(text, answer):
    return Response(text, np.zeros(1, np.int32), GradingTask(answer))


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "C",
            "c",
            "(C)",
            "C.",
            "**C**",
            "(C).",
            r"\text{C}",
            r"\textbf{(C)}",
            "$C$",
            "C)",
            "C: 42",
        ),
        *("(C) 42", "(C) Because it is so", "option C", "Answer is (C)", r"\text{(C)}\ 42"),
        "C. the sum of three",
    ],
)
def test_one_letter_is_chosen(answer):
    assert choice_of(answer) == "C"


@pytest.mark.parametrize(
    "answer",
    [
        *("", "C or D", "(C) or (D)", "C, D", "C/D", "(C)(D)", "CD", "not C", "(C) and (D)", "C D"),
        *("either C or D", "Cat", "C++", "42", "(C) not", "C'", "C: D", "all of them", "A, B, C"),
        *("(C) (D) 42", "C2"),
    ],
)
def test_more_than_one_letter_or_none_is_no_choice(answer):
    assert choice_of(answer) is None


def test_choice():
    graders = Graders(("choice", {}))
    samples = [
        sample(r"so \boxed{\text{C}}", "(C)"),
        sample("Answer: C", "C"),
        sample("Answer: B", "C"),
        sample("I think C", "C"),
        sample("Answer: B or C", "C"),
    ]
    assert [v.correct for v in graders.grade(samples)] == [True, True, False, False, False]
    assert graders.validate(GradingTask(r"\text{(C)}")) is None
    assert graders.validate(GradingTask("CD"))


def test_exact():
    graders = Graders(("exact", {}), {"any case": ("exact", {"ignore_case": True})})
    samples = [
        sample("Answer: New  York", "New York"),
        sample("Answer: new york", "New York"),
        sample("New York", "New York"),
    ]
    assert [v.correct for v in graders.grade(samples)] == [True, False, False]
    row = GradingTask("New York", source="any case")
    assert graders.grade([Response("Answer: new york", np.zeros(1, np.int32), row)])[0].correct


@pytest.fixture(scope="module")
def patterns():
    sources = {
        "tag": ("regex", {"pattern": r"<a>(.*?)</a>"}),
        "slow": ("regex", {"pattern": r"(?:x+x+)+y", "max_chars": 5000}),
    }
    graders = Graders(("regex", {}), sources, cpu_seconds=0.5)
    yield graders
    graders.close()


def test_a_pattern_finds_the_last_answer(patterns):
    row = GradingTask("42", source="tag")
    texts = ["<a>41</a> <a> 42 </a>", "<a>42</a><a>43</a>", "42"]
    verdicts = patterns.grade([Response(t, np.zeros(1, np.int32), row) for t in texts])
    assert [v.correct for v in verdicts] == [True, False, False]


def test_a_ground_truth_may_be_the_pattern_that_the_end_has_to_match(patterns):
    texts = ["it is 4.", "it is 4 or 5", "5"]
    verdicts = patterns.grade([sample(t, r"\b(?:4|four)") for t in texts])
    assert [v.correct for v in verdicts] == [True, False, False]
    assert "is no regular expression" in patterns.validate(GradingTask("("))


def test_a_pattern_that_takes_for_ever_is_ended(patterns):
    row = GradingTask("42", source="slow")
    started = time.monotonic()
    (verdict,) = patterns.grade([Response("x" * 4000, np.zeros(1, np.int32), row)])
    assert verdict.failure.kind == "timeout" and time.monotonic() - started < 30


def test_a_long_ground_truth_takes_no_time():
    nested = "\\text{" * 50_000 + "C" + "}" * 50_000
    began = time.process_time()
    fault = Graders(("choice", {})).validate(GradingTask(nested))
    assert fault is not None and "is no letter" in fault and len(fault) < 300
    # Once for each level and letter, it took two minutes.
    assert time.process_time() - began < 2
