"""What `make` installs and when, with a Python that only writes down what it is asked."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# `-m venv DIR` makes DIR/bin/python of it, `-c` is real: the Makefile asks for the version and the extras.
PYTHON = """#!/bin/sh
echo "$JAXRL_EXTRAS: $*" >>"$ASKED"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-c "*) exec "$REAL" "$@" ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Runs `make`; returns the extras it installed, the commands it ran beside that, and its errors."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(PYTHON)
    python.chmod(0o755)
    # What an outer `make test EXTRAS=...` hands down is not for this one.
    handed_down = ("MAKEFLAGS", "MFLAGS", "EXTRAS")
    environment = {name: x for name, x in os.environ.items() if name not in handed_down}
    environment |= {"ASKED": str(asked), "REAL": sys.executable}

    def run(*goals: str, status: int = 0) -> tuple[list[str], list[str], str]:
        asked.write_text("")
        done = subprocess.run(
            ["make", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", *goals],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode != 0) == (status != 0), done.stderr
        lines = asked.read_text().splitlines()
        installed = [line.split("--editable ")[1] for line in lines if "--editable" in line]
        ran = [line for line in lines if " -m pytest" in line or "launch/train.py" in line]
        return installed, ran, done.stderr

    return run


def test_the_demo_installs_what_it_needs_and_tests_add_the_rest(make):
    assert make()[0] == ["."]
    assert make("demo")[0] == []
    assert make("test")[0] == [".[dev]"]
    assert make("demo")[0] == make("test")[0] == []


def test_both_demos_share_an_environment(make):
    installed, (ran,), _ = make("demo-lm", "SEED=3")
    assert installed == [".[gguf]"]
    assert ran.endswith("launch/train.py --config configs/grpo_smollm2.py --config.seed=3")
    assert make("demo")[0] == []


def test_the_tests_environment_has_what_the_demo_needs(make):
    assert make("test", "EXTRAS=dev,aot")[0] == [".[dev,aot]"]
    assert make("demo")[0] == []


def test_an_extra_named_later_is_installed_then_and_once(make):
    assert make("test")[0] == [".[dev]"]
    assert make("test")[0] == []
    assert make("test", "EXTRAS=dev,parity,aot")[0] == [".[dev,parity,aot]"]
    for extras in ("dev,parity,aot", "parity,dev", "dev", ""):
        installed, ran, _ = make("test", f"EXTRAS={extras}")
        assert installed == [] and len(ran) == 1


def test_nothing_but_jaxrl_itself_can_be_installed(make):
    assert make("test", "EXTRAS=")[0] == ["."]
    assert make("test", "EXTRAS=")[0] == []
    assert make("demo")[0] == []


def test_tests_are_given_the_extras_that_must_not_skip(make):
    _, (ran,), _ = make("test", "EXTRAS=dev,parity")
    assert ran.startswith("dev,parity: -m pytest")


def test_a_misspelt_extra_is_refused(make):
    installed, ran, errors = make("test", "EXTRAS=dev,partiy", status=2)
    assert "EXTRAS names ['partiy']; known are ['agents', 'aot', 'aot-gpu', 'dev'," in errors
    assert installed == ran == []


def test_the_site_installs_what_builds_it(make):
    assert make("docs")[0] == [".[docs]"]
    assert make("docs")[0] == []
