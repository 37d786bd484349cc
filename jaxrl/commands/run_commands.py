"""The functions behind `training_commands`, which take a checked config."""

from __future__ import annotations

import functools
import os

import jax

from jaxrl import extensions
from jaxrl.commands.hub_files import with_hub_files
from jaxrl.config.schema import Config
from jaxrl.data.curriculum import load_sampler
from jaxrl.data.data_config import EvaluationSourceConfig
from jaxrl.data.demonstrations import read_demonstrations
from jaxrl.data.problems import check_file
from jaxrl.errors import UserError, must_return
from jaxrl.files import is_bucket
from jaxrl.hub.hub_names import fetched_folder, hub_name
from jaxrl.mesh import hosts
from jaxrl.rewards.graders import check_grader
from jaxrl.rewards.user import reward_function
from jaxrl.tracking.durable import ensure_writable, take_lock
from jaxrl.trainer import program
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.findings import REINFORCEMENT, Faults, find_packages
from jaxrl.trainer.open_settings import resolved, with_cpu_devices
from jaxrl.trainer.run_rewards import needs_truths
from jaxrl.user_code import load_agent, load_function

_PEAK_MEMORY = "the planned peak memory"
_REPORT = "the report of a run"


@must_return()
def train_or_plan(config: Config, *, dry_run: bool) -> int:
    """Trains a recipe; with `dry_run` only prints its plan and looks up what it names on this machine."""
    kind = program.training_of(config).kind
    if not dry_run:
        if config.hosts.num_processes > 1:
            # JAX aborts all processes when one connects with a number that is in use: a host that comes back
            # late, or a second start of the same command.
            folder = config.run_folder.path
            ensure_writable(folder)
            lock = take_lock(folder / f"process.{config.hosts.place}.lock")
            # A second descriptor, which is never closed: the lock lasts until the process ends.
            os.dup(lock.fileno())
        config = _started(config)
        # Fetching may take an hour.
        with hosts.watched(config.hosts):
            config = resolved(with_hub_files(config, jax.devices()), jax.devices(), kind=kind)
            status = program.train(config, report=write_report)
            told = not status and hosts.is_first() and extensions.is_installed(_PEAK_MEMORY)
            if kind == REINFORCEMENT and told:
                print(extensions.lookup(_PEAK_MEMORY)(config))
        return status
    if kind != REINFORCEMENT:
        raise UserError(
            "--dry_run plans reinforcement learning, and this recipe has none (run.num_steps "
            f"{config.run.num_steps}, preference.loss {config.preference.loss!r}); leave it out"
        )
    extensions.lookup("train --dry_run")(with_cpu_devices(config))
    check_for_plan(config)
    return 0


def prepared(config: Config) -> Config:
    """Sets up the devices of this process, and fetches what the config names.

    Returns:
      The config with simulated devices resolved and with paths in place of hub names.
    """
    return with_hub_files(_started(config), jax.devices())


def _started(config: Config) -> Config:
    # The demo model needs no name on a hub, only its folder.
    if config.weights == str(fetched_folder()) and not fetched_folder().is_dir():
        extensions.lookup("SmolLM2-135M-Instruct")()
    config = with_cpu_devices(config)
    program.start(config)
    return config


def check_for_plan(config: Config) -> None:
    """Looks up the user's own files and functions, but no weights, devices or names on the hub.

    Raises:
      UserError: something is missing. One message names all such things.
    """
    faults = Faults()
    sources = config.data.training_sources | config.data.evaluation_sources
    for name, source in sources.items():
        needed = name not in config.data.training_sources or needs_truths(config)
        faults(name, functools.partial(_check_source, source, needs_truth=needed))
    path = config.sft.path if config.sft.num_steps else ""
    if path and not (is_bucket(path) or hub_name(path)):
        faults("sft.path", functools.partial(read_demonstrations, path, source=path))
    find_packages(config, faults)
    graders = {"reward.grader": (config.reward.grader, config.reward.grader_options)}
    for name, source in sources.items():
        graders |= {f"{name}.grader": (source.grader, {})} if source.grader else {}
    for setting, grader in graders.items():
        faults(setting, functools.partial(check_grader, *grader))
    for name, function in config.reward.functions.items():
        faults(f"reward.functions.{name}", functools.partial(reward_function, function["path"]))
    if agent := config.rollout.agent:
        faults("rollout.agent", functools.partial(load_agent, agent))
    if sampler := config.data.sampler:
        faults("data.sampler", functools.partial(load_sampler, sampler))
    faults.check()


def _check_source(source: EvaluationSourceConfig, *, needs_truth: bool) -> None:
    path = source.path
    if source.has_function:
        load_function(path, "data function")
    elif path and not (source.task or is_bucket(path) or hub_name(path)):
        check_file(source, needs_truth=needs_truth)


def write_report(run: RunContext) -> str:
    """Writes the report of a whole run, if its package is there; returns the line to print."""
    return f"report: {extensions.lookup(_REPORT)(run)}" if extensions.is_installed(_REPORT) else ""
