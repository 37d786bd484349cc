"""The program: what the commands that train call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.devices import simulate
from jaxrl.tracking.durable import ensure_writable
from jaxrl.tracking.lock import only_run_in
from jaxrl.trainer.context import RunContext, build_context
from jaxrl.trainer.cpu_devices import with_cpu_devices
from jaxrl.trainer.evaluation import Evaluation
from jaxrl.trainer.interrupt import StopRequested, StopSignal
from jaxrl.trainer.mapping_choice import with_searched_layout
from jaxrl.trainer.needs import (
    Needs,
    of_evaluation,
    of_preferences,
    of_reinforcement,
    of_training,
)
from jaxrl.trainer.planning import plan
from jaxrl.trainer.preference_training import learn_preferences, learn_reward_model
from jaxrl.trainer.rl import reinforce
from jaxrl.trainer.run_files import check_folder, keep_run_files, write_run_report
from jaxrl.trainer.run_graders import graders_of
from jaxrl.trainer.slot_choice import with_chosen_slots
from jaxrl.trainer.supervised import fine_tuned


def start(config: Config) -> Config:
    """Makes this process see its devices, joins it with the others, and keeps what is compiled.

    Call before anything else.

    Returns:
      The config with the number of simulated devices resolved.

    Raises:
      UserError: the devices cannot be simulated, or the others are not found.
    """
    config = with_cpu_devices(config)
    simulated = config.mesh.simulated_devices
    if simulated != "auto" and simulated:
        simulate(simulated, processes=config.hosts.num_processes)
    hosts.start(config.hosts)
    keep_compiled_programs()
    return config


def train(config: Config, *, devices: Sequence[Any] | None = None) -> int:
    """Trains a recipe from start, or from where it was stopped, to its report.

    With several processes each calls this, after `hosts.start`; the first one writes what is written once.

    Args:
      config: the run.
      devices: which to use; all of them by default.

    Returns:
      The exit status: 0, or 130 after Ctrl-C.

    Raises:
      UserError: something the user can fix is missing or does not fit.
    """
    return _run(config, devices, reinforce, needs=of_reinforcement, needs_prompts=True)


def fine_tune(config: Config, *, devices: Sequence[Any] | None = None) -> int:
    """Trains a policy on answers to imitate, alone; arguments and result as for `train`.

    It is evaluated like any other policy. With a file of its own to learn from it can do without problems.
    """
    if not config.warm_start.num_steps:
        raise UserError(
            "warm_start.num_steps is 0: there is nothing to train; set it, or take a recipe that does"
        )
    evaluates = any(s.is_named for s in config.data.evaluation_sources.values())

    def stage(run: RunContext, stop: StopSignal) -> None:
        actor = fine_tuned(run, stop, samples=evaluates)
        graders = graders_of(run.config, run.problems.settings)
        metrics = Evaluation(run, graders)(actor, "after") if evaluates else {}
        graders.close()
        if metrics and hosts.is_first():
            print(", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
        actor.close()

    return _run(
        config,
        devices,
        stage,
        needs=of_evaluation if evaluates else of_training,
        needs_problems=not config.warm_start.path,
    )


def train_reward_model(config: Config, *, devices: Sequence[Any] | None = None) -> int:
    """Trains a reward or cost model on preference pairs; arguments and result as for `train`."""
    return _run(config, devices, learn_reward_model, needs=of_preferences)


def train_dpo(config: Config, *, devices: Sequence[Any] | None = None) -> int:
    """Trains a policy on preference pairs; arguments and result as for `train`."""
    return _run(config, devices, learn_preferences, needs=of_preferences)


def _run(
    config: Config,
    devices: Sequence[Any] | None,
    stages: Callable[[RunContext, StopSignal], None],
    *,
    needs: Needs,
    needs_problems: bool = True,
    needs_prompts: bool = False,
) -> int:
    """What every run has around its stages: signs of life, checks, its folder, an orderly end, the report."""
    ensure_writable(config.run_folder.path)
    # Which process this is may differ, and nothing else.
    shared = dataclasses.replace(config, hosts=hosts.HostsConfig())
    hosts.check_same("the settings", [format_config(shared)])
    with hosts.watched(config.hosts), only_run_in(config.run_folder.path):
        hosts.on_first(lambda: check_folder(config))
        config = with_searched_layout(config, jax.devices() if devices is None else devices)
        run = build_context(
            config,
            devices,
            needs=needs,
            needs_problems=needs_problems,
            needs_prompts=needs_prompts,
        )
        run = with_chosen_slots(run)
        if run.card and hosts.is_first():
            print(run.card)
        with StopSignal() as stop:
            try:
                stages(run, stop)
            except StopRequested:
                if hosts.is_first():
                    print(
                        f"stopped and saved in {config.run_folder}; the same command goes on from there"
                    )
                return stop.exit_status
        keep_run_files(run)
        if hosts.is_first():
            print(f"report: {write_run_report(run)}")
    return 0


def dry_run(config: Config) -> int:
    """Prints what a recipe would take, without its devices, weights or data; returns the exit status."""
    if config.mesh.layout == "auto":
        raise UserError(
            'mesh.layout "auto" searches when it sees the devices, and --dry_run has none; run '
            "`jaxrl plan --search --topology h100:16x8` (or what you have), or set mesh.layout to as_given"
        )
    plan(config).show()
    return 0
