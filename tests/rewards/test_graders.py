"""Graders by name and source: verdicts, failures that touch nobody else, and faults of ground truths."""

import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.rewards import Grade, Grader, Graders, GradingTask, Response
from jaxrl.rewards.graders import GRADERS, check_grader
from jaxrl.rewards.grading import FunctionGrader, Verdict
from jaxrl.types import TRUTHS


def sample(text, answer, source="", **extra):
    return Response(text, np.zeros(1, np.int32), GradingTask(answer, extra, source))


@pytest.fixture
def graders():
    """Opens graders; what is opened is closed."""
    opened = []

    def open_(*arguments, **settings):
        opened.append(Graders(*arguments, **settings))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


def correct(verdicts):
    return [v.correct for v in verdicts]


def test_each_source_has_its_grader(graders):
    ours = graders(("answer", {}), {"letters": ("choice", {}), "words": ("exact", {"whole": True})})
    samples = [
        sample("Answer: 42", "42.0"),
        sample("Answer: (C)", "C", "letters"),
        sample("yes", "yes", "words"),
        sample("Answer: yes", "yes", "words"),
        sample("Answer: 41", "42", "unheard of"),
    ]
    assert ours.grade(samples) == [
        Verdict(1.0, True, "42"),
        Verdict(1.0, True, "C"),
        Verdict(1.0, True, "yes"),
        Verdict(-1.0, False, "Answer: yes"),
        Verdict(-1.0, False, "41"),
    ]
    assert ours.validate(GradingTask("42")) is None
    assert "is no letter" in ours.validate(GradingTask("42", source="letters"))
    assert "empty ground truth" in ours.validate(GradingTask(" ", source="words"))


@pytest.mark.parametrize(
    ("grader", "truths", "right", "wrong"),
    [
        ("answer", ["4", "four"], ["Answer: 4", "Answer: four", "Answer: 4.0"], ["Answer: 5"]),
        ("gsm8k", ["4", "#### 5"], ["#### 5", "Answer: 4"], ["#### 45"]),
        ("math", ["1/2", r"\pi"], [r"\boxed{\pi}", r"\boxed{0.5}"], [r"\boxed{1/2, \pi}"]),
        ("choice", ["A", "(B)"], ["Answer: (A)", "Answer: B"], ["Answer: C", "Answer: A or B"]),
        ("exact", ["yes", "Yes."], ["Answer: yes", "Answer: Yes."], ["Answer: YES"]),
        ("regex", ["ye+s", "sure"], ["Well, yees", "sure"], ["no"]),
    ],
)
def test_any_of_several_truths_is_right(graders, grader, truths, right, wrong):
    ours = graders((grader, {}))
    asked = [sample(text, truths[0], **{TRUTHS: truths}) for text in right + wrong]
    assert correct(ours.grade(asked)) == [True] * len(right) + [False] * len(wrong)
    assert ours.validate(asked[0].row) is None


def test_several_truths_are_validated_member_by_member(graders):
    ours = graders(("choice", {}))
    assert "'42'" in ours.validate(GradingTask("A", {TRUTHS: ["A", "42"]}))
    assert "object" in ours.validate(GradingTask('{"inputs": ["1"], "outputs": ["2"]}'))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("anwser", {}, r"'anwser'.*'answer'.*answer, choice, code, exact, gsm8k, math"),
        ("exact", {"hole": True}, "no option 'hole'; it has whole, ignore_case"),
        ("exact", {"whole": 1}, "grader_options.whole = 1: "),
        ("answer", {"whole": True}, "no option 'whole'; it has none"),
        ("regex", {"pattern": "("}, "is no regular expression"),
        ("regex", {"pattern": "(a)(b)"}, "2 groups"),
        ("nowhere.py:f", {}, "does not exist"),
    ],
)
def test_a_grader_that_is_not_there_is_told_at_once(name, options, message):
    with pytest.raises(UserError, match=message):
        check_grader(name, options)


def test_a_missing_package_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UserError, match="pip install reasoning-gym"):
        check_grader("reasoning_gym", {})


