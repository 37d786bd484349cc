"""The functions behind `training_commands`: each takes a checked config and returns the exit status."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import array_names, lookup
from jaxrl.commands.hub_files import with_hub_files
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.data.data_config import TASK
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import hub_name
from jaxrl.hub.smollm2 import SMOLLM2
from jaxrl.mesh import hosts
from jaxrl.planner import plan_output
from jaxrl.planner.make_plan import peak_memory_line, trace_plan
from jaxrl.planner.resolve import resolved, with_cpu_devices
from jaxrl.rewards.graders import check_grader
from jaxrl.rewards.user import user_reward
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.tracking.run_report import write_run_report
from jaxrl.trainer import program
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, Faults, RunKind, fine_tuning
from jaxrl.trainer.run_files import stage_folders
from jaxrl.user_code import load_agent, load_function, names_function


class Training(NamedTuple):
    """The training that a recipe describes.

    Attributes:
      run: trains, and writes the report of the function `report`; returns the exit status.
      kind: what the run needs.
      folder: folder of its last stage.
    """

    run: Callable[..., int]
    kind: RunKind
    folder: StageFolder


def training_of(config: Config) -> Training:
    """What a recipe trains: `preference.loss` learns from pairs, `run.num_steps` 0 stops after SFT."""
    folder = config.run_folder
    if loss := config.preference.loss:
        # A loss of scores trains a score model, a loss of log-probabilities the policy.
        inputs = array_names(lookup(PREFERENCE_LOSSES, loss, "preference.loss"))
        is_policy = "chosen_logprob" in inputs
        run = program.train_dpo if is_policy else program.train_reward_model
        return Training(run, PREFERENCES, folder.preference)
    if not config.run.num_steps:
        return Training(program.fine_tune, fine_tuning(config), config.sft_folder)
    return Training(_reinforce, REINFORCEMENT, folder.rl)


def _reinforce(config: Config, **options: Any) -> int:
    status = program.train(config, **options)
    if not status and hosts.is_first():
        print(peak_memory_line(config))
    return status


def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe; with `dry_run` only prints its plan and looks up what it names on this machine."""
    training = training_of(config)
    if not dry_run:
        return _start(config, functools.partial(training.run, report=write_report), training.kind)
    if training.kind != REINFORCEMENT:
        raise UserError(
            "--dry_run plans reinforcement learning, and this recipe has none (run.num_steps "
            f"{config.run.num_steps}, preference.loss {config.preference.loss!r}); leave it out"
        )
    plan_output.show(trace_plan(with_cpu_devices(config)))
    check_for_plan(config)
    return 0


def _start(config: Config, run: Callable[[Config], int], kind: RunKind) -> int:
    """Sets up this process, resolves the config's open settings, and calls `run`."""
    return run(resolved(prepared(config), jax.devices(), kind=kind))


def prepared(config: Config) -> Config:
    """Sets up the devices of this process, and fetches what the config names.

    Returns:
      The config with simulated devices resolved and with paths in place of hub names.
    """
    # The demo model needs no name on a hub, only its folder.
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
        graders |= {f"{name}.grader": (source.grader, {})} if source.grader else {}
    for setting, grader in graders.items():
        faults(setting, functools.partial(check_grader, *grader))
    for name, function in config.reward.functions.items():
        faults(f"reward.functions.{name}", functools.partial(user_reward, function["path"]))
    if agent := config.rollout.agent:
        faults("rollout.agent", functools.partial(load_agent, agent))
    faults.check()


def _check_there(path: str) -> None:
    if names_function(path):
        load_function(path, "data function")
    elif path and not (path.startswith(TASK) or hub_name(path) or os.path.exists(path)):
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
