"""`jaxrl train` trains what the recipe says: by reinforcement learning, on pairs, or on examples alone."""

import pytest

from jaxrl import cli, extensions
from jaxrl.commands.run_commands import prepared
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import fetched_folder
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


def test_the_demos_weights_need_their_extension_only_until_they_are_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(extensions.EXTENSIONS, "SmolLM2-135M-Instruct", "jaxrl_gone.module:fetch")
    config = load_config(Config, "grpo_smollm2", {"mesh.simulated_devices": 3})
    with pytest.raises(UserError, match="SmolLM2-135M-Instruct needs jaxrl_gone, which is not ins"):
        prepared(config)
    fetched_folder().mkdir(parents=True)
    # The next thing that a start does: the tests have eight devices already.
    with pytest.raises(RuntimeError, match="before backends are initialized"):
        prepared(config)
