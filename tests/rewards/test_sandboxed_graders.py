"""Code against unit tests, and scorers of reasoning-gym: what passes, and what a program may try instead."""

import json

import numpy as np
import pytest
from extras import import_extra
from slow_values import mostly_slow

from jaxrl.errors import UserError
from jaxrl.rewards import Graders, GradingTask, Response
from jaxrl.rewards.sandboxed_graders import program_of


def sample(text, answer, **row):
    return Response(text, np.zeros(1, np.int32), GradingTask(answer, **row))


def block(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture(scope="module")
def graders():
    """In the first sandbox that works here, or in none: what passes is the same."""
    sources = {"parts": ("code", {"part_marks": True}), "countdown": ("reasoning_gym", {})}
    options = {"workers": 2, "cpu_seconds": 1.0}
    try:
        graders = Graders(("code", {}), sources, **options, code_sandbox="auto")
    except UserError:
        graders = Graders(("code", {}), sources, **options, code_sandbox="none")
    yield graders
    graders.close()


SUM = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})
ASSERTS = json.dumps(
    ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert not add(0, 0)"]
)


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (SUM, "print(sum(map(int, input().split())))"),
        (SUM, "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())), '')"),
        (ADD, "def add(a, b):\n    return a + b"),
        (ADD, "class Solution:\n    def add(self, a, b):\n        return a + b"),
        (ASSERTS, "import math\ndef add(a, b):\n    return a + b"),
        ("assert add(1, 2) == 3\nassert add(0.1, 0.2) == 0.3", "def add(a, b):\n    return a + b"),
    ],
)
def test_a_right_program_passes(graders, tests, program):
    (verdict,) = graders.grade([sample(block(program), tests)])
    assert verdict.correct and verdict.score == 1.0 and program.startswith(verdict.prediction[:10])


CHEATS = {
    "nothing": "",
    "wrong": "def add(a, b):\n    return a - b",
    "syntax": "def add(a, b:",
    "exits": "import sys\nsys.exit(0)",
    "leaves": "import os\nos._exit(0)",
    "equal to all": (
        "class E:\n    def __eq__(self, o): return True\n    def __repr__(self): return 'E()'\n"
        "def add(a, b):\n    return E()"
    ),
    "reports": "import os\nos.write(2, b'\"True\"\\n' * 9)\nos.write(1, b'3')",
    "spins": "while True:\n    pass",
    "sleeps": "import time\ntime.sleep(600)",
    "eats": "x = bytearray(1 << 40)",
    "forks": "import os\nwhile True:\n    os.fork()",
    "floods": "while True:\n    print('0' * 1000)",
    "recurses": "def add(a, b):\n    return add(a, b)",
    "huge": "def add(a, b):\n    return 9**9**9",
}


@pytest.mark.parametrize("name", mostly_slow(CHEATS.keys(), fast=CHEATS.keys() - {"sleeps"}))
def test_a_wrong_program_costs_its_time_and_passes_nothing(graders, name):
    if name == "forks" and graders._sandbox == "none":
        pytest.skip("nothing would stop it here")
    right = block("def add(a, b):\n    return a + b")
    texts = [(block(CHEATS[name]), SUM), (block(CHEATS[name]), ADD), (right, ADD)]
    verdicts = graders.grade([sample(t, a) for t, a in texts])
    assert [v.correct for v in verdicts] == [False, False, True]
    assert all(v.failure is None for v in verdicts)


def test_part_marks(graders):
    (verdict,) = graders.grade([sample(block("def add(a, b):\n    return 3"), ADD, source="parts")])
    assert not verdict.correct and verdict.score == 0.0


def test_the_last_block_is_the_program():
    assert program_of("```py\na\n```\nor\n```\nb\n```") == "b\n"
    assert program_of("print(1)") is None


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "42",
        "[]",
        "{}",
        '{"inputs": [1], "outputs": []}',
        '["assert f(1) > 2"]',
        '["import os"]',
        "{",
    ],
)
def test_tests_that_cannot_be_read_are_a_fault(graders, tests):
    assert graders.validate(GradingTask(tests))


def test_scorers_of_reasoning_gym(graders):
    import_extra("tasks", "reasoning_gym")
    extra = {"metadata": {"numbers": [1, 2, 3], "target": 7, "source_dataset": "countdown"}}
    answers = {
        "1 + 2*3": True,
        "2 * 3 + 1": True,
        "7": False,
        "1 + 2 + 3": False,
        "__import__('os')._exit(0)": False,
        "(lambda: 7)()": False,
        "9**9**9": False,
    }
    samples = [
        sample(f"<answer>{a}</answer>", "2*3 + 1", source="countdown", extra=extra) for a in answers
    ]
    assert [v.correct for v in graders.grade(samples)] == [*answers.values()]
    assert "no `metadata`" in graders.validate(GradingTask("7", source="countdown"))
