"""The dataflows are as short as in the papers, and do things in their order."""

import ast
import inspect
import types

import pytest

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.lookup import DATAFLOWS, find_dataflow
from jaxrl.dataflows.step import Step
from jaxrl.errors import UserError


def body(name: str) -> list[str]:
    """Lines of code of a dataflow, without decorator, signature, docstring and comments."""
    source = inspect.getsource(DATAFLOWS[name].function)
    (function,) = ast.parse(source).body
    statements = function.body[1:]
    lines = source.splitlines()[statements[0].lineno - 1 :]
    return [line for line in lines if not line.strip().startswith("#")]


def test_lines_of_the_dataflows():
    assert len(body("ppo")) <= 5
    assert len(body("safe_rlhf")) <= len(body("ppo")) + 5
    assert not any("critic" in line or "values" in line for line in body("remax"))


class Recorder:
    """A part of a step whose every method notes that it was called."""

    def __init__(self, name: str, order: list[str]):
        self._name = name
        self._order = order

    def __getattr__(self, method):
        def call(*args, **kwargs):
            order = self._order
            order.append(f"{self._name}.{method}".removesuffix(".__call__"))
            batch = types.SimpleNamespace(metrics={"seen": 1.0}, completions=Recorder("c", []))
            if method == "update":
                return {self._name: 0.0}
            pair = method in ("with_values", "with_costs") or order[-1] == "teacher.logprobs"
            return (batch, "second") if pair else batch

        return call

    def __call__(self, *args):
        return self.__getattr__("__call__")(*args)


def recorded_step(roles) -> tuple[Step, list[str]]:
    """A step with the roles of a dataflow and no others."""
    order: list[str] = []
    part = lambda name: Recorder(name, order)  # noqa: E731
    step = Step(
        sample=part("sample"),
        greedy=part("greedy"),
        pack=part("pack"),
        actor=part("actor"),
        advantages=part("advantages"),
        multiplier=part("multiplier"),
        phases={role: part(role) for role in roles if role not in ("actor", "reward")},
    )
    return step, order


@pytest.mark.parametrize("name", DATAFLOWS)
def test_a_step_samples_prepares_and_learns_in_this_order(name):
    flow = DATAFLOWS[name]
    step, order = recorded_step(flow.roles)
    metrics = flow(step, iter(()))
    assert order[0] == "sample"
    learning = [i for i, call in enumerate(order) if call in ("actor.update", "critic.update")]
    advantages = [i for i, call in enumerate(order) if call.startswith("advantages")]
    assert order.index("actor.logprobs") < min(advantages) <= max(advantages) < min(learning)
    assert order[-1] == "actor.update", "critics learn before the actor"
    # Nothing that was measured is lost.
    assert {"seen", "actor"} <= set(metrics)
    # Every role that is declared is used, the reward model inside the rewards of `sample`.
    used = {call.split(".")[0] for call in order}
    assert set(flow.roles) - {"reward"} <= used


def test_a_role_that_is_not_declared_is_not_there():
    step, _ = recorded_step(("actor",))
    with pytest.raises(AssertionError, match="uses critic, which its @dataflow"):
        _ = step.critic


def test_a_dataflow_of_ones_own_by_its_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxrl.dataflows.dataflow import dataflow\n"
        "@dataflow(roles=('actor', 'critic'))\n"
        "def mine(step, prompts):\n"
        "    return {'n': len(step.sample(prompts))}\n"
        "def bare(step, prompts):\n"
        "    return {}\n"
    )
    flow = find_dataflow(f"{file}:mine")
    assert flow.name == "mine" and flow.roles == ("actor", "critic")
    with pytest.raises(UserError, match="does not say which roles it has"):
        find_dataflow(f"{file}:bare")
    with pytest.raises(UserError, match="dataflow 'dpao' is not known"):
        find_dataflow("dpao")


def test_a_dataflow_has_an_actor():
    with pytest.raises(UserError, match="roles critic has nothing that samples; add 'actor'"):
        dataflow(roles=("critic",))
