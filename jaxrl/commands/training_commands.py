"""The command that trains from a config.

It takes the program's name and its arguments, and returns the exit status. The planner resolves the settings
"auto" of a config before the trainer sees it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from jaxrl.config import command_line
from jaxrl.config.schema import Config


def train(argv: Sequence[str]) -> int:
    """Trains a recipe, by reinforcement learning, on pairs or on examples, or only plans it."""
    command = _later(
        "train_or_plan", "Trains a recipe, or only checks it and prints what it would take."
    )
    switches = {"dry_run": "check and print, allocate nothing"}
    return command_line.run(command, Config, switches=switches, argv=argv)


def _later(function: str, about: str) -> Callable[..., int]:
    """Wraps a function of `run_commands`, with `about` as the first line of `--help`."""

    def command(config: Config, **switches: bool) -> int:
        # Imported at the call: a mistyped setting is reported before JAX is imported.
        module = importlib.import_module("jaxrl.commands.run_commands")
        return getattr(module, function)(config, **switches)

    command.__doc__ = about
    return command
