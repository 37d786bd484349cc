"""The functions behind `training_commands`: each takes a checked config and returns the exit status."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import array_names
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.huggingface.packaged import fetch_if_packaged
from jaxrl.planner import plan_tables, profiling
from jaxrl.planner.cpu_devices import with_cpu_devices
from jaxrl.planner.peak_memory import peak_memory_line
from jaxrl.planner.resolve import resolved
from jaxrl.planner.trace_plan import trace_plan
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.trainer import program
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, RunKind, check_for_plan, fine_tuning
from jaxrl.trainer.hub_files import with_hub_files


class Training(NamedTuple):
    """The training that a recipe describes.

    Attributes:
      run: trains; returns the exit status.
      kind: what the run needs.
      folder: folder of its last stage.
    """

    run: Callable[[Config], int]
    kind: RunKind
    folder: StageFolder


def training_of(config: Config) -> Training:
    """What a recipe trains: `preference.loss` learns from pairs, `run.num_steps` 0 stops after SFT."""
    folder = config.run_folder
    if loss := config.preference.loss:
        # A loss of scores trains a score model, a loss of log-probabilities the policy.
        is_policy = "chosen_logprob" in array_names(PREFERENCE_LOSSES[loss])
        run = program.train_dpo if is_policy else program.train_reward_model
        return Training(run, PREFERENCES, folder.preference)
    if not config.run.num_steps:
        return Training(program.fine_tune, fine_tuning(config), config.sft_folder)
    return Training(_reinforce, REINFORCEMENT, folder.rl)


def _reinforce(config: Config) -> int:
    status = program.train(config)
    if not status and hosts.is_first():
        print(peak_memory_line(config))
    return status


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe; with `dry_run` only prints its plan and looks up what it names on this machine."""
    training = training_of(config)
    if not dry_run:
        return _start(config, training.run, training.kind)
    if training.kind != REINFORCEMENT:
        raise UserError(
            "--dry_run plans reinforcement learning, and this recipe has none (run.num_steps "
            f"{config.run.num_steps}, preference.loss {config.preference.loss!r}); leave it out"
        )
    plan_tables.show(trace_plan(with_cpu_devices(config)))
    check_for_plan(config)
    return 0


def profile(config: Config) -> int:
    """Traces one step of a recipe and prints where its time goes."""
    return _start(config, profiling.profile, REINFORCEMENT)


def _start(config: Config, run: Callable[[Config], int], kind: RunKind) -> int:
    """Sets up this process, resolves the config's open settings, and calls `run`."""
    return run(resolved(prepared(config), jax.devices(), kind=kind))


def prepared(config: Config) -> Config:
    """Sets up the devices of this process, and fetches what the config names.

    Returns:
      The config with simulated devices resolved and with paths in place of hub names.
    """
    fetch_if_packaged(config.weights)
    config = with_cpu_devices(config)
    program.start(config)
    return with_hub_files(config, jax.devices())
