"""What every stage of training needs around its recipe: a clock, logs, checkpoints, an orderly end."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from rich.console import Console

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.roles.learner import Learner
from jaxrl.tracking.metrics import MetricsWriter, Timers, WandbOptions
from jaxrl.tracking.progress import Progress
from jaxrl.trainer.checkpoint import Checkpoints
from jaxrl.trainer.config import Config
from jaxrl.trainer.config_tree import flatten_config
from jaxrl.trainer.interrupt import StopRequested, StopSignal

# A log of a stage with quick steps has a line now and then, not a thousand.
_LINE_EVERY_S = 2.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Stage:
    """One stage of a run, "sft" or "rl", in a folder of its own. Used as a context manager.

    Every process goes through the same stage; only the first logs and shows it.

    Attributes:
      step: finished steps.
      folder: metrics.jsonl, tensorboard/, checkpoints/.
    """

    def __init__(
        self,
        title: str,
        folder: pathlib.Path,
        *,
        num_steps: int,
        save_every: int,
        log_every: int,
        keep_checkpoints: int,
        num_devices: int,
        stop: StopSignal,
        wandb: WandbOptions | None = None,
    ):
        """Opens the folder's checkpoints; `begin` opens the rest once it is known where to go on."""
        self.step = 0
        self.folder = folder
        self._title = title
        self._num_steps = num_steps
        self._save_every = save_every
        self._log_every = log_every
        self._num_devices = num_devices
        self._stop = stop
        self._wandb = wandb
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=keep_checkpoints)
        self._timers = Timers()
        self._exit = contextlib.ExitStack()
        self._exit.callback(self._checkpoints.close)
        self._writer: MetricsWriter | None = None
        self._record: dict[str, Any] = {}
        self._saved_step: int | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exception) -> None:
        self._exit.__exit__(*exception)

    @property
    def finished(self) -> bool:
        """All steps are done."""
        return self.step >= self._num_steps

    def due(self, every: int) -> bool:
        """The step that is about to finish is a multiple of `every`, or the last."""
        return (self.step + 1) % every == 0 or self.step + 1 == self._num_steps

    # Start

    def resume(self, learners: Mapping[str, Learner]) -> dict[str, Any] | None:
        """Restores the newest intact checkpoint into `learners`; returns its record, None without one."""
        step = self._checkpoints.newest_intact()
        if step is None:
            return None
        like = {name: role.abstract_state() for name, role in learners.items()}
        for name, state in self._checkpoints.restore(step, like).items():
            learners[name].state = state
        self._record = self._checkpoints.read_record(step)
        self.step = self._saved_step = step
        return self._record

    def begin(self) -> None:
        """Opens logs and the live view. Rows of steps that no checkpoint holds are dropped."""
        resume_step = self.step if self._saved_step is not None else None
        if hosts.is_first():
            self._writer = self._exit.enter_context(
                MetricsWriter(self.folder, resume_step=resume_step, wandb=self._wandb)
            )
        self._progress = self._exit.enter_context(
            Progress(
                self._title,
                self._num_steps,
                console=None if hosts.is_first() else Console(quiet=True, force_interactive=False),
                line_every_s=_LINE_EVERY_S,
            )
        )
        if self._saved_step:
            self._progress.message(
                f"{self._title}: going on from the checkpoint of step {self.step}"
            )
        self._step_started_s = time.perf_counter()

    # During a step

    def phase(
        self,
        name: str,
        function: Callable[Arguments, Result],
        *,
        shown: str | None = None,
        may_stop: bool = False,
    ) -> Callable[Arguments, Result]:
        """`function`, timed as timing_s/<name> and shown while it runs.

        Args:
          name: of the timer.
          function: one event of the recipe.
          shown: what the live view says; `name` by default.
          may_stop: nothing is half done before this event, so a stop signal takes effect here.
        """

        @functools.wraps(function)
        def timed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if may_stop:
                self._stop.check()
            self._progress.phase(shown or name)
            with self._timers(name):
                return function(*args, **kwargs)

        return timed

    def log_start(self, metrics: Mapping[str, float]) -> None:
        """Records what was measured before the first step, as step 0."""
        self._write(dict(metrics) | self._timers.take())
        self._step_started_s = time.perf_counter()

    def finish_step(
        self,
        metrics: Mapping[str, float],
        learners: Mapping[str, Learner],
        record: Mapping[str, Any],
    ) -> bool:
        """Ends a step: logs it, saves when due; says whether to go on.

        Args:
          metrics: of the step.
          learners: their states are what a checkpoint holds.
          record: JSON-able, goes into the checkpoint: everything else that a resumed run needs.

        Raises:
          UserError: a metric is not finite.
          StopRequested: a signal arrived; the step is saved.
        """
        self._check_finite(metrics)
        self.step += 1
        self._record = dict(record)
        stopping = self._stop.arrived()
        if self._num_steps == self.step or self.step % self._save_every == 0 or stopping:
            # Before the row is written: its seconds belong to this step.
            with self._timers("save_checkpoint"):
                self._save(learners)
        seconds = time.perf_counter() - self._step_started_s
        self._step_started_s = time.perf_counter()
        metrics = {**metrics, **self._timers.take(), **self._pace(metrics, seconds)}
        if self.finished or self.step % self._log_every == 0:
            self._write(metrics)
        if stopping:
            raise StopRequested
        return not self.finished

    def save_last_step(self, learners: Mapping[str, Learner]) -> None:
        """Saves the last finished step, if it is not on disk yet. No learner has changed since."""
        if self.step and self._saved_step != self.step:
            self._save(learners)

    def message(self, text: str) -> None:
        """Says something to the person who watches."""
        self._progress.message(text)

    def _save(self, learners: Mapping[str, Learner]) -> None:
        states = {name: role.state for name, role in learners.items()}
        self._checkpoints.save(self.step, states, self._record)
        self._saved_step = self.step

    def _pace(self, metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
        tokens = metrics.get("perf/total_num_tokens", math.nan)
        return {
            "training/global_step": self.step,
            "timing_s/step": seconds,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / (seconds * self._num_devices),
        }

    def _write(self, metrics: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(self.step, metrics)
        self._progress.update(self.step, metrics)

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            kept = f"step {self._saved_step}" if self._saved_step else "none"
            raise UserError(
                f"{self._title} step {self.step + 1}: {', '.join(bad)}; training stops here (last "
                f"checkpoint: {kept}). Lower the learning rate or the gradient clip, or look at "
                "the batch of this step"
            )


def open_stage(
    config: Config,
    title: str,
    folder: pathlib.Path,
    *,
    num_steps: int,
    save_every: int,
    log_every: int = 1,
    num_devices: int,
    stop: StopSignal,
) -> Stage:
    """A stage of a run in its folder, as the config wants it kept and logged."""
    wandb = None
    if config.run.wandb_project:
        wandb = WandbOptions(
            config.run.wandb_project,
            f"{config.name}-seed{config.seed}-{folder.name}",
            flatten_config(config),
        )
    return Stage(
        title,
        folder,
        num_steps=num_steps,
        save_every=save_every,
        log_every=log_every,
        keep_checkpoints=config.run.keep_checkpoints,
        num_devices=num_devices,
        stop=stop,
        wandb=wandb,
    )


def run_until_stopped(
    stage: Stage, learners: Mapping[str, Learner], recipe: Callable[[], None]
) -> None:
    """Runs a recipe; on a stop signal saves the last finished step and passes the signal on."""
    try:
        recipe()
    except StopRequested:
        stage.save_last_step(learners)
        raise
