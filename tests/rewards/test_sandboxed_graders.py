"""Code against unit tests, and scorers of reasoning-gym: what passes, and what a program may try instead."""

import json
import time

import numpy as np
import pytest
from extras import import_extra

from jaxrl.errors import UserError
from jaxrl.rewards import Graders, GradingTask, Response
from jaxrl.rewards.sandboxed_graders import program_of, run_tests


def sample(text, answer, **row):
    return Response(text, np.zeros(1, np.int32), GradingTask(answer, **row))


def block(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture(scope="module")
def graders():
    """In the first sandbox that works here, or in none: what passes is the same."""
    sources = {"parts": ("code", {"part_marks": True}), "countdown": ("reasoning_gym", {})}
    options = {"cpu_seconds": 1.0}
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


@pytest.mark.parametrize("name", CHEATS)
def test_a_wrong_program_costs_its_time_and_passes_nothing(graders, name):
    if name == "forks" and graders._graders[""][1]._sandbox == "none":
        pytest.skip("nothing would stop it here")
    right = block("def add(a, b):\n    return a + b")
    texts = [(block(CHEATS[name]), SUM), (block(CHEATS[name]), ADD), (right, ADD)]
    verdicts = graders.grade([sample(t, a) for t, a in texts])
    assert [v.correct for v in verdicts] == [False, False, True]
    assert all(v.failure is None for v in verdicts)


VALUES = {
    "[1, (2, 3)]": "[1, [2, 3]]",
    "{1: 'a', True and 2: (1,)}": "{2: [1], 1: 'a'}",
    "{'a': {1.0, 2}, None: b'x'}": "{None: b'x', 'a': {1, 2}}",
    "__import__('collections').Counter('aab')": "{'a': 2, 'b': 1}",
    "{(1, 'x'), (2, 'y')}": "{(2, 'y'), (1, 'x')}",
    "3 + 4j": "3 + 4j",
    "[0.1 + 0.2, float('inf')]": "[0.3, 1e999]",
    "'\\ud800\\n\\0'": "'\\ud800\\n\\0'",
    "10**4000": str(10**4000),
}
OTHERS = {
    "[1, 2]": "[2, 1]",
    "{1: 2}": "{'1': 2}",
    "{'set': ['1']}": "{1}",
    "{1, 2}": "[1, 2]",
    "True": "1",
    "[True]": "[1]",
    "0.30001": "0.3",
    "None": "False",
    "9**9**5": "3",
    "[1]" + ".__class__": "[1]",
}


@pytest.mark.parametrize("value", VALUES)
def test_values_of_any_kind_are_those_that_python_finds_equal(value):
    program = f"def f(): return {value}"
    assert run_tests((program, f"assert f() == {VALUES[value]}", 2.0, "none")) == [True]


@pytest.mark.parametrize("value", OTHERS)
def test_values_that_differ(value):
    program = f"def f(): return {value}"
    assert run_tests((program, f"assert f() == {OTHERS[value]}", 2.0, "none")) == [False]


# Kilobytes that a program reports as its value. Read as Python literals some of them took 21 s.
REPORTS = {
    "signs": "'-' * 400_000 + '1'",
    "signs, quoted": "'\"' + '-' * 400_000 + '1\"'",
    "depth": "'[' * 400_000",
    "depth of tables": "'{\"a\":' * 80_000",
    "digits": "'9' * 400_000",
    "sums, quoted": "'\"' + '1+' * 200_000 + '1j\"'",
    "many": "'[' + '[],' * 130_000 + '1]'",
    "members that collide, quoted": (
        "'\"{' + ','.join(str(n * (2**61 - 1)) for n in range(18_000)) + '}\"'"
    ),
    "keys that collide": "'{\"set\": [' + ','.join(str(n * (2**61 - 1)) for n in range(18_000)) + ']}'",
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_long_report_is_read_in_less_than_a_second(name):
    program = f"import os\nos.write(2, ({REPORTS[name]}).encode() + b'\\n')\nos._exit(0)"
    used = time.process_time()
    assert run_tests((program, "assert f() == {1, 2}", 2.0, "none")) == [False]
    assert time.process_time() - used < 1.0


def test_a_long_value_is_compared_whole():
    program = "def f(n): return list(range(n))"
    tests = json.dumps({"fn_name": "f", "inputs": [[60_000]], "outputs": [list(range(60_000))]})
    assert run_tests((program, tests, 4.0, "none")) == [True]


def test_a_sleeping_program_holds_its_worker_no_longer_than_one_that_computes():
    began = time.monotonic()
    for program in (
        "import time\ntime.sleep(600)",
        "import signal\nsignal.pause()",
        "input()\ninput()",
    ):
        assert run_tests((program, SUM, 1.0, "none")) in (None, [False, False])
    assert time.monotonic() - began < 8


def test_all_tests_of_an_answer_have_one_limit():
    """Each run sleeps less than it may."""
    tests = json.dumps({"inputs": [""] * 100, "outputs": ["1"] * 100})
    began = time.monotonic()
    assert run_tests(("import time\ntime.sleep(0.3)\nprint(1)", tests, 0.4, "none")) is None
    assert time.monotonic() - began < 12


def test_a_program_that_waits_for_its_threads_does_not_sleep():
    program = (
        "import threading, time\n"
        "def work():\n    until = time.process_time() + 1.5\n    while time.process_time() < until: pass\n"
        "t = threading.Thread(target=work)\nt.start()\nt.join()\nprint(1)"
    )
    tests = json.dumps({"inputs": [""], "outputs": ["1"]})
    assert run_tests((program, tests, 3.0, "none")) == [True]


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
