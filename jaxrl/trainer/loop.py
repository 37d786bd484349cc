"""The loop of every training stage: resume, step, evaluate, log, save, stop cleanly."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from rich.console import Console

from jaxrl.config.config_tree import flatten_config
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.step_metrics import timing_per_token, work_rates
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import peak_memory
from jaxrl.mesh.interrupt import StopRequested, StopSignal
from jaxrl.roles.learner import Learner
from jaxrl.tracking.durable import run_lock
from jaxrl.tracking.loggers import LoggedRun
from jaxrl.tracking.metrics import MetricsWriter, Timers
from jaxrl.tracking.progress import Progress
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.tracking.stage_checkpoints import StageCheckpoints
from jaxrl.trainer.context import RunContext
from jaxrl.trainer.run_files import keep_run_files

logger = logging.getLogger(__name__)

# With quick steps, print a line only now and then.
_LINE_EVERY_S = 2.0


class TrainingStage(abc.ABC):
    """A training stage: what one of its steps does, and the state between steps."""

    @property
    @abc.abstractmethod
    def learners(self) -> Mapping[str, Learner]:
        """The roles whose states a checkpoint holds."""

    @abc.abstractmethod
    def begin(self, record: Mapping[str, Any] | None) -> None:
        """Prepares the first step.

        Args:
          record: result of `record` in the checkpoint that the learners were restored from. None means a new
            stage; the learners then need their initial weights.

        Raises:
          UserError: something is missing or does not fit.
        """

    @abc.abstractmethod
    def step(self) -> Metrics:
        """Runs one step; its metrics may still be on the devices."""

    def evaluate(self, when: str) -> Metrics:
        """Metrics of an evaluation "before", "during" or "after" training; empty by default."""
        return {}

    @abc.abstractmethod
    def record(self) -> dict[str, Any]:
        """JSON-compatible state that a resumed run needs besides the learners' states."""

    def close(self) -> None:  # noqa: B027, most stages have nothing to close
        """Releases everything the stage has started, even if `begin` was never called."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a stage saves, logs and evaluates.

    Attributes:
      num_steps: number of steps of the stage.
      save_every: number of steps between checkpoints. The last step has one too. 0 saves it alone.
      log_every: number of steps between rows of metrics. The last step has one too.
      evaluate_every: number of steps between evaluations; one more runs before the first step and one after
        the last. 0 disables evaluation, and -1 all but that before the first step.
    """

    num_steps: int
    save_every: int
    log_every: int = 1
    evaluate_every: int = 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return self.ends(step) or (self.save_every > 0 and step % self.save_every == 0)

    def logs(self, step: int) -> bool:
        """Whether a row of metrics is due after `step` steps."""
        return self.ends(step) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps."""
        return self.evaluate_every > 0 and (self.ends(step) or step % self.evaluate_every == 0)

    def ends(self, step: int) -> bool:
        """Whether all steps are done after `step` steps."""
        return step >= self.num_steps


class Loop:
    """The loop of a training stage, "sft" or "rl", in its own folder.

    It also times the phases of each step (`dataflows.step_timer`). All processes run the same steps; only the
    first one writes logs and output.

    Attributes:
      step: number of finished steps.
      folder: folder with metrics.jsonl and checkpoints/.
    """

    def __init__(
        self,
        title: str,
        folder: StageFolder,
        schedule: Schedule,
        *,
        checkpoints: StageCheckpoints,
        open_log: Callable[[int | None], MetricsWriter],
        num_devices: int,
        waits: bool = True,
        stop: StopSignal,
        ownership: contextlib.AbstractContextManager[Any] | None = None,
        on_begin: Callable[[], None] = lambda: None,
    ):
        """Writes nothing; writing starts in `run`.

        Args:
          title: display name of the stage.
          folder: folder of the stage.
          schedule: when the stage saves, logs and evaluates.
          checkpoints: checkpoints of the stage. The loop closes them.
          open_log: function of the step of the restored checkpoint (None for a new stage) that opens the log.
          num_devices: number of devices of the run.
          waits: whether a phase waits for its arrays, so that its time is complete.
          stop: signals to the run.
          ownership: lock of the folder, held from before the first write; None if the run already holds it.
          on_begin: called once the stage can no longer be refused.
        """
        self.step = 0
        self.folder = folder
        self._first_row = True
        self._title = title
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._open_metrics = open_log
        self._num_devices = num_devices
        self._waits = waits
        self._stop = stop
        self._ownership = ownership
        self._on_begin = on_begin
        self._timers = Timers()
        self._exit = contextlib.ExitStack()
        self._writer: MetricsWriter | None = None

    def run(self, stage: TrainingStage) -> None:
        """Runs a stage to its last step, from the start or from its newest checkpoint.

        Raises:
          StopRequested: a signal arrived; the last finished step is saved.
          UserError: the stage has started but no intact checkpoint is left, the checkpoint is of another
            model, another run is using the stage, or a metric is not finite.
        """
        with self._exit, contextlib.closing(stage):
            record = self._resume(stage.learners)
            if self._schedule.ends(self.step):
                return
            stage.begin(record)
            is_new = self._begin(stage)
            if is_new and self._schedule.evaluate_every:
                self._write(_floats(stage.evaluate("before")) | self._timers.take())
                # The first step's seconds begin after the evaluation.
                self._step_started_s = time.perf_counter()
            try:
                while not self._schedule.ends(self.step):
                    metrics, step = stage.step(), self.step + 1
                    if self._schedule.evaluates(step):
                        last = self._schedule.ends(step)
                        metrics |= stage.evaluate("after" if last else "during")
                    self._finish_step(_floats(metrics), stage)
            except StopRequested:
                self._save_last_step(stage.learners)
                raise
            except Exception as error:  # a step may raise anything; it is raised again below
                # Saving waits for the others.
                hosts.suspect_loss(error)
                save = functools.partial(self._save_last_step, stage.learners)
                if message := self._checkpoints.save_after_failure(stage.learners, save):
                    self._progress.message(f"{self._title}: {message}")
                raise

    # Timing of a step (StepTimer)

    @contextlib.contextmanager
    def phase(self, name: str, *, shown: str = "", may_stop: bool = False) -> Iterator[None]:
        """See `dataflows.step_timer.StepTimer`."""
        if may_stop:
            self.check_stop()
        self._progress.phase(shown or name)
        hosts.enter_phase(f"{self._title} step {self.step + 1}, {shown or name}")
        with self._timers(name):
            yield

    def when_done(self, result: Any) -> Any:
        """See `dataflows.step_timer.StepTimer`."""
        return jax.block_until_ready(result) if self._waits else result

    @property
    def stop_pending(self) -> bool:
        """See `dataflows.step_timer.StepTimer`."""
        return self._stop.pending

    def check_stop(self) -> None:
        """See `dataflows.step_timer.StepTimer`."""
        self._stop.check()

    # Start

    def _resume(self, learners: Mapping[str, Learner]) -> dict[str, Any] | None:
        """Restores the newest intact checkpoint into `learners`; returns its record, or None without one."""
        step = self._checkpoints.newest_intact()
        finished = step is not None and self._schedule.ends(step)
        # A finished stage is only read, so any number of runs may use it at the same time.
        if self._ownership is not None and not finished:
            self._exit.enter_context(self._ownership)
            # Another run may have continued it before this one got the lock.
            step = self._checkpoints.newest_intact()
        # After the lock on the stack, so before the lock is released.
        self._exit.callback(self._close_checkpoints)
        if step is None:
            hosts.on_first(self._checkpoints.check_nothing_is_lost)
            return None
        self.step = step
        return self._checkpoints.resume(step, learners)

    def _begin(self, stage: TrainingStage) -> bool:
        """Opens the logs and the live view, and saves the initial state as the checkpoint of step 0.

        All checks that can refuse the run are over by now. Rows of steps after the checkpoint are dropped.

        Returns:
          Whether the stage is new: no step is done, and no evaluation before the first step is logged.
        """
        resumed = self._checkpoints.saved_step is not None

        def open_log() -> bool:
            opened = self._open_metrics(self.step if resumed else None)
            self._writer = writer = self._exit.enter_context(opened)
            return writer.checksum.num_rows == 0

        aside = None if resumed else hosts.on_first(self._checkpoints.move_aside)
        # Opened first: an unreadable log is the last reason to refuse the run.
        log_is_empty = hosts.on_first(open_log)
        self._on_begin()
        self._checkpoints.prepare(self._checkpoints.saved_step)
        self._progress = self._exit.enter_context(
            Progress(
                self._title,
                self._schedule.num_steps,
                console=None if hosts.is_first() else Console(quiet=True, force_interactive=False),
                line_every_s=_LINE_EVERY_S,
            )
        )
        if hosts.is_first():
            self._exit.enter_context(self._stop.last_act(self._tell_last_checkpoint))
        if aside:
            self._progress.message(f"{self._title}: begins again; what was there is in {aside}")
        if resumed:
            self._progress.message(
                f"{self._title}: going on from the checkpoint of step {self.step}"
            )
        self._checkpoints.record = stage.record()
        self._checkpoints.note_finished(self.step, stage.learners)
        if not resumed:
            self._checkpoints.start_saving(self.step, stage.learners)
            self._commit()
        self._step_started_s = time.perf_counter()
        return log_is_empty and self.step == 0

    # The end of a step

    def _finish_step(self, metrics: dict[str, float], stage: TrainingStage) -> None:
        """Ends a step: logs it, and saves if a save is due or a signal has arrived."""
        bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            saved = self._checkpoints.saved_step
            raise UserError(
                f"{self._title} step {self.step + 1}: {', '.join(bad)}; training stops here (last "
                f"checkpoint: {'none' if saved is None else f'step {saved}'}). Lower the learning rate or "
                "the gradient clip and go on by run.resume=accept_other_settings, or look at the batch"
            )
        self.step += 1
        self._checkpoints.record = stage.record()
        stopping = self._stop.arrived()
        saving = self._schedule.saves(self.step) or stopping
        # Together: a deadline must not part a row from the checkpoint that counts it.
        with self._stop.saving():
            if saving:
                # Before the row is written, so that the seconds of the save count for this step.
                with self._timers("save_checkpoint"):
                    self._checkpoints.start_saving(self.step, stage.learners)
            seconds = time.perf_counter() - self._step_started_s
            self._step_started_s = time.perf_counter()
            if (tokens := metrics.get("perf/total_num_tokens")) is not None:
                metrics = metrics | {"perf/throughput": tokens / (seconds * self._num_devices)}
            metrics = metrics | self._timers.take()
            metrics |= {
                "training/global_step": self.step,
                "timing_s/step": seconds,
                "perf/time_per_step": seconds,
                "perf/peak_memory_gb": peak_memory().num_bytes / 1e9,
            }
            metrics |= timing_per_token(metrics) | work_rates(metrics)
            if self._schedule.logs(self.step):
                self._write(metrics)
            self._checkpoints.note_finished(self.step, stage.learners)
            if saving:
                # After the row, so that a checkpoint always has the rows of all its steps.
                self._commit()
        if stopping:
            raise StopRequested

    def _save_last_step(self, learners: Mapping[str, Learner]) -> None:
        """Saves the last finished step if it is not saved yet. No learner may have changed since."""
        if self._checkpoints.saved_step is not None and self._checkpoints.saved_step != self.step:
            with self._stop.saving():
                self._checkpoints.start_saving(self.step, learners)
                self._commit()

    def _close_checkpoints(self) -> None:
        with self._stop.saving():
            self._checkpoints.close()

    def _tell_last_checkpoint(self, timeout_s: float) -> str:
        """Waits for the checkpoint in writing and names it; for a run that ends in the middle of a step."""
        self._progress.stop()
        step = self._checkpoints.newest_complete(timeout_s)
        return f"{self._title}: the last checkpoint is of step {step}"

    def _commit(self) -> None:
        rows = None if self._writer is None else self._writer.checksum
        self._checkpoints.commit_step(self.step, rows)

    def _write(self, metrics: dict[str, float]) -> None:
        if self._first_row:
            # Rows without a checkpoint mean that a checkpoint was lost.
            self._checkpoints.wait()
            self._first_row = False
        if self._writer is not None:
            self._writer.write(self.step, metrics)
        self._progress.update(self.step, metrics)


def open_loop(
    run: RunContext, title: str, folder: StageFolder, schedule: Schedule, stop: StopSignal
) -> Loop:
    """Makes the loop of a stage in its folder, with the config's settings of saving and logging."""
    config = run.config
    checkpoints = StageCheckpoints(
        folder,
        keep=config.run.keep_checkpoints or None,
        may_restart=config.run.resume == "or_restart",
        processes={device.process_index for device in run.placement.pool_of("actor").devices},
    )
    logged = LoggedRun(
        project=config.name,
        name=f"{config.name}-seed{config.seed}-{folder.path.name}",
        settings=flatten_config(config),
    )

    def open_log(resume_step: int | None) -> MetricsWriter:
        return MetricsWriter(
            folder.path,
            resume_step=resume_step,
            drops_damaged=config.run.resume == "accept_lost_rows",
            loggers=config.run.loggers,
            run=logged,
        )

    return Loop(
        title,
        folder,
        schedule,
        checkpoints=checkpoints,
        open_log=open_log,
        num_devices=run.placement.num_devices,
        waits=len(run.placement.pools) == 1,
        stop=stop,
        # The run already holds its own folder. A warm-up shared by several runs has another owner.
        ownership=None if folder.run == config.run_folder else run_lock(folder.run.path),
        on_begin=functools.partial(keep_run_files, run),
    )


def _floats(metrics: Metrics) -> dict[str, float]:
    """Fetches metrics to the host as floats. Collective."""
    return {name: float(value) for name, value in hosts.fetch(dict(metrics)).items()}
