"""Training of a recipe, whichever kind it is: what the commands call."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl import extensions
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import array_names, lookup
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.config.shapes import is_here, model_of
from jaxrl.data.problems import NO_EVALUATION
from jaxrl.errors import UserError
from jaxrl.files import fingerprint, is_bucket
from jaxrl.mesh import hosts
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.devices import simulate
from jaxrl.mesh.interrupt import StopRequested, StopSignal
from jaxrl.tracking.durable import disk_errors, ensure_writable, run_lock
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.trainer.context import RunContext, build_context
from jaxrl.trainer.evaluation import Evaluation
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, RunKind, fine_tuning
from jaxrl.trainer.open_settings import is_settled
from jaxrl.trainer.preference_training import learn_preferences, learn_reward_model
from jaxrl.trainer.resolved import Resolved, resolve
from jaxrl.trainer.rl import reinforce
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.run_files import check_folder, keep_run_files
from jaxrl.trainer.run_rewards import graders_of
from jaxrl.trainer.supervised import fine_tuned, freeze_roles, load_or_init


def start(config: Config) -> None:
    """Sets up the devices, connects the processes of the run, and enables the compilation cache.

    Call it before anything else that uses JAX. An open number of simulated devices ("auto") means none.

    Raises:
      UserError: the devices cannot be simulated, or the other processes are not found.
    """
    simulated = config.mesh.simulated_devices
    if simulated != "auto" and simulated:
        simulate(simulated, processes=config.hosts.num_processes)
    keep_compiled_programs()
    # Last: from then on the others miss this process if it is lost.
    hosts.start(config.hosts)


Report = Callable[[RunContext], str]
"""Writes the report of a run; returns the line to print. It changes no training, so commands pass it in."""


class Training(NamedTuple):
    """The training that a recipe describes.

    Attributes:
      stages: trains the stages of a run.
      kind: what the run needs.
      folder: folder of its last stage.
    """

    stages: Callable[[RunContext, StopSignal], None]
    kind: RunKind
    folder: StageFolder


def training_of(config: Config) -> Training:
    """What a recipe trains: `preference.loss` learns from pairs, `run.num_steps` 0 stops after SFT.

    Raises:
      UserError: the recipe trains nothing, or names an unknown loss.
    """
    folder = config.run_folder
    if loss := config.preference.loss:
        # A loss of scores trains a score model, a loss of log-probabilities the policy.
        inputs = array_names(lookup(PREFERENCE_LOSSES, loss, "preference.loss"))
        stages = learn_preferences if "chosen_logprob" in inputs else learn_reward_model
        return Training(stages, PREFERENCES, folder.preference)
    if config.run.num_steps:
        return Training(reinforce, REINFORCEMENT, folder.rl)
    if not config.sft.num_steps:
        raise UserError(
            "run.num_steps and sft.num_steps are 0: there is nothing to train; set one, or take a recipe "
            "that does"
        )
    return Training(fine_tune, fine_tuning(config), config.sft_folder)


def fine_tune(run: RunContext, stop: StopSignal) -> None:
    """Supervised learning alone; the policy is evaluated like any other."""
    grades = fine_tuning(run.config).grades
    actor = fine_tuned(run, stop, samples=grades)
    graders = graders_of(run.config, run.problems.settings)
    if grades:
        freeze_roles(actor, run, lambda: load_or_init(run))
    metrics = Evaluation(run, graders)(actor, "after") if grades else {}
    graders.close()
    if metrics and hosts.is_first():
        print(", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
    actor.close()


def weight_fingerprints(config: Config) -> dict[str, str]:
    """A digest of each folder of weights that a config names, as far as they are on this machine."""
    named = [config.weights, config.adapter, *(kind.weights(config) for kind in ROLES.values())]
    named += config.rollout.frozen_roles.values()
    folders = sorted({path for path in named if os.path.isdir(path)})
    # Only what a run reads: a note beside the weights of one host does no harm.
    return {x: fingerprint(pathlib.Path(x), "*.json", "*.safetensors") for x in folders}


@contextlib.contextmanager
def claimed(config: Config) -> Iterator[Resolved]:
    """Locks the folder of a run and watches its processes. Collective.

    Yields:
      What the config stands for, with the shape of its checkpoint in `model`.

    Raises:
      UserError: the folder cannot be written or is in use, or holds a run that may not be resumed; or
        processes have different settings or weights.
    """
    ensure_writable(config.run_folder.path)
    # Processes may differ in their index only.
    shared = dataclasses.replace(config, hosts=hosts.HostsConfig())
    hosts.check_same("the settings", [format_config(shared)])
    hosts.check_same("the files of the weights", weight_fingerprints(config).values())
    path = config.run_folder.path
    mirrored = contextlib.nullcontext()
    if is_bucket(config.run.output):
        mirrored = extensions.lookup("run.output in gs:// or s3://")(config)
    with hosts.watched(config.hosts), disk_errors(path), run_lock(path), mirrored:
        found = resolve(config)
        if config.weights and is_here(config.weights):
            # The shape that is trained, not the default, to compare, record and report the run.
            config = dataclasses.replace(config, model=model_of(config, found.model_in)[0])
        hosts.on_first(lambda: check_folder(config))
        yield dataclasses.replace(found, config=config)


def train(
    config: Config, *, devices: Sequence[Any] | None = None, report: Report | None = None
) -> int:
    """Trains a recipe from the start or from its newest checkpoint.

    With several processes each of them calls this, after `hosts.start`. The first one writes the files.

    Args:
      config: config of the run.
      devices: devices to use; None means all.
      report: called at the end of the run in the first process; None writes no report.

    Returns:
      The exit status: 0, 75 after SIGTERM, or 130 after Ctrl-C.

    Raises:
      UserError: something the user can fix is missing or does not fit.
    """
    if not is_settled(config):
        raise UserError(
            'mesh.layout or rollout.slots is "auto", which trainer.open_settings.resolved decides before a '
            "run; call it first, as every command does, or set mesh.layout to as_given and rollout.slots to "
            "a number"
        )
    stages, kind, _ = training_of(config)
    with (
        claimed(config) as found,
        StopSignal(within_s=config.run.stop_within_s) as stop,
    ):
        with stop.ends_at_once():
            if config.run.certificate:
                extensions.lookup("run.certificate")(found.config)
            run = build_context(found, devices, kind=kind)
            if run.card and hosts.is_first():
                print(run.card)
            if kind.rewards and not len(run.evaluation_prompts) and hosts.is_first():
                print(f"evaluation: {NO_EVALUATION}")
        status = 0
        try:
            with stop.last_act(lambda _: _report_line(run, report)):
                stages(run, stop)
        except StopRequested:
            status = stop.exit_status
            if hosts.is_first():
                print(
                    f"stopped and saved in {config.run_folder}; the same command goes on from there"
                )
        with stop.saving():
            # Collective, so that no process ends before the report is written.
            line = hosts.on_first(lambda: _report_line(run, report))
            if line and hosts.is_first():
                print(line)
        if not status:
            keep_run_files(run)
    return status


def _report_line(run: RunContext, report: Report | None) -> str:
    """Writes the report in the first process; returns the line to print."""
    return report(run) if report is not None and hosts.is_first() else ""
