"""Reward functions by path, from modules and files that tests write."""

import contextlib
import dataclasses
import re
import sys
import textwrap
import types

import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.rewards import Responses
from jaxrl.rewards.graders import check_grader
from jaxrl.rewards.user import UserRewards, reward_function
from jaxrl.types import TurnText
from jaxrl.user_code import load_function


@pytest.fixture
def written(tmp_path):
    """Writes a file of reward functions and returns its path."""

    def write(source: str) -> str:
        path = tmp_path / "my_rewards.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    yield write
    for name in [name for name in sys.modules if str(tmp_path) in name]:
        del sys.modules[name]


@pytest.fixture
def completions(make_scored):
    return make_scored([5, 9], num_samples=2).completions


def test_a_function_sees_what_else_the_rows_hold(written, completions):
    path = written(
        """
        def level(responses):
            assert len(responses.extras) == len(responses) == 4
            return [extra.get("info", {}).get("level", 0) for extra in responses.extras]
        """
    )
    extras = ({"info": {"level": 3}, "id": 7}, {})
    prompts = dataclasses.replace(completions.prompts, extras=extras)
    completions = dataclasses.replace(completions, prompts=prompts)
    rewards = UserRewards([f"{path}:level"], timeout_s=60)
    for scores in (
        reward_function(f"{path}:level")(Responses.of(completions)),
        rewards.scores(f"{path}:level", completions),
    ):
        assert scores == [3, 3, 0, 0]
    rewards.close()


def test_a_function_of_the_program_is_refused_before_a_process_looks_for_it(monkeypatch):
    main = types.ModuleType("__main__")
    vars(main)["reward"] = lambda responses: [0.0] * len(responses)
    vars(main)["grade"] = lambda response, answer: None
    monkeypatch.setitem(sys.modules, "__main__", main)
    message = "is called in a process of its own, which cannot import what was typed into this one"
    with pytest.raises(UserError, match=message) as error:
        reward_function("__main__:reward")
    assert "name it my_functions.py:reward" in str(error.value)
    with pytest.raises(UserError, match=message):
        check_grader("__main__:grade", {})
    # What is called in this process may be of it.
    assert load_function("__main__:reward", "environment") is vars(main)["reward"]


def test_a_function_sees_each_response_with_what_it_answers(completions):
    responses = Responses.of(completions)
    assert len(responses) == 4
    assert responses.prompts == ("prompt 5", "prompt 5", "prompt 9", "prompt 9")
    assert responses.answers == ("answer 5", "answer 5", "answer 9", "answer 9")
    assert responses.sources == ("source 1",) * 4
    assert responses.texts == ("response 5.0", "response 5.1", "response 9.0", "response 9.1")
    assert responses.num_samples == 2
    np.testing.assert_array_equal(responses.truncated_B, completions.truncated_B)
    assert responses.tokens is completions.tokens and responses.mask is completions.mask
    assert responses.policy_texts == responses.texts


def test_a_function_sees_who_wrote_what(written, completions):
    path = written(
        """
        def honest(responses):
            assert all("Answer: 5" in text for text in responses.texts)
            for turns, said in zip(responses.turns, responses.policy_texts):
                assert said == "\\n".join(turn.text for turn in turns if turn.by_policy)
            drawn = [mask.sum() for mask in responses.mask]
            return [n * ("Answer: 5" in said) for n, said in zip(drawn, responses.policy_texts)]
        """
    )
    tool = (TurnText(True, "I do not know."), TurnText(False, "Answer: 5"), TurnText(True, "Ah"))
    policy = (TurnText(True, "Answer: 5"),)
    turns = (tool, tool, policy, policy)
    completions = dataclasses.replace(
        completions, turns=turns, texts=tuple("".join(t.text for t in one) for one in turns)
    )
    with contextlib.closing(UserRewards([f"{path}:honest"], timeout_s=60)) as rewards:
        scores = rewards.scores(f"{path}:honest", completions)
    assert scores[:2] == [0, 0]
    assert scores[2:] == [len(tokens) for tokens in completions.tokens[2:]]


def test_wrong_results_name_the_function(written, completions):
    path = written("def f(responses):\n    return (x for x in range(4))\n") + ":f"
    message = f"reward function '{re.escape(path)}' returned generator"
    with pytest.raises(UserError, match=message):
        reward_function(path)(Responses.of(completions))


def test_what_a_function_raises_passes_through_with_its_path(written, completions):
    path = written("def f(responses):\n    return 1 / 0\n") + ":f"
    with pytest.raises(ZeroDivisionError) as error:
        reward_function(path)(Responses.of(completions))
    assert error.value.__notes__ == [f"raised by the reward function {path!r}"]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("import no_such_thing", "f", r"my_rewards\.py:1: ModuleNotFoundError.*no_such_thing"),
        ("import sys\nsys.exit(0)", "f", r"cannot be imported: .*my_rewards\.py:2: SystemExit: 0"),
        ("def f(:", "f", r"SyntaxError: .*my_rewards\.py, line 1"),
        ("def good(r): ...", "f", "has no 'f'; it has good"),
        ("f = 3", "f", "is int, which cannot be called"),
    ],
)
def test_files_that_do_not_work_say_why(written, source, name, message):
    path = f"{written(source)}:{name}"
    with pytest.raises(UserError, match=message) as error:
        reward_function(path)
    assert path in str(error.value)


def test_a_mended_file_is_read_again(written, completions):
    with pytest.raises(UserError, match="NameError"):
        reward_function(written("f = lambda responses: 1 * x\nx[0]") + ":f")
    path = written("def f(responses):\n    return [2.0] * len(responses)\n")
    assert reward_function(f"{path}:f")(Responses.of(completions)) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards.py", "has no function's name; write package.module:function"),
        ("my_rewards.py:", "has no function's name"),
        ("my_rewards.py:a.b", "has no function's name"),
        ("no/such/file.py:f", "does not exist; paths are relative to"),
        ("no_such_package.rewards:f", "ModuleNotFoundError.*set PYTHONPATH, or give path/to/file"),
    ],
)
def test_paths_that_lead_nowhere_say_how_to_write_them(path, message):
    with pytest.raises(UserError, match=message):
        reward_function(path)


def test_a_function_abstains_by_none_and_not_by_nan(written, completions):
    source = "def f(responses):\n    return [{}, 0.5, 2, None]\n"
    path = written(source.format("None")) + ":f"
    with contextlib.closing(UserRewards([path], timeout_s=60)) as rewards:
        assert rewards.scores(path, completions) == [None, 0.5, 2.0, None]
    path = written(source.format("float('nan')")) + ":f"
    named = r"returned nan for response 0 \(sample 0 of the prompt 'prompt 5' of 'source 1'\) and 1 of 4"
    with (
        contextlib.closing(UserRewards([path], timeout_s=60)) as rewards,
        pytest.raises(UserError, match=named),
    ):
        rewards.scores(path, completions)
