"""Recipes by file and by name, and the one that `jaxrl new` writes."""

import pytest

from jaxrl import cli
from jaxrl.config.command_line import bundled_recipes, load_config, recipe_path
from jaxrl.config.schema import Config
from jaxrl.config.shapes import model_of
from jaxrl.errors import UserError


def test_a_recipe_by_its_name_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        recipe_path("dapo_tiny")
        == recipe_path("dapo_tiny.py")
        == str(bundled_recipes() / "dapo_tiny.py")
    )
    with pytest.raises(UserError, match='no recipe file "dapo_tini"; near: dapo_tiny'):
        recipe_path("dapo_tini")
    with pytest.raises(
        UserError, match=r'no recipe file "elsewhere/dapo_tiny.py"; near: dapo_tiny'
    ):
        recipe_path("elsewhere/dapo_tiny.py")


def test_a_file_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "dapo_tiny.py").write_text("")
    assert recipe_path("dapo_tiny") == "configs/dapo_tiny.py"
    (tmp_path / "dapo_tiny.py").write_text("")
    assert recipe_path("dapo_tiny.py") == "dapo_tiny.py"


def test_a_new_recipe_is_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["jaxrl", "new", "my_recipe"]) == 0
    config = load_config(Config, "my_recipe.py", {})
    assert config.name == "my_recipe" and config.algorithm.dataflow == "grpo"
    assert not config.sft.num_steps
    # The dry run that the command proposes knows the shape without the weights.
    assert model_of(config)[0].num_layers == 30
    text = (tmp_path / "my_recipe.py").read_text()
    # It is written over by nobody, and a mistake writes nothing.
    assert cli.main(["jaxrl", "new", "my_recipe.py"]) == 2
    assert cli.main(["jaxrl", "new", "../elsewhere"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "error: my_recipe.py is there already; take another name",
        "error: '../elsewhere' is no name of a recipe; take letters, digits and underscores",
    ]
    assert (tmp_path / "my_recipe.py").read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["my_recipe.py"]


def test_help_of_a_group(capsys):
    assert cli.main(["jaxrl", "train", "--help", "algorithm.kl"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "--config." in line]
    assert shown and all(line.startswith("  --config.algorithm.kl.") for line in shown)
    assert cli.main(["jaxrl", "train", "--help", "rolout"]) == 2
    assert capsys.readouterr().err == 'error: no group of settings "rolout"; near: rollout\n'


def test_the_version(capsys):
    assert cli.main(["jaxrl", "--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxrl 0.")
