"""What the commands of `training_commands` do with a checked config; each returns the exit status."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxrl.config.schema import Config
from jaxrl.planner import planning, profiling
from jaxrl.planner.resolve import resolved
from jaxrl.trainer import needs, program


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe, or only checks it and prints what it would take."""
    if dry_run:
        planning.plan(config).show()
        return 0
    return _start(config, program.train, needs.of_reinforcement)


def profile(config: Config) -> int:
    """Traces one step of a recipe, and prints where its time goes."""
    return _start(config, profiling.profile, needs.of_reinforcement)


def fine_tune(config: Config) -> int:
    """Trains the warm start of a recipe."""
    return _start(config, program.fine_tune, needs.of_fine_tuning)


def train_dpo(config: Config) -> int:
    """Trains a policy on the pairs that the config names."""
    return _start(config, program.train_dpo, needs.of_preferences)


def train_reward_model(config: Config) -> int:
    """Trains a reward or cost model on the pairs that the config names."""
    return _start(config, program.train_reward_model, needs.of_preferences)


def _start(config: Config, run: Callable[[Config], int], looked_up: needs.Needs) -> int:
    """Starts this process, decides what the config leaves open, and runs."""
    program.start(config)
    return run(resolved(config, jax.devices(), needs=looked_up))
