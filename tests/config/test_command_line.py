"""The command line: what is said reaches the command, and every slip is one line and status 2."""

from __future__ import annotations

import dataclasses
import pathlib
import textwrap
from typing import Any

import pytest

from jaxrl.checks import settings
from jaxrl.config import command_line, config_tree
from jaxrl.config.schema import Config as WholeConfig
from jaxrl.errors import UserError, exit_status


@settings
class Optim:
    lr: float = 1e-6
    lr_warmup_steps: int = 10

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr {self.lr} is not positive; use 1e-6 or so")


@settings
class Critic:
    width: int = 4
    optim: Optim = Optim(lr=1e-5)


@settings
class Config:
    seed: int = 0
    double_seed: int = 0
    fast: bool = False
    sure: bool | None = None
    title: str = "run"
    path: str | None = None
    limit: int | None = 8
    ratio: float | None = None
    depth: int | str = "auto"
    shape: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] | None = None
    optim: Optim = Optim()
    critic: Critic | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: dict[str, float] | None = None
    extra: Any = None


RECIPE = """
    from jaxrl.config import config_tree
    from tests.trainer.test_command_line import Config

    def get_config():
        config = config_tree.to_config_dict(Config())
        config.optim.lr = 1e-3
        config.options.level = 3
        config.options.kinds = ["a"]
        config.options["max-terms"] = 2
        config.double_seed = config.get_ref("seed") * 2
        return config
"""


def write(folder: pathlib.Path, source: str, name: str = "toy.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    own = "tests.trainer.test_command_line"
    path.write_text(textwrap.dedent(source).replace(own, __name__))
    return str(path)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "configs", RECIPE)


def launch(*arguments: str) -> tuple[int, list]:
    """Status, and what the command was called with."""
    calls = []

    def train(config, *, dry_run):
        """Trains a toy."""
        calls.append((config, dry_run))

    switches = {"dry_run": "stop early"}
    status = exit_status(
        lambda: command_line.run(train, Config, switches=switches, argv=["train.py", *arguments])
    )
    return status, calls


def configured(*arguments: str) -> Config:
    status, [(config, _)] = launch(*arguments)
    assert status == 0
    return config


def refused(capsys, *arguments: str) -> str:
    """The one line on stderr."""
    status, calls = launch(*arguments)
    out, err = capsys.readouterr()
    assert (status, calls, out) == (2, [], "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    return err[len("error: ") : -1]


def test_the_recipe_alone_reaches_the_command(recipe):
    status, calls = launch("--config", recipe)
    options = {"level": 3, "kinds": ["a"], "max-terms": 2}
    assert status == 0
    assert calls == [(Config(optim=Optim(lr=1e-3), options=options), False)]


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--config.seed=1"], "seed", 1),
        (["--config.seed", "1"], "seed", 1),
        (["--config.seed=x", "--config.seed=2"], "seed", 2),
        (["--config.seed=21"], "double_seed", 42),
        (["--config.fast"], "fast", True),
        (["--config.fast", "--config.fast=false"], "fast", False),
        (["--config.sure=true", "--config.sure=none"], "sure", None),
        (["--config.title=a b"], "title", "a b"),
        (["--config.title=x=y"], "title", "x=y"),
        (["--config.title="], "title", ""),
        (["--config.title=none"], "title", "none"),
        (["--config.path=out", "--config.path=None"], "path", None),
        (["--config.ratio=1"], "ratio", 1.0),
        (["--config.depth=4"], "depth", 4),
        (["--config.depth=deep"], "depth", "deep"),
        (["--config.shape=(1,2,3)"], "shape", (1, 2, 3)),
        (["--config.shape=[4, 5]"], "shape", (4, 5)),
        (["--config.shape=7"], "shape", (7,)),
        (["--config.names=('a','b')"], "names", ("a", "b")),
        (["--config.optim.lr=1e-5"], "optim", Optim(lr=1e-5)),
        (["--config.options.level=4"], "options", {"level": 4, "kinds": ["a"], "max-terms": 2}),
        (["--config.options={'a': 'b'}"], "options", {"a": "b"}),
        (["--config.options.kinds=['b']"], "options", {"level": 3, "kinds": ["b"], "max-terms": 2}),
        (
            ["--config.options.max-terms=x"],
            "options",
            {"level": 3, "kinds": ["a"], "max-terms": "x"},
        ),
        (["--config.weights={'a': 1}"], "weights", {"a": 1.0}),
        (["--config.extra=[1, 'a']"], "extra", [1, "a"]),
    ],
)
def test_an_override_is_read_by_the_type_of_its_setting(recipe, arguments, name, value):
    got = getattr(configured("--config", recipe, *arguments), name)
    assert (got, type(got)) == (value, type(value))


def test_a_recipe_fills_a_group_that_was_none(tmp_path):
    filled = "config.critic = config_tree.to_config_dict(Critic())\n        return config"
    source = RECIPE.replace("return config", filled).replace(
        "import Config", "import Config, Critic"
    )
    path = write(tmp_path, source)
    assert configured("--config", path, "--config.critic.width=9").critic == Critic(width=9)
    assert configured("--config", path, "--config.critic=none").critic is None


