"""What the commands of `training_commands` do with a checked config; each returns the exit status."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxrl.config.schema import Config
from jaxrl.planner import plan_tables, profiling
from jaxrl.planner.resolve import resolved
from jaxrl.planner.trace_plan import trace_plan
from jaxrl.trainer import program
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, RunKind, fine_tuning


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe, or only checks it and prints what it would take."""
    if dry_run:
        plan_tables.show(trace_plan(config))
        return 0
    return _start(config, program.train, REINFORCEMENT)


def profile(config: Config) -> int:
    """Traces one step of a recipe, and prints where its time goes."""
    return _start(config, profiling.profile, REINFORCEMENT)


def fine_tune(config: Config) -> int:
    """Trains the warm start of a recipe."""
    return _start(config, program.fine_tune, fine_tuning(config))


def train_dpo(config: Config) -> int:
    """Trains a policy on the pairs that the config names."""
    return _start(config, program.train_dpo, PREFERENCES)


def train_reward_model(config: Config) -> int:
    """Trains a reward or cost model on the pairs that the config names."""
    return _start(config, program.train_reward_model, PREFERENCES)


def _start(config: Config, run: Callable[[Config], int], kind: RunKind) -> int:
    """Starts this process, decides what the config leaves open, and runs."""
    config = program.start(config)
    return run(resolved(config, jax.devices(), kind=kind))
