"""`jaxrl train` trains what the recipe says: by reinforcement learning, on pairs, or on examples alone."""

import pytest

from jaxrl import cli
from jaxrl.commands.run_commands import training_of
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.trainer import program


@pytest.mark.parametrize(
    ("recipe", "run", "stage"),
    [
        ("sft_tiny", program.fine_tune, "sft"),
        ("dpo_tiny", program.train_dpo, "preference"),
        ("reward_tiny", program.train_reward_model, "preference"),
        ("cost_tiny", program.train_reward_model, "preference"),
    ],
)
def test_recipes_without_reinforcement_learning(recipe, run, stage, capsys):
    training = training_of(load_config(Config, recipe, {}))
    assert training.run is run and training.folder.path.name == stage
    # A plan of reinforcement learning would be one of something else.
    assert cli.main(["jaxrl", "train", "--config", recipe, "--dry_run"]) == 2
    assert "this recipe has none" in capsys.readouterr().err


def test_reinforcement_learning_after_the_supervised_stage():
    config = load_config(Config, "dapo_tiny", {})
    training = training_of(config)
    assert config.sft.num_steps and training.kind.rewards and training.folder.path.name == "rl"
