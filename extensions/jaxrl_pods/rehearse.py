"""Rehearses a recipe on this machine: `jaxrl train` itself, with a small model and simulated devices.

jaxrl rehearse --config configs/dapo_qwen32b.py --hosts 4
jaxrl rehearse --config configs/ppo_llama8b.py --config.tokenizer.path=DIRECTORY --config.data.train.path=FILE

Data, template, rewards, layout, placement and the number of processes are the recipe's. It trains three
steps, kills one process with signal 9 in the fourth, waits for the others to end, resumes, and compares the
repeated rows (docs/pods.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl.config.command_line import load_config, take_overrides
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_TRY_AGAIN, UserError
from jaxrl.flags import command_parser
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.trainer.program import training_of
from jaxrl.trainer.resolved import resolve
from jaxrl_pods.rehearsed_recipe import NUM_STEPS, devices_of, recipe_text, with_fewer_devices

# At most so many devices are simulated in a process, as many as a host of GPUs has.
_DEVICES_OF_A_HOST = 8
# With these glibc keeps less of what compilers have freed: a process of the 32B recipe has 1.2 GB,
# without them 1.6. So 16 of them fit into 22 GB.
_FRUGAL = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "65536"}
# Settings that the rehearsal gives, layouts among them as it has changed them.
_OURS = (
    *("mesh.", "placement", "hosts.coordinator", "hosts.num_processes", "hosts.process_id"),
    *("run.output", "run.num_steps", "run.save_every"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    overrides, rest = take_overrides(arguments, Config)
    parser = command_parser(program, __doc__)
    parser.add_argument("--config", required=True, help="recipe file")
    parser.add_argument("--hosts", type=int, help="processes (default: one for 8 devices)")
    parser.add_argument(
        "--out", help="new folder of the run and its logs (default: a temporary one)"
    )
    parser.add_argument(
        "--patience_s",
        type=float,
        default=1800.0,
        help="longest time between two signs of progress",
    )
    args = parser.parse_args(rest)
    config = load_config(Config, args.config, overrides)
    config, hosts, shrunk = on_hosts(config, args.hosts)
    if shrunk:
        print(shrunk)
    folder = pathlib.Path(args.out or tempfile.mkdtemp(prefix="jaxrl_rehearsal_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"--out {folder} is not empty; a rehearsal starts in a new folder")
    theirs = {name: text for name, text in overrides.items() if not name.startswith(_OURS)}
    (folder / "recipe.py").write_text(recipe_text(args.config, config, list(theirs)))
    own = [f"--config.{name}={text}" for name, text in theirs.items()]
    run = dataclasses.replace(config.run, output=str(folder))
    config = dataclasses.replace(config, run=run)
    # Else its processes would go on without it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    Rehearsal(config, folder, hosts, own, args.patience_s).run()
    print(f"rehearsed; recipe, logs and run are in {folder}")
    return 0


def on_hosts(config: Config, hosts: int | None) -> tuple[Config, int, str]:
    """The config on the devices of a rehearsal, the number of processes, and a line on fewer devices.

    Args:
      config: config of the recipe.
      hosts: number of processes; None for one of every 8 devices.

    Raises:
      UserError: the devices do not divide over the processes, or the recipe leaves its layout open.
    """
    if config.mesh.searched:
        raise UserError(
            f"mesh.layout {config.mesh.layout!r} is open, and a rehearsal needs layouts; write those of "
            "jaxrl plan --search into the recipe"
        )
    devices = devices_of(config)
    hosts = hosts or max(1, devices // _DEVICES_OF_A_HOST)
    total = hosts * min(_DEVICES_OF_A_HOST, devices // hosts)
    if not total or devices % total:
        raise UserError(
            f"{devices} devices of the recipe do not divide over --hosts {hosts}; choose a divisor, or a "
            "layout of more devices, such as --config.mesh.train=1-1-2"
        )
    if total == devices:
        return config, hosts, ""
    smaller = with_fewer_devices(config, devices // total)
    layout = smaller.mesh.train if not config.placement else "each pool"
    line = (
        f"{total} devices in place of {devices}: {devices // total} times fewer replicas ({layout})"
    )
    return smaller, hosts, line


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """The processes of a rehearsal, and what they have to show.

    Attributes:
      config: config of the recipe, with the layout and the folder of the rehearsal.
      folder: folder with recipe.py; the run and the logs are written there.
      hosts: number of processes.
      overrides: further arguments of the command.
      patience_s: longest time between two signs of progress.
    """

    config: Config
    folder: pathlib.Path
    hosts: int
    overrides: Sequence[str]
    patience_s: float

    @property
    def _stage(self) -> StageFolder:
        return training_of(self.config).folder

    def run(self) -> None:
        """Goes through all phases and prints a line of each.

        Raises:
          UserError: a phase failed.
        """
        print(f"{'phase':10}{'s':>7}  {self.config.name} in {self.hosts} processes", flush=True)
        manifest = self._stage.checkpoints.manifest(NUM_STEPS - 2)
        with self._processes("first") as processes:
            last_s = time.time()
            for step in range(NUM_STEPS):
                # A run without evaluation problems has no row of step 0.
                self._wait(
                    f"step {step}", processes, lambda s=step: max(self._rows(), default=-1) >= s
                )
                if row := self._rows().get(step):
                    what = {0: "to the first evaluation", 1: "compiles"}.get(step, "")
                    _show(f"step {step}" if step else "start", row["time_s"] - last_s, what)
                    last_s = row["time_s"]
            self._wait("checkpoint", processes, manifest.exists)
            before = self._rows()
            self._kill(processes)
        with self._processes("resumed") as processes:
            began_s = time.time()
            self._wait("resume", processes, lambda: all(p.poll() == 0 for p in processes))
        after = self._rows()
        # A row that was written again has another time.
        again = [s for s in before if s in after and after[s]["time_s"] != before[s]["time_s"]]
        if not again:
            raise UserError("rehearsal, resume: no step was repeated")
        _show("resume", after[again[0]]["time_s"] - began_s, f"to the end of step {again[0]}")
        self._compare([(before[step], after[step]) for step in again])
        _show(f"step {NUM_STEPS}", after[NUM_STEPS]["time_s"] - after[NUM_STEPS - 1]["time_s"])
        if "perf/handover_gb" in after[NUM_STEPS]:
            last = after[NUM_STEPS]
            text = f"{1e3 * last['perf/handover_gb']:.3g} MB between pools"
            _show("hand-over", last["timing_s/update_weights"], text)

    def _kill(self, processes: Sequence[subprocess.Popen]) -> None:
        """Kills the last process; the others have to end by themselves."""
        *others, last = processes
        # Nothing in the process can react, as when its host is lost.
        last.send_signal(signal.SIGKILL)
        began_s = time.monotonic()
        # The others miss its heartbeat after `lost_after_s`, and need some time to end.
        within_s = 60 + self.config.hosts.lost_after_s
        for number, process in enumerate(others):
            try:
                process.wait(timeout=max(0.0, within_s - (time.monotonic() - began_s)))
            except subprocess.TimeoutExpired as error:
                raise UserError(
                    f"rehearsal, kill: process {number} is still there after {within_s:.0f} s"
                ) from error
        statuses = sorted({process.returncode for process in others})
        text = f"process {len(others)} killed in step {NUM_STEPS}, status of the others {statuses}"
        _show("kill", time.monotonic() - began_s, text)
        if set(statuses) - {EXIT_TRY_AGAIN}:
            raise UserError(f"rehearsal, kill: the others have to end with {EXIT_TRY_AGAIN}")

    def _compare(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        if resolve(self.config).runs_free:
            _show("rows", None, "not compared: samples go by the clock")
            return
        # A turn of an agent is read from pages or computed again, by the clock.
        near = 1e-5 if self.config.rollout.agent else 0.0
        for old, new in pairs:
            old, new = without_timings(old), without_timings(new)
            differing = [
                name
                for name, value in old.items()
                if not math.isclose(value, new.get(name, math.nan), rel_tol=near, abs_tol=near)
            ]
            if differing:
                name = differing[0]
                raise UserError(
                    f"rehearsal, rows: step {old['step']} was repeated with other numbers: "
                    f"{len(differing)} of {len(old)} differ, such as {name}, {old[name]} and "
                    f"{new.get(name)}"
                )
            how = "equal up to rounding" if near else "equal"
            _show("rows", None, f"step {old['step']} repeated, all {len(old)} numbers {how}")

    def _rows(self) -> dict[int, Any]:
        # A process may be writing the last row.
        return {row["step"]: row for row in read_metrics(self._stage.metrics, skips_damaged=True)}

    def _wait(
        self, phase: str, processes: Sequence[subprocess.Popen], done: Callable[[], bool]
    ) -> None:
        """Waits until `done`; raises UserError if a process fails first, or nothing happens."""
        until = time.monotonic() + self.patience_s
        while not done():
            for number, process in enumerate(processes):
                if process.poll():
                    raise self._failure(phase, number, f"ended with status {process.returncode}")
            if time.monotonic() > until:
                raise self._failure(phase, 0, f"showed nothing for {self.patience_s:.0f} s")
            time.sleep(0.2)

    def _failure(self, phase: str, number: int, what: str) -> UserError:
        # "resumed" comes after "first".
        log = max(self.folder.glob(f"*.{number}.log"))
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        line = next((x for x in reversed(lines) if x.startswith("error: ")), lines[-1])
        return UserError(f"rehearsal, {phase}: process {number} {what} ({log}): {line}")

    @contextlib.contextmanager
    def _processes(self, name: str) -> Iterator[list[subprocess.Popen]]:
        """Starts the processes of a run; those left at the end are killed."""
        with socket.socket() as probe:
            # A free port, which the first process binds after the probe has closed.
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}" if self.hosts > 1 else ""
        with contextlib.ExitStack() as stack:
            processes = []
            for number in range(self.hosts):
                log = stack.enter_context((self.folder / f"{name}.{number}.log").open("w"))
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "jaxrl", "train"),
                        f"--config={self.folder / 'recipe.py'}",
                        f"--config.run.output={self.folder}",
                        *self.overrides,
                        f"--config.hosts.coordinator={address}",
                        f"--config.hosts.num_processes={self.hosts}",
                        f"--config.hosts.process_id={number}",
                    ],
                    env={**_FRUGAL, **os.environ},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                stack.enter_context(process)
                # Runs before the exit of the process itself, which waits for its end.
                stack.callback(process.kill)
                processes.append(process)
            yield processes


def _show(phase: str, seconds: float | None, what: str = "") -> None:
    shown = "" if seconds is None else f"{seconds:.1f}"
    print(f"{phase:10}{shown:>7}  {what}".rstrip(), flush=True)
