"""The dataflows are as short as in the papers, and do things in their order."""

import ast
import inspect

import pytest

from jaxrl.recipes.registry import RECIPES


def body(recipe: str) -> list[str]:
    """Lines of code of a recipe, its signature and docstring left out."""
    source = inspect.getsource(RECIPES[recipe])
    (function,) = ast.parse(source).body
    statements = function.body[1:]
    return source.splitlines()[statements[0].lineno - 1 :]


def test_lines_of_the_dataflows():
    assert len(body("ppo")) <= 10
    assert len(body("safe_rlhf")) <= len(body("ppo")) + 6
    assert not any("critic" in line or "values" in line for line in body("remax"))


class Recorder:
    """Events that note their order; each returns a name."""

    def __init__(self):
        self.order = []

    def __getattr__(self, name):
        def event(*args):
            self.order.append(name)
            if name == "hooks":
                return len([event for event in self.order if event == "hooks"]) < 2
            if name.startswith(("update", "raise")):
                return {name: 0.0}
            return (name, name) if name.endswith(("critic_advantages", "cost_advantages")) else name

        return event


@pytest.mark.parametrize("recipe", ["ppo", "grpo", "remax", "safe_rlhf"])
def test_a_step_generates_prepares_and_learns_in_this_order(recipe):
    recorder = Recorder()
    events = list(inspect.signature(RECIPES[recipe]).parameters)[1:]
    RECIPES[recipe](range(5), **{name: getattr(recorder, name) for name in events})
    first = recorder.order[: len(recorder.order) // 2]
    # `hooks` ended it after the second step, which was like the first.
    assert recorder.order == first * 2
    # ReMax scores twice; otherwise each event happens once.
    assert set(first) == set(events)
    learning = [i for i, name in enumerate(first) if name.startswith("update")]
    advantages = [i for i, name in enumerate(first) if name.endswith("advantages")]
    assert first[0] == "generate" and first[-1] == "hooks"
    assert max(advantages) < min(learning)
    assert first.index("with_old_logprobs") < min(advantages)
