"""What the commands of `commands.py` do with a checked config; each returns the exit status."""

from __future__ import annotations

from jaxrl.config.schema import Config
from jaxrl.trainer import profiling, program


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe, or only checks it and prints what it would take."""
    if dry_run:
        return program.dry_run(config)
    config = program.start(config)
    return program.train(config)


def profile(config: Config) -> int:
    """Traces one step of a recipe, and prints where its time goes."""
    config = program.start(config)
    return profiling.profile(config)


def fine_tune(config: Config) -> int:
    """Trains the warm start of a recipe."""
    config = program.start(config)
    return program.fine_tune(config)


def train_dpo(config: Config) -> int:
    """Trains on the pairs that the config names."""
    config = program.start(config)
    return program.train_dpo(config)


def train_reward_model(config: Config) -> int:
    """Trains on the pairs that the config names."""
    config = program.start(config)
    return program.train_reward_model(config)
