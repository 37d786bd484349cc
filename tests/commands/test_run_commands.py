"""`jaxrl train` trains what the recipe says: by reinforcement learning, on pairs, or on examples alone."""

import pytest

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.tracking.durable import take_lock
from jaxrl.trainer import program


@pytest.mark.parametrize(
    ("recipe", "stages", "folder"),
    [
        ("sft_tiny", program.fine_tune, "sft"),
        ("dpo_tiny", program.learn_preferences, "preference"),
        ("reward_tiny", program.learn_reward_model, "preference"),
        ("cost_tiny", program.learn_reward_model, "preference"),
    ],
)
def test_recipes_without_reinforcement_learning(recipe, stages, folder, capsys):
    training = program.training_of(load_config(Config, recipe, {}))
    assert training.stages is stages and training.folder.path.name == folder
    # A plan of reinforcement learning would be one of something else.
    assert cli.main(["jaxrl", "train", "--config", recipe, "--dry_run"]) == 2
    assert "this recipe has none" in capsys.readouterr().err


def test_reinforcement_learning_after_the_supervised_stage():
    config = load_config(Config, "dapo_tiny", {})
    training = program.training_of(config)
    assert config.sft.num_steps and training.kind.rewards and training.folder.path.name == "rl"


def test_a_process_that_is_there_already_is_not_joined_by_another(tmp_path, capsys):
    folder = tmp_path / "dapo_tiny" / "seed0"
    folder.mkdir(parents=True)
    command = ["jaxrl", "train", "--config=dapo_tiny", f"--config.run.output={tmp_path}"]
    command += ["--config.hosts.coordinator=localhost:1", "--config.hosts.num_processes=2"]
    with take_lock(folder / "process.1.lock"):
        assert cli.main([*command, "--config.hosts.process_id=1"]) == 2
    assert f"{folder} is in use by process" in capsys.readouterr().err
