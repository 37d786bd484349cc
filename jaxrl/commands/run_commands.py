"""The functions behind `training_commands`: each takes a checked config and returns the exit status."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable

import jax

from jaxrl.commands.hub_files import with_hub_files
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import hub_name
from jaxrl.hub.smollm2 import SMOLLM2
from jaxrl.mesh import hosts
from jaxrl.planner import plan_output
from jaxrl.planner.make_plan import trace_plan
from jaxrl.planner.peak_memory import peak_memory_line
from jaxrl.planner.resolve import resolved, with_cpu_devices
from jaxrl.rewards.graders import check_grader
from jaxrl.rewards.user import user_reward
from jaxrl.rollout.environment import load_environment
from jaxrl.tracking.run_report import write_run_report
from jaxrl.trainer import program
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, Faults, RunKind, fine_tuning
from jaxrl.trainer.run_files import stage_folders
from jaxrl.user_code import load_function, names_function


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe; with `dry_run` only prints its plan and looks up what it names on this machine."""
    if dry_run:
        plan_output.show(trace_plan(with_cpu_devices(config)))
        check_for_plan(config)
        return 0
    return _start(config, _train, REINFORCEMENT)


def _train(config: Config) -> int:
    status = program.train(config, report=write_report)
    if not status and hosts.is_first():
        print(peak_memory_line(config))
    return status


def fine_tune(config: Config) -> int:
    """Runs the supervised warm-up of a recipe by itself."""
    return _start(
        config, functools.partial(program.fine_tune, report=write_report), fine_tuning(config)
    )


def train_dpo(config: Config) -> int:
    """Trains a policy on preference pairs (DPO)."""
    return _start(config, functools.partial(program.train_dpo, report=write_report), PREFERENCES)


def train_reward_model(config: Config) -> int:
    """Trains a reward or cost model on preference pairs."""
    return _start(
        config, functools.partial(program.train_reward_model, report=write_report), PREFERENCES
    )


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


def check_for_plan(config: Config) -> None:
    """Looks up the user's own files and functions, but no weights, devices or names on the hub.

    Raises:
      UserError: something is missing. One message names all such things.
    """
    faults = Faults()
    sources = config.data.training_sources | config.data.evaluation_sources
    paths = {name: source.path for name, source in sources.items()}
    paths |= {"sft.path": config.sft.path if config.sft.num_steps else ""}
    for setting, path in paths.items():
        faults(setting, functools.partial(_check_there, path))
    graders = {"reward.grader": (config.reward.grader, config.reward.grader_options)}
    for name, source in sources.items():
        graders |= (
            {f"{name}.grader": (source.grader, source.grader_options)} if source.grader else {}
        )
    for setting, grader in graders.items():
        faults(setting, functools.partial(check_grader, *grader))
    for name, function in config.reward.functions.items():
        faults(f"reward.functions.{name}", functools.partial(user_reward, function["path"]))
    if path := config.rollout.environment:
        faults("rollout.environment", functools.partial(load_environment, path))
    faults.check()


def _check_there(path: str) -> None:
    if names_function(path):
        load_function(path, "data function")
    elif path and hub_name(path) is None and not os.path.exists(path):
        raise UserError(f"{path} does not exist")


def write_report(run: RunContext) -> pathlib.Path:
    """Writes the report of a whole run as one HTML page; returns its path."""
    config = run.config
    kind = run.meshes["actor"].devices.flat[0].device_kind
    return write_run_report(
        config.run_folder,
        stage_folders(config),
        title=f"{config.name}, seed {config.seed}",
        config_text=format_config(config),
        accepts_lost_rows=config.run.resume == "accept_lost_rows",
        evaluation_sources=run.evaluation_prompts.sources,
        num_samples=config.evaluation.num_samples,
        facts=(
            ("parameters", f"{run.model.num_params:,}"),
            ("devices", f"{run.placement.num_devices} x {kind}"),
        ),
    )
