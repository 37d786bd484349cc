"""`jaxrl.train` and `jaxrl.open_run`, as a notebook calls them."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from extras import import_extra

import jaxrl
from jaxrl.api import build_config
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

ROOT = pathlib.Path(__file__).parents[1]
ROWS = [{"problem": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
# One small step, on one device of eight.
SMALL = {
    "placement": {"one": {"roles": ("actor", "reference"), "train": "1-1-1", "devices": "0-0"}},
    "train__rows": 8,
    "sft__num_steps": 0,
    "sft__run": "",
    "rollout__num_prompts": 2,
    "rollout__slots": 8,
    "rollout__prefill_prompts": 2,
    "rollout__generation_prompts": 2,
    "rollout__num_samples": 4,
    "rollout__max_response_tokens": 8,
    "algorithm__updates_per_step": 1,
    "run__save_every": 1,
    "model__num_layers": 1,
    "model__d_model": 32,
    "model__d_ff": 32,
}


def brevity(responses):
    return [1.0 / (1 + len(text)) for text in responses.texts]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_import_does_not_wait_for_jax():
    code = "import sys, jaxrl; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        jaxrl.trian  # noqa: B018


@pytest.mark.long
def test_train_on_rows_with_a_function(here):
    suffix = 3.0

    def reward(responses):  # holds a value of the program around it
        return [suffix + len(answer) for answer in responses.answers]

    metrics = jaxrl.train("grpo_tiny", data=ROWS, reward=reward, name="mine", num_steps=2, **SMALL)
    assert metrics["step"].to_pylist() == [1, 2]
    assert all(4.0 <= value <= 5.0 for value in metrics["critic/rewards/mean"].to_pylist())
    folder = pathlib.Path(metrics.schema.metadata[b"folder"].decode())
    assert folder == pathlib.Path("runs/mine/seed0") and (folder / "report.html").exists()
    # The same call again: the run is finished, and its metrics come back.
    again = jaxrl.train("grpo_tiny", data=ROWS, reward=reward, name="mine", num_steps=2, **SMALL)
    assert again.equals(metrics)
    # Other data under the same name would mix two runs.
    with pytest.raises(UserError, match=r"mine/seed0 holds a run with another train .*name=\.\.\."):
        jaxrl.train("grpo_tiny", data=ROWS[:9], reward=reward, name="mine", num_steps=2, **SMALL)


def test_a_loop_of_ones_own(here):
    drawn = []

    def mine(step, prompts):
        sampled = step.sample(prompts)
        drawn.append(sampled)
        batch = step.advantages(step.actor.logprobs(step.pack(sampled)))
        return batch.metrics | step.actor.update(batch)

    (here / "taken").mkdir()
    with (
        pytest.raises(UserError, match="taken exists and is not overwritten"),
        jaxrl.open_run("grpo_tiny", data=iter(ROWS), reward=brevity, **SMALL) as run,
    ):
        metrics = [run.step(), run.step(mine)]
        assert len(drawn) == 1
        for row in metrics:
            assert np.isfinite(row["actor/pg_loss"])
        run.save_model(here / "taken")
    # What was trained is not lost.
    run.save_model(here / "model")
    with pytest.raises(UserError, match="this run is closed"):
        run.step()
    assert {"config.json", "model.safetensors"} <= set(os.listdir(here / "model"))


def test_what_becomes_of_objects(here):
    def endless_rows(seed):
        return ({"problem": str(n), "answer": "1"} for n in itertools.count(seed))

    config = build_config(
        "grpo_tiny",
        model="Qwen/Qwen2.5-0.5B",
        data=({"problem": p, "answer": "1"} for p in "abc"),
        reward=lambda responses: [2.0],
        algorithm__entropy_coef=0.0,
        rollout__driver=endless_rows,
        optim__lr=1e-4,
        num_steps=3,
    )
    assert (
        config.weights == config.tokenizer.path == "Qwen/Qwen2.5-0.5B" and not config.sft.num_steps
    )
    assert (config.optim.lr, config.run.num_steps) == (1e-4, 3)
    assert pathlib.Path(config.data.train.path).read_text().count("\n") == 3
    # Data of one's own are not evaluated with a recipe's problems.
    assert not config.data.evaluation_sources
    reward = load_function(config.reward.functions["reward"]["path"], "it", takes=("responses",))
    assert reward("x") == [2.0]
    assert next(load_function(config.rollout.driver, "it")(5)) == {"problem": "5", "answer": "1"}
    # A cell that runs again means the same run.
    again = build_config("grpo_tiny", reward=brevity, name="brief")
    assert build_config("grpo_tiny", reward=brevity, name="brief") == again


def by_length(responses):
    return [float(len(text)) for text in responses.texts]


def test_several_rewards(here):
    (here / "mine.py").write_text("def third(responses):\n    return [0.0] * len(responses)\n")
    config = build_config("grpo_tiny", data=ROWS[:3], reward=[brevity, by_length, "mine.py:third"])
    assert pathlib.Path(config.data.train.path).read_text().count("\n") == 3
    assert list(config.reward.functions) == ["brevity", "by_length", "third"]
    assert {term["weight"] for term in config.reward.functions.values()} == {1.0}
    paths = [term["path"] for term in config.reward.functions.values()]
    assert load_function(paths[1], "it") is not load_function(paths[0], "it")
    assert paths[2] == "mine.py:third" and config.reward.grader_weight == 0.0
    with pytest.raises(UserError, match=r"reward 'brevity' of the list has no name of its own"):
        build_config("grpo_tiny", reward=[brevity, brevity], name="twice")
    with pytest.raises(UserError, match=r"<lambda>.* has no name of its own"):
        build_config("grpo_tiny", reward=[lambda responses: [1.0]], name="unnamed")


def test_pandas_itself(here):
    pandas = import_extra("dev", "pandas")
    config = build_config("grpo_tiny", data=pandas.DataFrame(ROWS))
    lines = pathlib.Path(config.data.train.path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


@pytest.mark.slow
def test_a_function_typed_into_a_program_is_a_reward_as_an_object_and_not_as_a_path(here):
    """As in a notebook: the program has no file, and the run calls the function in another process."""
    small = {**SMALL, "run__num_steps": 1}
    code = f"""
