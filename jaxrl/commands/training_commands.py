"""The commands that train what a config says: train, profile, sft, dpo and reward-model.

Each takes the program's name and its arguments, and returns the exit status. The planner decides what a
config leaves open ("auto") before the trainer sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.planner import plan_tables, profiling
from jaxrl.planner.resolve import resolved
from jaxrl.planner.trace_plan import trace_plan
from jaxrl.trainer import program
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, RunKind, fine_tuning


def train(argv: Sequence[str]) -> int:
    """Reinforcement learning of a recipe, or its plan alone."""
    switches = {"dry_run": "check and print, allocate nothing"}
    return command_line.run(_train_or_plan, Config, switches=switches, argv=argv)


def sft(argv: Sequence[str]) -> int:
    """Supervised fine-tuning: the stage that `train` begins with, alone."""
    return command_line.run(_fine_tune, Config, argv=argv)


def dpo(argv: Sequence[str]) -> int:
    """Direct preference optimisation, the offline comparison to reinforcement learning."""
    return command_line.run(_train_dpo, Config, argv=argv)


def reward_model(argv: Sequence[str]) -> int:
    """A reward or cost model from pairs, which other recipes name as `reward.model` or `cost.model`."""
    return command_line.run(_train_reward_model, Config, argv=argv)


def profile(argv: Sequence[str]) -> int:
    """Where the time of one step of a recipe goes."""
    return command_line.run(_profile, Config, argv=argv)


# The first lines of these head what --help prints.


def _train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe, or only checks it and prints what it would take."""
    if dry_run:
        plan_tables.show(trace_plan(config))
        return 0
    return _start(config, program.train, REINFORCEMENT)


def _profile(config: Config) -> int:
    """Traces one step of a recipe, and prints where its time goes."""
    return _start(config, profiling.profile, REINFORCEMENT)


def _fine_tune(config: Config) -> int:
    """Trains the warm start of a recipe."""
    return _start(config, program.fine_tune, fine_tuning(config))


def _train_dpo(config: Config) -> int:
    """Trains on the pairs that the config names."""
    return _start(config, program.train_dpo, PREFERENCES)


def _train_reward_model(config: Config) -> int:
    """Trains on the pairs that the config names."""
    return _start(config, program.train_reward_model, PREFERENCES)


def _start(config: Config, run: Callable[[Config], int], kind: RunKind) -> int:
    """Starts this process, decides what the config leaves open, and runs."""
    program.start(config)
    return run(resolved(config, jax.devices(), kind=kind))
