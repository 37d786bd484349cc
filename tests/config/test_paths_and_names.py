"""Paths that no file system holds, names that no line holds, and recipes that are none: one line each."""

import typing

import pytest

from jaxrl.checks import PATH
from jaxrl.config.command_line import load_config, run
from jaxrl.config.config_tree import group_class, leaf_types
from jaxrl.config.schema import Config
from jaxrl.errors import UserError


def paths_of(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of the settings that are paths."""
    found = []
    for name, annotation in typing.get_type_hints(cls, include_extras=True).items():
        if PATH in getattr(annotation, "__metadata__", ()):
            found.append(f"{prefix}{name}")
        elif group := group_class(annotation):
            found += paths_of(group, f"{prefix}{name}.")
    return found


PATHS = paths_of(Config)


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        run(print, Config, argv=["train", *arguments])
    text = str(caught.value)
    assert "\n" not in text and "\0" not in text and len(text) < 700
    return text


def test_every_path_is_found():
    assert {"weights", "data.train.path", "run.output", "reward.grader"} < set(PATHS)
    assert len(PATHS) > 20 and set(PATHS) < leaf_types(Config).keys()


@pytest.mark.parametrize("setting", PATHS)
@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 2500 + "b", "a" * 256 + "/b.py:f"])
def test_a_path_that_no_file_system_holds_is_refused(setting, path):
    assert f"{setting} = '" in (text := refusal("--config=grpo_tiny", f"--config.{setting}={path}"))
    assert "is too long for a file system" in text


def test_a_path_of_the_largest_size_is_taken():
    path = "/".join(["a" * 255] * 15) + "/b.py"
    assert load_config(Config, "grpo_tiny", {"weights": path}).weights == path


@pytest.mark.parametrize(
    "recipe", ["x" * 5000, "x" * 5000 + ".py", "a/" * 3000 + "b", "a\0b", "a\nb"]
)
def test_a_recipe_that_no_file_system_holds_is_not_there(recipe):
    assert "no recipe file" in refusal(f"--config={recipe}")


@pytest.mark.parametrize(
    "override",
    [
        "name=a\nb",
        "name=a\0b",
        "seed=1\n2",
        "a\nb=1",
        "a\0b=1",
        "optim.a\nb=1",
        "reward.functions.a\nb.path=x.py:f",
        "data.sources.a\nb.path=x",
        "data.evaluations.a\0b.path=x",
        "hosts.fewer.a\nb=x",
        "placement.a\nb.train=1-1-1",
    ],
)
def test_a_name_with_a_control_character_is_refused_in_one_line(override):
    refusal("--config=grpo_tiny", f"--config.{override}")


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("None", "returned None, not a ConfigDict"),
        ("{'seed': 1}", "not a ConfigDict"),
        ("'a\\nb'", "not a ConfigDict"),
        ("Config()", "not a ConfigDict"),
        ("ConfigDict({'foo': 1})", 'unknown setting "foo"'),
        ("ConfigDict({5: 1, 'seed': 1})", "cannot be read"),
        ("ConfigDict({'optim': 5})", '"optim" is a group of settings; near: optim.kind'),
        ("ConfigDict({'reward': {'functions': {'a\\nb': {}}}})", "has the character"),
        ("ConfigDict({'optim': {'lr': placeholder(float, required=True)}})", "cannot be read"),
    ],
)
def test_what_a_recipe_must_not_return(tmp_path, returned, told):
    (tmp_path / "mine.py").write_text(
        "from ml_collections import ConfigDict\n"
        "from ml_collections.config_dict import placeholder\n"
        "from jaxrl.config.config_tree import to_config_dict\n"
        "from jaxrl.config.schema import Config\n"
        f"def get_config():\n    return {returned}\n"
    )
    assert told in refusal(f"--config={tmp_path}/mine.py")


@pytest.mark.parametrize("made", ["to_config_dict(Config())", "ConfigDict({'optim': {}})"])
def test_an_unlocked_recipe_is_read_like_any_other(tmp_path, made):
    (tmp_path / "mine.py").write_text(
        "from ml_collections import ConfigDict\n"
        "from jaxrl.config.config_tree import to_config_dict\n"
        "from jaxrl.config.schema import Config\n"
        f"def get_config():\n    config = {made}\n    config.unlock()\n    return config\n"
    )
    recipe = str(tmp_path / "mine.py")
    config = load_config(Config, recipe, {"optim.lr": "1e-3", "data.sources.more.path": "x.jsonl"})
    assert config.optim.lr == 1e-3 and config.data.sources["more"].path == "x.jsonl"
    assert 'unknown setting "optim.lrr"; near: optim.lr' in refusal(
        f"--config={recipe}", "--config.optim.lrr=1"
    )
    assert 'unknown setting "foo.bar"' in refusal(f"--config={recipe}", "--config.foo.bar=1")