def test_a_recipe_may_take_an_argument_and_build_on_another(recipe, tmp_path):
    child = write(
        tmp_path,
        """
        from jaxrl.config import command_line

        def get_config(seed):
            config = command_line.load_recipe("configs/toy.py")
            config.seed = int(seed)
            return config
        """,
        "child.py",
    )
    config = configured("--config", f"{child}:5")
    assert (config.seed, config.optim.lr) == (5, 1e-3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.optim.lr=abc", "optim.lr = 'abc': "),
        ("--config.fast=maybe", "fast = 'maybe': "),
        ("--config.shape=(1,", "shape[0] = '(1,': "),
        ("--config.options=3", "options = 3: "),
        ("--config.optim.lr=-1", "optim: lr -1.0 is not positive; use 1e-6 or so"),
        ("--config.optim.lrr=1", 'unknown setting "optim.lrr"; near: optim.lr, '),
        ("--config.optm.lr=1", 'unknown setting "optm.lr"; near: optim.lr'),
        ("--config.shape[0]=1", 'unknown setting "shape[0]"; near: '),
        ("--config.options.levle=1", "near: options.level"),
        ("--config.optim={}", '"optim" is a group of settings; near: optim.lr (--help'),
        ("--config.critic.width=2", "its group is None in this recipe"),
        ("--config.critic.widht=2", 'unknown setting "critic.widht"; near: critic.width'),
        ("--config.seed", "--config.seed has no value"),
        ("--dryrun", "unknown flag --dryrun; near: --dry_run "),
        ("--dry_run=maybe", "flag --dry_run=maybe: "),
        ("seed=1", 'unexpected argument "seed=1"; settings are given as --config.NAME=VALUE'),
    ],
)
def test_a_slip_on_the_command_line_is_one_line(capsys, recipe, argument, message):
    assert message in refused(capsys, "--config", recipe, argument)


def test_without_a_recipe_those_at_hand_are_named(capsys, recipe, monkeypatch, tmp_path):
    assert refused(capsys, "--config.seed=1") == (
        "no recipe given; add --config RECIPE, such as configs/toy.py"
    )
    assert "configs/toy.py" in refused(capsys)
    assert "configs/toy.py" in refused(capsys, "--config=")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "such as calculator_smollm2, cost_tiny, dapo_" in refused(capsys)


@pytest.mark.parametrize("path", ["configs/toi.py", "configs/toy", "nowhere/toyy.py"])
def test_a_missing_recipe_names_the_path_and_near_ones(capsys, recipe, path):
    message = refused(capsys, "--config", path)
    assert message == f'no recipe file "{path}"; near: configs/toy.py'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = z\n", "{path}:2: NameError: name 'z' is not defined"),
        ("def get_config(:\n", "{path}:1: invalid syntax"),
        ("import json\njson.loads('{')\n", "{path}:2: JSONDecodeError: "),
        ("def get_config():\n  return [][1]\n", "{path}:2: IndexError: "),
        ("raise SystemExit(0)\n", "{path}:1: SystemExit: 0"),
        ("import sys\ndef get_config():\n  sys.exit()\n", "{path}:3: SystemExit:"),
        ("x = 1\n", "{path} defines no get_config()"),
        ("def get_config(): pass\n", "get_config() of {path} returned None, not a ConfigDict"),
        (
            RECIPE.replace("optim.lr =", "optim.lrr ="),
            '{path}:7: unknown setting "lrr"; near: optim.lr, critic.optim.lr',
        ),
        (RECIPE.replace("optim.lr =", "optimm.lr ="), '{path}:7: unknown setting "optimm"; near: '),
        (RECIPE.replace("1e-3", "'a'"), "optim.lr = 'a': "),
    ],
)
def test_a_recipe_that_fails_is_told_by_file_and_line(capsys, tmp_path, source, message):
    path = write(tmp_path, source)
    assert message.format(path=path) in refused(capsys, "--config", path)


def test_help_lists_switches_settings_and_defaults(capsys):
    status, calls = launch("--help")
    out, err = capsys.readouterr()
    assert (status, calls, err) == (0, [], "")
    lines = out.splitlines()
    assert lines[0] == "Trains a toy."
    assert lines[1].startswith("usage: train.py --config RECIPE")
    assert "  --dry_run: stop early" in lines
    assert "  --config.optim.lr=1e-06" in lines
    assert len([line for line in lines if line.startswith("  --config.")]) == len(
        config_tree.flatten_config(Config())
    )


def run_failing(recipe: str, error: BaseException) -> int:
    def command(config):
        raise error

    argv = ["train.py", "--config", recipe]
    return exit_status(lambda: command_line.run(command, Config, argv=argv))


def test_only_errors_of_the_user_lose_their_traceback(capsys, recipe):
    assert run_failing(recipe, UserError("no such\n  checkpoint")) == 2
    assert capsys.readouterr().err == "error: no such checkpoint\n"
    assert run_failing(recipe, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"
    for fault in ValueError("ours"), SystemExit(4):
        with pytest.raises(type(fault)):
            run_failing(recipe, fault)


@pytest.mark.parametrize("fault", [SystemExit(), SystemExit(0), SystemExit(None)])
def test_code_that_ends_the_program_does_not_look_like_success(capsys, recipe, fault):
    assert run_failing(recipe, fault) == 2
    error = capsys.readouterr().err
    assert "test_command_line.py:" in error and "has ended the program (SystemExit)" in error
    assert error.count("\n") == 1


def test_the_status_is_the_commands(recipe):
    argv = ["evaluate.py", "--config", recipe]
    assert command_line.run(lambda config: 3, Config, argv=argv) == 3


def test_what_the_files_of_a_model_say_is_no_setting(capsys):
    with pytest.raises(
        UserError, match=r"model\.post_norms: the model's files tell this; set weights"
    ):
        command_line.load_config(WholeConfig, "configs/dapo_tiny.py", {"model.post_norms": "true"})
    assert command_line.run(lambda config: 0, WholeConfig, argv=["train.py", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "model.post_norms" not in shown and "--config.model.d_model=128" in shown
