"""Paths that no file system takes are refused in one line, wherever one can be given."""

import typing

import pytest

from jaxrl import checks, cli
from jaxrl.checks import PATH, OneOf, check_path
from jaxrl.config.config_tree import from_config_dict, group_class, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig
from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.files import read_bytes
from jaxrl.user_code import load_function

ODD = {
    "long": ("x/" * 2499 + "xy", "has 5,000 bytes"),
    "a long name": ("a/" + "x" * 300, "has a name of 300 bytes"),
    "letters of several bytes": ("ä" * 200, "has a name of 400 bytes"),
    "NUL": ("a\0b", "has a NUL character"),
}
# Settings of text that name no file. A new one is added here, or gets the rule.
NO_PATHS = {
    *("hosts.coordinator", "mesh.train", "mesh.generate"),
    *("data.template", "data.system_prompt"),
    *("reward.judge.template", "algorithm.aggregation"),
    "preference.loss",
    *(f"data.{name}.{field}" for name in ("train", "evaluation") for field in ("source",)),
}


def text_settings(cls=Config, prefix=""):
    """Name and rules of every setting that is text."""
    for name, annotation in checks.annotations_of(cls).items():
        kind, *rules = [annotation]
        if typing.get_origin(annotation) is typing.Annotated:
            kind, *rules = typing.get_args(annotation)
        group = group_class(kind)
        if group:
            yield from text_settings(group, f"{prefix}{name}.")
        elif kind is str:
            yield f"{prefix}{name}", rules


PATHS = [name for name, rules in text_settings() if PATH in rules]


def test_every_setting_of_text_is_a_path_or_is_known_to_be_none():
    choices = {name for name, rules in text_settings() if any(isinstance(r, OneOf) for r in rules)}
    # With run.output these make the folder of a run, which is checked as a whole.
    of_folder = {"name", "sft.run"}
    others = {name for name, _ in text_settings()} - choices - of_folder
    assert others - set(PATHS) == NO_PATHS
    assert {"weights", "tokenizer.path", "data.train.path", "run.output"} < set(PATHS)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", PATHS)
def test_a_setting_refuses_what_is_no_path(name, odd):
    value, said = ODD[odd]
    tree = to_config_dict(Config())
    *groups, leaf = name.split(".")
    group = tree
    for key in groups:
        group = group[key]
    group[leaf] = value
    with pytest.raises(UserError, match=rf"^{name} .* {said}") as error:
        from_config_dict(Config, tree)
    assert len(str(error.value)) < 1000


def test_so_do_entries_of_tables():
    with pytest.raises(UserError, match=r"path .* has a NUL"):
        SourceConfig(path="\0")
    tree = to_config_dict(Config())
    tree.reward.functions = {"f": {"path": "x" * 5000 + ".py:f", "weight": 1.0}}
    with pytest.raises(UserError, match=r"functions\.f\.path .* has 5,005 bytes"):
        from_config_dict(Config, tree)


def test_the_folder_of_a_run_is_checked_as_a_whole():
    config = to_config_dict(Config())
    config.run.output, config.name = "x/" * 1700, "y" * 200
    with pytest.raises(UserError, match=r"run\.output with name .* has 3,"):
        from_config_dict(Config, config)


TINY = ["--config", "configs/dapo_tiny.py"]
COMMANDS = {
    "train --config": ["train", "--config", "{}"],
    "convert --path": ["convert", "--path", "{}", "--out", "out"],
    "convert --out": ["convert", "--path", "run", "--out", "{}"],
    "data": ["data", "{}"],
    "data --to": ["data", "a.jsonl", "--to", "{}"],
    "data --tokenizer": ["data", "a.jsonl", "--tokenizer", "{}"],
    "evaluate --model": ["evaluate", "--model", "{}", "--set", "a.jsonl"],
    "evaluate --set": ["evaluate", "--model", "model", "--set", "{}"],
    "evaluate --out": ["evaluate", "--model", "model", "--set", "a.jsonl", "--out", "{}"],
    "browse": ["browse", "{}"],
    "report": ["report", "{}", "other"],
    "report --out": ["report", "a", "b", "--out", "{}"],
    "import-verl": ["import-verl", "{}"],
    "import-verl --out": ["import-verl", "run.sh", "--out", "{}"],
    "plan --topology": ["plan", *TINY, "--topology", "{}"],
    "mesh --model": ["mesh", "--train", "1-1-1", "--model", "{}"],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_argument_refuses_what_is_no_path(command, odd, capsys):
    value, said = ODD[odd]
    argv = [argument.format(value) for argument in COMMANDS[command]]
    assert cli.main(["jaxrl", *argv]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and len(error) < 1000


@pytest.mark.parametrize("odd", ODD)
def test_serve_refuses_it_with_the_usage(odd, capsys):
    value, said = ODD[odd]
    with pytest.raises(SystemExit) as ended:
        cli.main(["jaxrl", "serve", "--model", value])
    assert ended.value.code == EXIT_USER_ERROR
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("odd", ODD)
def test_what_reads_a_path_refuses_it_by_itself(odd):
    value, _ = ODD[odd]
    with pytest.raises(UserError) as error:
        read_bytes(value, absent="name another")
    assert len(str(error.value)) < 1000
    with pytest.raises(UserError, match="is not there"):
        load_function(f"{value}.py:f", "grader")


def test_paths_that_exist_are_taken():
    for path in ("", ".", "/", "a/../b", "x" * 255, "ä" * 127, "file.py:function", "a b\n"):
        check_path("--path", path)
