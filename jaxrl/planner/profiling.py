"""Traces one step of a recipe: writes a file for TensorBoard or Perfetto, and prints where the time goes.

Earlier steps compile the programs. The run ends after the traced step, without evaluation or checkpoints. The
policy starts from `weights` or at random; a supervised warm-up would take longer than the trace. A random
policy rarely answers correctly, so a step that filters groups accepts those it gets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxrl.config.schema import Config
from jaxrl.mesh import hosts
from jaxrl.mesh.hardware import Roof, roof_of
from jaxrl.planner.compiled.operations import KINDS
from jaxrl.planner.compiled.profile_reading import (
    PHASE,
    Profile,
    Sum,
    compiled_operations,
    read_profile,
)
from jaxrl.planner.hardware.calibration import measured_roof
from jaxrl.tracking.durable import ensure_writable, run_lock
from jaxrl.trainer.context import build_context
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.rl import RlStage
from jaxrl.trainer.roles import build_roles
from jaxrl.trainer.weights import load_or_init

# The first step compiles; the second compiles what the first left out, such as moving weights back.
_STEPS_BEFORE = 2


class _TracedTimer:
    """Times a step by writing its phases as annotations of the trace."""

    stop_pending = False

    def __init__(self):
        self.step = 0

    @contextlib.contextmanager
    def phase(self, name: str, *, shown: str = "", may_stop: bool = False) -> Iterator[None]:
        """Annotates the block."""
        del shown, may_stop
        hosts.enter_phase(f"profile step {self.step + 1}, {name}")
        with jax.profiler.TraceAnnotation(f"{PHASE}{name}"):
            yield

    def when_done(self, result: Any) -> Any:
        """Waits for the result, so that a phase contains the work it has started."""
        return jax.block_until_ready(result)

    def check_stop(self) -> None:
        """Does nothing: this run saves nothing that a signal could damage."""


def profile(config: Config) -> int:
    """Traces a step into `profile` of the run's folder and prints the table; returns the exit status.

    Raises:
      UserError: something the user can fix is missing or does not fit.
    """
    config = _for_one_step(config)
    folder = config.run_folder.profile
    ensure_writable(config.run_folder.path)
    with hosts.watched(config.hosts), run_lock(config.run_folder.path):
        run = build_context(config, kind=REINFORCEMENT)
        roles, timer = build_roles(config, run.meshes, run.models), _TracedTimer()
        starting = functools.partial(load_or_init, run)
        with contextlib.closing(RlStage(run, roles, timer, starting)) as stage:
            stage.begin(None)
            for timer.step in range(_STEPS_BEFORE):
                jax.block_until_ready(stage.step())
            timer.step = _STEPS_BEFORE
            with _traced(folder):
                jax.block_until_ready(stage.step())
            known = compiled_operations()
    if hosts.is_first():
        # Each process traces only its own devices.
        roof, devices = _roof(config), jax.local_devices()
        peaks = roof.tflops(config.train.dtype), roof.memory
        show(read_profile(folder, known), *peaks, len(devices))
        print(f"trace: {folder} (tensorboard --logdir, or its .trace.json.gz in ui.perfetto.dev)")
    return 0


def _for_one_step(config: Config) -> Config:
    replace = dataclasses.replace
    return replace(
        config,
        sft=replace(config.sft, num_steps=0),
        rollout=replace(config.rollout, max_generation_batches=1, on_shortage="fill"),
        run=replace(config.run, rollouts_every=0),
    )


@contextlib.contextmanager
def _traced(folder: pathlib.Path) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    # Tracing every Python call would slow down the measured step.
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def _roof(config: Config) -> Roof:
    device = jax.local_devices()[0]
    return roof_of(device.device_kind) or measured_roof(config.train.dtype)


def show(
    found: Profile,
    peak_tflops: float,
    peak_gb_s: float,
    num_devices: int,
    *,
    console: Console | None = None,
) -> None:
    """Prints a trace's times by phase and by kind of operation.

    Args:
      found: times read from the trace.
      peak_tflops, peak_gb_s: peak rates of a device.
      num_devices: number of traced devices.
      console: console to print to; None means the terminal.
    """
    console = console or Console(width=110)
    seconds = sum(found.seconds.values())
    rows = [
        (name, of_phase, found.phase(name), found.phase(name).seconds / num_devices / of_phase)
        for name, of_phase in found.seconds.items()
        if of_phase > 0
    ]
    console.print(_table("phase", "device busy", rows, (peak_tflops, peak_gb_s), num_devices))
    sums = {kind: found.kind(kind) for kind in KINDS}
    busy = sum(done.seconds for done in sums.values()) or 1.0
    rows = [
        (kind, done.seconds / num_devices, done, done.seconds / busy)
        for kind, done in sums.items()
        if done.seconds
    ]
    console.print(_table("operation", "share", rows, (peak_tflops, peak_gb_s), num_devices))
    console.print(
        f"one step: {seconds:.2f} s in phases; a device can do {peak_tflops:,.3g} TFLOP/s and "
        f"{peak_gb_s:,.4g} GB/s",
        highlight=False,
    )


def _table(
    first: str,
    share: str,
    rows: list[tuple[str, float, Sum, float]],
    peaks: tuple[float, float],
    num_devices: int,
) -> Table:
    peak_tflops, peak_gb_s = peaks
    table = Table(title_justify="left")
    table.add_column(first)
    for name in ("seconds", share, "GFLOP", "GB", "of FLOP/s", "of GB/s"):
        table.add_column(name, justify="right")
    for name, seconds, done, part in rows:
        available = seconds * num_devices
        table.add_row(
            name,
            f"{seconds:.3f}",
            f"{part:.0%}",
            f"{done.flops / 1e9:,.2f}",
            f"{done.nbytes / 1e9:,.2f}",
            f"{done.flops / (available * peak_tflops * 1e12):.1%}",
            f"{done.nbytes / (available * peak_gb_s * 1e9):.1%}",
        )
    return table
