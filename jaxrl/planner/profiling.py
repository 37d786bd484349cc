"""One step of a recipe traced: a file for TensorBoard or Perfetto, and a table of where its time goes.

Steps before it compile what it needs; nothing is trained further than that, evaluated or saved. The policy
starts from `weights`, or at random: a warm start would take longer than what is looked at. A random
policy answers little right, so a step that wants groups of right and wrong answers takes what there is.
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
from jaxrl.tracking.durable import ensure_writable
from jaxrl.tracking.lock import only_run_in
from jaxrl.trainer.context import build_context
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.rl import RlStage
from jaxrl.trainer.roles import build_roles
from jaxrl.trainer.weights import load_or_init

# The first compiles, the second what the first has left out, such as moving weights back.
_STEPS_BEFORE = 2


class _TracedClock:
    """The clock of a step whose phases are annotations of the trace."""

    stop_pending = False

    def __init__(self):
        self.step = 0

    @contextlib.contextmanager
    def phase(self, name: str, *, shown: str = "", may_stop: bool = False) -> Iterator[None]:
        """Annotates what happens within."""
        del shown, may_stop
        hosts.enter_phase(f"profile step {self.step + 1}, {name}")
        with jax.profiler.TraceAnnotation(f"{PHASE}{name}"):
            yield

    def when_done(self, result: Any) -> Any:
        """Waits: a phase has what it has started."""
        return jax.block_until_ready(result)

    def check_stop(self) -> None:
        """Nothing is kept that a signal could tear."""


def profile(config: Config) -> int:
    """Traces a step into `profile` of the run's folder and prints the table; returns the exit status.

    Raises:
      UserError: something the user can fix is missing or does not fit.
    """
    config = _for_one_step(config)
    folder = config.run_folder.profile
    ensure_writable(config.run_folder.path)
    with hosts.watched(config.hosts), only_run_in(config.run_folder.path):
        run = build_context(config, kind=REINFORCEMENT)
        roles, clock = build_roles(config, run.meshes, run.models), _TracedClock()
        starting = functools.partial(load_or_init, run)
        with contextlib.closing(RlStage(run, roles, clock, starting)) as stage:
            stage.begin(None)
            for clock.step in range(_STEPS_BEFORE):
                jax.block_until_ready(stage.step())
            clock.step = _STEPS_BEFORE
            with _traced(folder):
                jax.block_until_ready(stage.step())
            known = compiled_operations()
    if hosts.is_first():
        # A process traces the devices that it has itself.
        roof, devices = _roof(config), jax.local_devices()
        peaks = roof.tflops(config.train.dtype), roof.memory
        show(read_profile(folder, known), *peaks, len(devices))
        print(f"trace: {folder} (tensorboard --logdir, or its .trace.json.gz in ui.perfetto.dev)")
    return 0


def _for_one_step(config: Config) -> Config:
    replace = dataclasses.replace
    return replace(
        config,
        warm_start=replace(config.warm_start, num_steps=0),
        rollout=replace(config.rollout, max_generation_batches=1, if_too_few="fill"),
        run=replace(config.run, rollouts_every=0),
    )


@contextlib.contextmanager
def _traced(folder: pathlib.Path) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    # Every call of a Python function would be an event, and slow what is measured.
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
    """Prints what a trace says, by phase and by kind of operation.

    Args:
      found: what was read.
      peak_tflops, peak_gb_s: what a device can do.
      num_devices: that the trace is of.
      console: where to; the terminal by default.
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
