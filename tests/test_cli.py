"""`jaxrl COMMAND ...`: every command is there, and is the one of its launch script."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from jaxrl import cli

ROOT = pathlib.Path(__file__).parents[1]
HELP_OF_ALL = """
import contextlib, io
from jaxrl import cli

for name in cli.COMMANDS:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            status = cli.main(["bin/jaxrl", name, "--help"])
        except SystemExit as exit:
            status = exit.code
    assert status == 0, (name, status)
    assert f"usage: jaxrl {name} " in out.getvalue(), out.getvalue()

# JAX takes the number of devices as long as nothing has asked for one, and refuses it afterwards.
import jax
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices("cpu")) == 3
"""


def python(source: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_list_of_the_commands_does_not_wait_for_jax():
    listing = "import sys; from jaxrl import cli; cli.main(['bin/jaxrl', '--help'])"
    done = python(f"{listing}; assert 'jax' not in sys.modules")
    assert (done.returncode, done.stderr) == (0, "")
    first, *listed, last = done.stdout.splitlines()
    assert first == "usage: jaxrl COMMAND [ARGUMENT ...]"
    assert last == "jaxrl COMMAND --help lists the arguments of one"
    assert [line.split(maxsplit=1) for line in listed] == [
        [name, command.about] for name, command in cli.COMMANDS.items()
    ]


def test_every_command_tells_its_arguments_without_a_device():
    done = python(HELP_OF_ALL)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("command", "closed"), [("train --help", "<&- >&- 2>&-"), ("new recipe", ">&-")]
)
def test_streams_that_are_closed_are_no_error(tmp_path, closed, command):
    shell = f"exec {sys.executable} -m jaxrl {command} {closed}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    # Nothing that was printed has gone into the file that took the number of the stream.
    recipe = tmp_path / "recipe.py"
    assert not recipe.exists() or "is yours to change" not in recipe.read_text()


def test_a_reader_that_leaves_early_is_no_error():
    source = "import sys; from jaxrl import cli; sys.exit(cli.main(['jaxrl', 'train', '--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_package_installs_the_command():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["scripts"] == {"jaxrl": "jaxrl.cli:main"}


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "jaxrl", "trian"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and "near: " in done.stderr


SCRIPTS = sorted((ROOT / "launch").glob("*.py"))


def printed(capsys, run, *arguments) -> tuple[int, str, str]:
    """Exit status and what went to stdout and stderr."""
    try:
        status = run(*arguments)
    except SystemExit as exit:
        status = exit.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("argument", ["--help", "--bogus"])
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_launch_script_is_the_command_of_its_name(monkeypatch, capsys, path, argument):
    monkeypatch.setenv("COLUMNS", "5000")  # where a usage wraps depends on the program's name
    monkeypatch.setattr(sys, "argv", [str(path), argument])
    by_script = printed(capsys, runpy.run_path, str(path), None, "__main__")
    name = path.stem.replace("_", "-")
    by_name = printed(capsys, cli.main, ["jaxrl", name, argument])
    as_typed = re.compile(rf"^(usage: |)\S*{re.escape(path.name)}\b", re.MULTILINE)
    status, *texts = by_script
    assert status == (0 if argument == "--help" else 2)
    assert (status, *(as_typed.sub(rf"\1jaxrl {name}", text) for text in texts)) == by_name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_slip_is_one_line_without_the_usage(name, capsys):
    status, _, told = printed(capsys, cli.main, ["jaxrl", name, "--bogus"])
    assert status == 2 and re.fullmatch("error: .*--help lists all flags.*\n", told), told


def test_importing_a_launch_script_runs_nothing():
    # As multiprocessing does in the processes that it spawns.
    for path in SCRIPTS:
        runpy.run_path(str(path), run_name="__mp_main__")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given; write jaxrl COMMAND, one of train, evaluate, "),
        (["trian"], 'unknown command "trian"; near: train (--help'),
        (["xyz", "--help"], 'unknown command "xyz"; near: train, evaluate, '),
        (
            ["--config=configs/dapo_tiny.py"],
            'unknown command "--config=configs/dapo_tiny.py"; near: ',
        ),
    ],
)
def test_what_names_no_command_is_one_line(capsys, arguments, message):
    status, out, err = printed(capsys, cli.main, ["bin/jaxrl", *arguments])
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_wrong_key_is_told_before_the_trainer_is_imported():
    ran = python("""
import sys
from jaxrl import cli
status = cli.main(["jaxrl", "train", "--config", "configs/dapo_tiny.py", "--config.optim.lrr=1"])
assert status == 2, status
heavy = {"jaxrl.trainer.program", "jaxrl.models.decoder", "jaxrl.roles.learner", "flax.nnx"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
""")
    assert ran.returncode == 0, ran.stderr
    assert 'unknown setting "optim.lrr"; near: optim.lr' in ran.stderr