OWN = """
import os, time
from jaxrl.errors import UserError
from jaxrl.rewards import Grade

def grade(response, answer):
    if answer == "?":
        raise UserError("no truth")
    match response:
        case "raise":
            raise KeyError("lost")
        case "die":
            os._exit(3)
        case "sleep":
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "eat":
            return Grade(bool(bytearray(1 << 40)), None)
        case "None":
            return None
    return Grade(response == answer, response)

def short(response):
    return Grade(True, response)
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return f"{file}:grade"


def test_what_a_grader_does_costs_one_verdict_and_touches_no_other(graders, own, caplog, capfd):
    ours = graders((own, {}), cpu_seconds=0.3)
    texts = ["7", "raise", "7", "die", "7", "spin", "8", "sleep", "eat", "None", "7"]
    with caplog.at_level(logging.WARNING):
        started = time.monotonic()
        verdicts = ours.grade([sample(text, "7") for text in texts])
    assert time.monotonic() - started < 60
    assert correct(verdicts) == [text == "7" for text in texts]
    assert [v.failure and v.failure.kind for v in verdicts] == [
        None, "raised", None, "died", None, "timeout", None, "timeout", "memory", "raised", None,
    ]  # fmt: skip
    assert all(v.score == -1.0 for v in verdicts if v.failure)
    # The first of each kind is shown with what it was about.
    assert len(caplog.records) == 4
    assert "KeyError: 'lost'" in caplog.text and "reward/grader/failed_died" in caplog.text
    capfd.readouterr()


def test_a_function_of_ones_own(graders, own):
    ours = graders((own, {}))
    assert correct(ours.grade([sample("7", "7"), sample("8", "7")])) == [True, False]
    assert ours.validate(GradingTask("?")) == "no truth" and ours.validate(GradingTask("7")) is None
    with pytest.raises(UserError, match=r"cannot be called with \(response, answer\)"):
        check_grader(own.replace(":grade", ":short"), {})
    with pytest.raises(UserError, match="takes no options"):
        check_grader(own, {"strict": True})


def test_a_function_that_raises_is_a_failure_here_as_well():
    def broken(response, answer):
        if response == "7":
            return Grade(True, "7")
        raise ZeroDivisionError

    ours = Graders.of(FunctionGrader(broken))
    first, second = ours.grade([sample("8", "7"), sample("7", "7")])
    assert first.failure.kind == "raised" and second == Verdict(1.0, True, "7")


@pytest.mark.parametrize(
    ("name", "imported"), [("answer", {"answer"}), ("choice", {"answer", "simple_graders"})]
)
def test_a_run_imports_the_graders_that_it_names_and_no_other(name, imported):
    program = (
        "import sys, jaxrl.rewards\n"
        f"jaxrl.rewards.Graders(({name!r}, {{}}))\n"
        "print(*(m.removeprefix('jaxrl.rewards.') for m in sys.modules if m.startswith('jaxrl')))"
    )
    command = [sys.executable, "-c", program]
    loaded = set(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    every = {kind.path.partition(":")[0] for kind in GRADERS.values()}
    assert loaded & every == imported
    assert any("sandbox" in module for module in loaded) is False
    assert not any(module.startswith("jaxrl_") for module in loaded)


class Waiting:
    """Grades once it is let; notes how many samples came together."""

    def __init__(self):
        self.let = threading.Event()
        self.batches = []

    def __call__(self, response, answer):
        assert self.let.wait(60)
        self.batches[-1] += 1
        if answer == "?":
            raise UserError("no truth")
        return Grade(response == answer, response)


def test_graders_answer_beside_what_comes_next_and_take_up_at_once_what_has_waited():
    function = Waiting()
    inner = FunctionGrader(function)

    class Batches(Grader):
        def grade(self, samples):
            function.batches.append(0)
            return inner.grade(samples)

    ours = Graders.of(Batches())
    first = ours.submit(lambda: [sample("1", "1")])
    while not function.batches:
        time.sleep(0.01)
    # While the first is graded, three more come.
    others = [ours.submit(lambda n=n: [sample(str(n), "1")] * 2) for n in range(3)]
    function.let.set()
    assert correct(first.result()) == [True]
    assert [correct(a.result()) for a in others] == [[False] * 2, [True] * 2, [False] * 2]
    assert function.batches == [1, 6]
    ours.close()


def test_a_truth_that_cannot_be_read_is_told_to_who_asked_with_it():
    function = Waiting()
    ours = Graders.of(FunctionGrader(function))
    function.batches.append(0)
    good, bad, fine = (ours.submit(lambda truth=truth: [sample("1", truth)]) for truth in "1?1")
    function.let.set()
    assert correct(good.result()) == correct(fine.result()) == [True]
    with pytest.raises(UserError, match="no truth"):
        bad.result()
    ours.close()


def test_a_hint_is_given_once_if_most_answers_cannot_be_read(graders, caplog):
    ours = graders(("answer", {}))
    unread = [sample("It is forty-two.", "42")]
    ours.grade(unread * 40 + [sample("Answer: 41", "42")] * 20)
    assert not caplog.records, "too few have been looked at"
    ours.grade(unread * 8)
    (record,) = caplog.records
    told = record.getMessage()
    assert "the grader 'answer' found no answer in 48 of the first 68 responses; it reads" in told
    assert 'a last line such as "Answer: 42" or "#### 42", or \\boxed{42}. Ask for that in' in told
    ours.grade(unread * 200)
    assert len(caplog.records) == 1


def test_no_hint_is_given_if_half_of_the_answers_can_be_read(graders, caplog):
    ours = graders(("answer", {}), {"own": (f"{__file__}:finds_nothing", {})})
    ours.grade([sample("Answer: 41", "42"), sample("It is forty-two.", "42")] * 100)
    # A grader of the user's need not say what it has read.
    ours.grade([sample("yes", "42", "own")] * 100)
    assert not caplog.records


def finds_nothing(response: str, truth: str) -> Grade:
    return Grade(correct=False, prediction=None)
