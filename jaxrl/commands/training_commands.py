"""The commands that train what a config says: train, profile, sft, dpo and reward-model.

Each takes the program's name and its arguments, and returns the exit status. The planner decides what a
config leaves open ("auto") before the trainer sees it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from jaxrl.config import command_line
from jaxrl.config.schema import Config


def train(argv: Sequence[str]) -> int:
    """Reinforcement learning of a recipe, or its plan alone."""
    command = _later(
        "train_or_plan", "Trains a recipe, or only checks it and prints what it would take."
    )
    switches = {"dry_run": "check and print, allocate nothing"}
    return command_line.run(command, Config, switches=switches, argv=argv)


def sft(argv: Sequence[str]) -> int:
    """Supervised fine-tuning: the stage that `train` begins with, alone."""
    command = _later("fine_tune", "Trains the warm start of a recipe.")
    return command_line.run(command, Config, argv=argv)


def dpo(argv: Sequence[str]) -> int:
    """Direct preference optimisation, the offline comparison to reinforcement learning."""
    command = _later("train_dpo", "Trains a policy on the pairs that the config names.")
    return command_line.run(command, Config, argv=argv)


def reward_model(argv: Sequence[str]) -> int:
    """A reward or cost model from pairs, which other recipes name as `reward.model` or `cost.model`."""
    command = _later(
        "train_reward_model", "Trains a reward or cost model on the pairs that the config names."
    )
    return command_line.run(command, Config, argv=argv)


def profile(argv: Sequence[str]) -> int:
    """Where the time of one step of a recipe goes."""
    command = _later("profile", "Traces one step of a recipe, and prints where its time goes.")
    return command_line.run(command, Config, argv=argv)


def _later(function: str, about: str) -> Callable[..., int]:
    """A function of `run_commands`, imported when it is called, so that a wrong key is told at once.

    Args:
      function: its name.
      about: a line that heads `--help`.
    """

    def command(config: Config, **switches: bool) -> int:
        module = importlib.import_module("jaxrl.commands.run_commands")
        return getattr(module, function)(config, **switches)

    command.__doc__ = about
    return command
