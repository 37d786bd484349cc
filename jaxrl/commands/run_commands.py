"""The functions behind `training_commands`: each takes a checked config and returns the exit status."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxrl.config.schema import Config
from jaxrl.hub.smollm2 import SMOLLM2
from jaxrl.mesh import hosts
from jaxrl.planner import plan_tables, profiling
from jaxrl.planner.cpu_devices import with_cpu_devices
from jaxrl.planner.peak_memory import peak_memory_line
from jaxrl.planner.resolve import resolved
from jaxrl.planner.trace_plan import trace_plan
from jaxrl.trainer import program
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, RunKind, check_for_plan, fine_tuning
from jaxrl.trainer.hub_files import with_hub_files


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe; with `dry_run` only prints its plan and looks up what it names on this machine."""
    if dry_run:
        plan_tables.show(trace_plan(with_cpu_devices(config)))
        check_for_plan(config)
        return 0
    return _start(config, _train, REINFORCEMENT)


def _train(config: Config) -> int:
    status = program.train(config)
    if not status and hosts.is_first():
        print(peak_memory_line(config))
    return status


def profile(config: Config) -> int:
    """Traces one step of a recipe and prints where its time goes."""
    return _start(config, profiling.profile, REINFORCEMENT)


def fine_tune(config: Config) -> int:
    """Runs the supervised warm-up of a recipe by itself."""
    return _start(config, program.fine_tune, fine_tuning(config))


def train_dpo(config: Config) -> int:
    """Trains a policy on preference pairs (DPO)."""
    return _start(config, program.train_dpo, PREFERENCES)


def train_reward_model(config: Config) -> int:
    """Trains a reward or cost model on preference pairs."""
    return _start(config, program.train_reward_model, PREFERENCES)


def _start(config: Config, run: Callable[[Config], int], kind: RunKind) -> int:
    """Sets up this process, resolves the config's open settings, and calls `run`."""
    return run(resolved(prepared(config), jax.devices(), kind=kind))


def prepared(config: Config) -> Config:
    """Sets up the devices of this process, and fetches what the config names.

    Returns:
      The config with simulated devices resolved and with paths in place of hub names.
    """
    if config.weights == str(SMOLLM2.folder):
        SMOLLM2.fetch()
    config = with_cpu_devices(config)
    program.start(config)
    return with_hub_files(config, jax.devices())
