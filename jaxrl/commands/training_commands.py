"""The commands that train from a config: train, sft, dpo and reward-model.

Each takes the program's name and its arguments, and returns the exit status. The planner resolves the
settings "auto" of a config before the trainer sees it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from jaxrl.config import command_line
from jaxrl.config.schema import Config


def train(argv: Sequence[str]) -> int:
    """Trains a recipe by reinforcement learning, or only plans it."""
    command = _later(
        "train_or_plan", "Trains a recipe, or only checks it and prints what it would take."
    )
    switches = {"dry_run": "check and print, allocate nothing"}
    return command_line.run(command, Config, switches=switches, argv=argv)


def sft(argv: Sequence[str]) -> int:
    """Trains a recipe by supervised fine-tuning, the stage that `train` starts with."""
    command = _later("fine_tune", "Trains the SFT stage of a recipe.")
    return command_line.run(command, Config, argv=argv)


def dpo(argv: Sequence[str]) -> int:
    """Trains a recipe by direct preference optimisation, the offline alternative to `train`."""
    command = _later("train_dpo", "Trains a policy on the pairs that the config names.")
    return command_line.run(command, Config, argv=argv)


def reward_model(argv: Sequence[str]) -> int:
    """Trains a reward or cost model on pairs, for use as `reward.model` or `cost.model` of other recipes."""
    command = _later(
        "train_reward_model", "Trains a reward or cost model on the pairs that the config names."
    )
    return command_line.run(command, Config, argv=argv)


def _later(function: str, about: str) -> Callable[..., int]:
    """Wraps a function of `run_commands` and imports it at its call, so that key errors are reported fast.

    Args:
      function: name of the function.
      about: first line of `--help`.
    """

    def command(config: Config, **switches: bool) -> int:
        module = importlib.import_module("jaxrl.commands.run_commands")
        return getattr(module, function)(config, **switches)

    command.__doc__ = about
    return command
