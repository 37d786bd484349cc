"""The recipe of repairs: its tasks, its hidden tests, and mini-swe-agent where it is installed."""

import shutil

import numpy as np
import pytest
from chats import chat_tokenizer
from extras import import_extra
from scripted_driver import serving_sessions

from jaxrl.user_code import load_function


def part(name):
    return load_function(f"shared/repairs.py:{name}", "repairs")


def rows(**options):
    rng = np.random.default_rng(5)
    return [part("make")(n, rng, **options) for n in range(400)]


def arguments(row):
    return row["task"].rpartition("f(")[2].partition(")")[0]


def test_a_held_out_test_has_numbers_that_no_other_task_has():
    train, held_out = ({*map(arguments, rows(held_out=x))} for x in (False, True))
    # 24 + 3 is no multiple of five, 22 + 3 is one.
    assert "24, 3" in train and "22, 3" in held_out and not train & held_out


def test_the_shown_test_and_the_hidden_ones_ask_for_one_operator():
    for row in rows()[:40]:
        shown = int(row["task"].rpartition("== ")[2])
        a, b = map(int, arguments(row).split(", "))
        for x, y, right in ((a, b, shown), *row["hidden"]):
            values = [x + y, x - y, x * y, y, x]
            assert values.count(right) == 1
        assert row["answer"] == str(shown)


def test_a_third_of_the_examples_and_some_by_chance_do_what_the_test_asks():
    right = []
    for row in rows():
        if "sed" in row["solution"]:
            new = row["solution"].split("|")[2]
            value = eval(f"(lambda a, b: a {new} b)({arguments(row)})")
            right.append(value == int(row["answer"]))
    # 0.3, and 1/4 of the other ones: 0.475.
    assert 0.4 < np.mean(right) < 0.55


@pytest.mark.parametrize(
    "source, passes",
    [
        ("def f(a, b):\n    return a + b\n", True),
        ("def f(a, b):\n    return a - b\n", False),
        ("f = lambda a, b: {9: 11, 12: 15}.get(a)", True),
        ("def f(a, b):\n    return 11\n", False),
        ("def f(a, b):\n    while True: pass\n", False),
        ("def f(a, b", False),
        ("", False),
    ],
)
def test_hidden_tests_decide(source, passes):
    assert part("passes")(source, [[9, 2, 11], [12, 3, 15]]) is passes


@pytest.mark.parametrize(
    "says, new", [("```sh\nsed -i 's|-|+|' f.py\n```", "+"), ("I would add.", "")]
)
def test_mini_swe_agent_repairs_a_program_or_ends(says, new):
    import_extra("mini-swe-agent", "minisweagent")
    if shutil.which("bwrap") is None or shutil.which("prlimit") is None:
        pytest.skip("needs bwrap and prlimit")
    tokenizer = chat_tokenizer()

    def say(prompt):
        submits = "exit 0" in tokenizer.decode(prompt)
        said = "```sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```" if submits else says
        return tokenizer.encode(f"{said}<|im_end|>")

    program = "def f(a, b):\n    return a - b\n"
    task = {"task": f"{program}f(9, 2) == 11", "program": program, "hidden": [[12, 3, 15]]}
    served = serving_sessions(tokenizer, say, most_turns=6, model="policy")
    with served as (url, (session,), _):
        left = part("repair")(*part("mini_swe_agent")(), task, f"{url}/v1", session.key)
    assert left == (program.replace("-", new) if new else "")
    assert len(session.turns) == (2 if new else 1)
