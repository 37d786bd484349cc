"""The files of docs/tutorial.md work: the data are read, the recipes load, the functions compute."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.user_code import load_function

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which everything of the page was done but training."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["jaxrl", "new", "my_recipe"]) == 0
    for block in BLOCKS:
        if name := re.match(r"# (\w+\.py)\n", block):
            pathlib.Path(name[1]).write_text(block)
    (lines,) = (block for block in BLOCKS if block.startswith("    config."))
    recipe = pathlib.Path("my_recipe.py")
    head, _, _ = recipe.read_text().partition("    # The problems:")
    recipe.write_text(head + lines)
    subprocess.run([sys.executable, "make_data.py"], check=True)
    return tmp_path


def test_its_recipes_load_and_its_data_are_read(folder, capsys):
    config = load_config(Config, "my_algorithm.py", {})
    assert config.rollout.num_prompts == 8 and config.optim.lr == 2e-5
    assert config.algorithm.loss_options == {"width": 0.1}
    assert cli.main(["jaxrl", "data", "train.jsonl"]) == 0
    assert "layout question/answer" in capsys.readouterr().out


def test_its_reward_pays_right_answers_that_are_short(folder):
    class Responses:
        texts = ("7", "It is 7", "8")
        answers = ("7", "7", "7")
        tokens = (np.arange(2), np.arange(4), np.arange(2))

    brief = load_function("my_reward.py:brief", "reward", takes=("responses",))
    assert brief(Responses) == [0.5, 0.25, 0.0]


def test_its_loss_has_the_policy_gradient_at_ratio_1_and_none_far_away(folder):
    soft_clip = load_function("my_loss.py:soft_clip", "loss")
    advantage = jnp.array([1.0, -2.0])

    def total(logprob):
        return soft_clip(logprob, jnp.zeros(2), advantage, width=0.1)[0].sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.zeros(2)), [-1.0, 2.0])
    assert abs(jax.grad(total)(jnp.full(2, 2.0))).max() < 1e-6
    assert soft_clip(jnp.array([0.0, 1.0]), jnp.zeros(2), advantage)[1]["far"].tolist() == [0, 1]


def test_its_advantage_is_the_distance_to_the_middle_of_the_group(folder):
    above_middle = load_function("my_advantage.py:above_middle", "advantage")
    scores, groups = jnp.array([1.0, -1.0, 1.0, 3.0]), jnp.array([0, 0, 1, 1])
    assert above_middle(scores, groups, num_groups=2).tolist() == [1.0, -1.0, -1.0, 1.0]