import jaxrl
def reward(responses):
    return [0.5] * len(responses)
rows, small = {ROWS!r}, {small!r}
metrics = jaxrl.train("grpo_tiny", data=rows, reward=[reward], name="typed", **small)
assert metrics["reward/reward/mean"].to_pylist()[-1] == 0.5, metrics
try:
    jaxrl.train("grpo_tiny", data=rows, reward="__main__:reward", name="named", **small)
except jaxrl.errors.UserError as error:
    assert "cannot import what was typed" in str(error), error
else:
    raise AssertionError("taken")
"""
    subprocess.run([sys.executable, "-"], input=code.encode(), check=True, cwd=here)


def test_a_reward_that_uses_another_number_is_another_reward(here):
    def reward(responses):
        return [limit for _ in responses.texts]

    limit = 1.0
    build_config("grpo_tiny", reward=reward)
    build_config("grpo_tiny", reward=reward)
    limit = 2.0
    with pytest.raises(UserError, match="holds a run with another reward"):
        build_config("grpo_tiny", reward=reward)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optim__lrr": 1.0}, 'unknown setting "optim.lrr"; near: optim.lr'),
        ({"nothing": 1.0}, 'unknown setting "nothing"'),
        ({"data": [["a"]]}, "row 0 of train is list; give dicts"),
        (
            {"data": [{"problem": "a"}, {"problem": {1}}]},
            "row 1 of train has a value that is no JSON",
        ),
        ({"optim__lr": "fast"}, "optim.lr"),
    ],
)
def test_a_mistake_is_one_line_and_keeps_nothing(here, changes, told):
    with pytest.raises(UserError, match=told) as caught:
        build_config("grpo_tiny", **changes)
    assert "\n" not in str(caught.value) and not list(here.iterdir())


def test_a_function_that_holds_a_lock_is_refused(here):
    lock = threading.Lock()

    def reward(responses):
        with lock:
            return [1.0]

    with pytest.raises(
        UserError, match=r"reward cannot be taken to another process .*my_functions.py"
    ):
        build_config("grpo_tiny", reward=reward)


@pytest.mark.long
def test_an_open_run_is_served_between_two_steps(here):
    openai = import_extra("dev", "openai")
    with jaxrl.open_run("grpo_tiny", data=iter(ROWS), reward=brevity, **SMALL) as run:
        run.step()
        with run.serve() as server:
            ask = {"model": server.model, "prompt": "3 + 4 =", "max_tokens": 4, "seed": 1}
            with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
                first, again = (client.completions.create(**ask).choices[0].text for _ in range(2))
                assert first == again
            other = openai.OpenAI(base_url=server.url, api_key="other", max_retries=0)
            with other, pytest.raises(openai.AuthenticationError):
                other.completions.create(**ask)
        assert np.isfinite(run.step()["actor/pg_loss"])
    with pytest.raises(UserError, match="this run is closed"), run.serve():
        pass
