"""What every stage of training needs around its recipe: a clock, logs, checkpoints, an orderly end."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from rich.console import Console

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.roles.learner import Learner
from jaxrl.trainer.checkpoint import Checkpoints, all_meet
from jaxrl.trainer.collapse import CollapseConfig, CollapseDetector
from jaxrl.trainer.config_tree import flatten_config
from jaxrl.trainer.interrupt import StopRequested, StopSignal
from jaxrl.trainer.lock import only_run_in
from jaxrl.trainer.metrics import METRICS_FILE, MetricsWriter, Timers, WandbOptions
from jaxrl.trainer.progress import Progress
from jaxrl.trainer.run_folder import keep_run_files
from jaxrl.trainer.setup import Parts

logger = logging.getLogger(__name__)

# A log of a stage with quick steps has a line now and then, not a thousand.
_LINE_EVERY_S = 2.0
# Where a checkpoint's record has what is known of a collapse.
_COLLAPSE = "collapse"
# How long a process that has failed waits for the others to fail alike.
_MEET_S = 30

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Stage:
    """One stage of a run, "sft" or "rl", in a folder of its own. Used as a context manager.

    Every process goes through the same stage; only the first logs and shows it.

    Attributes:
      step: finished steps.
      folder: metrics.jsonl, tensorboard/, checkpoints/.
      begins: no step is done and nothing is logged, not even what was measured before the first one.
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
        collapse: CollapseConfig,
        may_restart: bool = False,
        num_devices: int,
        stop: StopSignal,
        ownership: contextlib.AbstractContextManager[Any] | None = None,
        on_begin: Callable[[], None] = lambda: None,
        wandb: WandbOptions | None = None,
    ):
        """Nothing is written before `begin`.

        Args:
          title: of the stage, for people.
          folder: of the stage.
          num_steps, save_every, log_every, keep_checkpoints: as in the config.
          collapse: when a checkpoint is kept besides.
          may_restart: begin again, with the old folder moved aside, where nothing is left to go on from.
          num_devices: that it runs on.
          stop: signals to the run.
          ownership: held from before anything is written; None if the run holds the folder already.
          on_begin: called when the run is sure to go on, with this stage.
          wandb: how the stage is logged there, if it is.
        """
        self.step = 0
        self.folder = folder
        self.begins = True
        self._first_row = True
        self._title = title
        self._num_steps = num_steps
        self._save_every = save_every
        self._log_every = log_every
        self._may_restart = may_restart
        self._num_devices = num_devices
        self._stop = stop
        self._ownership = ownership
        self._on_begin = on_begin
        self._wandb = wandb
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=keep_checkpoints)
        self._detector = CollapseDetector(collapse)
        self._timers = Timers()
        self._exit = contextlib.ExitStack()
        self._writer: MetricsWriter | None = None
        self._record: dict[str, Any] = {}
        self._saved_step: int | None = None
        # Of each learner when the last step was finished.
        self._num_updates: dict[str, int] = {}

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
        """Restores the newest intact checkpoint into `learners`; returns its record, None without one.

        Raises:
          UserError: the stage has begun and no intact checkpoint is left; the checkpoint is of another model;
            another run is at work on the stage.
        """
        step = self._newest_intact()
        finished = step is not None and step >= self._num_steps
        # A finished stage is only read, by as many runs as like.
        if self._ownership is not None and not finished:
            self._exit.enter_context(self._ownership)
            # Another run may have gone on with it meanwhile.
            step = self._newest_intact()
        self._exit.callback(self._checkpoints.close)
        if step is None:
            hosts.on_first(self._check_nothing_is_lost)
            return None
        like = {name: role.abstract_state() for name, role in learners.items()}
        for name, state in self._checkpoints.restore(step, like).items():
            learners[name].state = state
        self._record = self._checkpoints.read_record(step)
        if _COLLAPSE in self._record:
            self._detector.restore(self._record[_COLLAPSE])
        self.step = self._saved_step = step
        return self._record

    def _newest_intact(self) -> int | None:
        return hosts.on_first(self._checkpoints.stored.newest_intact)

    def _check_nothing_is_lost(self) -> None:
        """Raises UserError if the folder shows that there was something to go on from."""
        remains = self._checkpoints.stored.remains()
        rows = _num_rows(self.folder)
        if self._may_restart or not (remains or rows):
            return
        checkpoints, seals = self._checkpoints.stored.folder, self._checkpoints.stored.seals.folder
        found = "; ".join([*remains, f"{rows} rows in {METRICS_FILE}"] if rows else remains)
        raise UserError(
            f"{self.folder} has begun and no intact checkpoint is left ({found}); restore {checkpoints} and "
            f"{seals} from where they are whole, use another `name`, or begin the stage again with "
            "--config.run.resume=or_restart, which moves what is there aside"
        )

    def begin(self, learners: Mapping[str, Learner], record: Mapping[str, Any]) -> None:
        """Opens logs and the live view, and keeps the state to begin with as the checkpoint of step 0.

        Call it once everything that could refuse the run has been checked. Rows of steps that no checkpoint
        holds are dropped.

        Args:
          learners, record: as for `finish_step`.
        """
        resumed = self._saved_step is not None
        aside = None if resumed else hosts.on_first(self._move_aside)
        # First, since a log that cannot be read is the last thing to refuse the run.
        empty = hosts.on_first(lambda: self._open_log(resumed))
        self.begins = empty and self.step == 0
        self._on_begin()
        self._checkpoints.prepare(self._saved_step)
        self._progress = self._exit.enter_context(
            Progress(
                self._title,
                self._num_steps,
                console=None if hosts.is_first() else Console(quiet=True, force_interactive=False),
                line_every_s=_LINE_EVERY_S,
            )
        )
        if aside:
            self.message(f"{self._title}: begins again; what was there is in {aside}")
        if resumed:
            self.message(f"{self._title}: going on from the checkpoint of step {self.step}")
        self._note_record(record)
        self._note_finished(learners)
        if not resumed:
            self._start_saving(learners)
            self._commit()
        self._step_started_s = time.perf_counter()

    def _move_aside(self) -> str | None:
        """Makes room for a stage that begins again; says where the old one is."""
        if not (self._checkpoints.stored.remains() or _num_rows(self.folder)):
            return None
        aside = self.folder.with_name(f"{self.folder.name}.aside.{time.time_ns()}")
        self.folder.rename(aside)
        return str(aside)

    def _open_log(self, resumed: bool) -> bool:
        """Opens the log; says whether it is empty."""
        resume_step = self.step if resumed else None
        self._writer = self._exit.enter_context(
            MetricsWriter(self.folder, resume_step=resume_step, wandb=self._wandb)
        )
        last = self._writer.last_step
        if self.step >= self._log_every and (last is None or self.step - last >= self._log_every):
            logger.warning(
                "%s has rows to step %s of the %s steps that the checkpoint holds; the others are lost",
                self.folder / METRICS_FILE,
                last or 0,
                self.step,
            )
        return last is None

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
            hosts.enter_phase(f"{self._title} step {self.step + 1}, {shown or name}")
            with self._timers(name):
                return function(*args, **kwargs)

        return timed

    def log_start(self, metrics: Mapping[str, float]) -> None:
        """Records what was measured before the first step, as step 0."""
        self._watch(metrics)
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
        self._watch(metrics)
        self._note_record(record)
        stopping = self._stop.arrived()
        saving = self.finished or self.step % self._save_every == 0 or stopping
        if saving:
            # Before the row is written: its seconds belong to this step.
            with self._timers("save_checkpoint"):
                self._start_saving(learners)
        seconds = time.perf_counter() - self._step_started_s
        self._step_started_s = time.perf_counter()
        metrics = {**metrics, **self._timers.take(), **self._pace(metrics, seconds)}
        if self.finished or self.step % self._log_every == 0:
            self._write(metrics)
        self._note_finished(learners)
        if saving:
            # After the row: a checkpoint that a run goes on from has the rows of all its steps.
            self._commit()
        if stopping:
            raise StopRequested
        return not self.finished

    def save_last_step(self, learners: Mapping[str, Learner]) -> None:
        """Saves the last finished step, if it is not on disk yet. No learner has changed since."""
        if self._saved_step is not None and self._saved_step != self.step:
            self._start_saving(learners)
            self._commit()

    def save_what_is_finished(self, learners: Mapping[str, Learner]) -> None:
        """Saves the last finished step after one that failed, unless that has changed the learners already.

        It says what is kept, and raises nothing: the error that is on its way matters more.
        """
        # Saving takes all processes, of which others may have died, or wait for this one.
        if self._saved_step is None or not all_meet(f"step {self.step + 1} failed", _MEET_S):
            return
        fault = "had begun to change the weights"
        if self._num_updates == {name: role.num_updates for name, role in learners.items()}:
            fault = "was not finished"
            try:
                self.save_last_step(learners)
            except Exception as error:  # told here, since it must not take the first one's place
                fault = f"was not finished, and what came before could not be saved ({error!r})"
        self.message(
            f"{self._title}: step {self.step + 1} {fault}; the last checkpoint is of step {self._saved_step}"
        )

    def message(self, text: str) -> None:
        """Says something to the person who watches."""
        self._progress.message(text)

    def _note_record(self, record: Mapping[str, Any]) -> None:
        self._record = {**record, _COLLAPSE: self._detector.record()}

    def _note_finished(self, learners: Mapping[str, Learner]) -> None:
        """From here on the state is worth saving: the step is done, and its row is written."""
        self._num_updates = {name: role.num_updates for name, role in learners.items()}

    def _start_saving(self, learners: Mapping[str, Learner]) -> None:
        states = {name: role.state for name, role in learners.items()}
        self._checkpoints.save(self.step, states, self._record)

    def _commit(self) -> None:
        self._checkpoints.commit(self._detector.sound_steps)
        self._saved_step = self.step

    def _watch(self, metrics: Mapping[str, float]) -> None:
        """Tells of a collapse when it begins."""
        faults = self._detector.observe(self.step, metrics)
        if not faults:
            return
        self._checkpoints.wait()
        stored = self._checkpoints.stored
        sound = max(self._detector.sound_steps, default=None)
        step = None if sound is None else stored.newest_sealed(up_to=sound)
        kept = "no checkpoint from before was saved"
        if step is not None:
            kept = (
                f"the checkpoint of step {step}, from before, is kept. To go on from it stop the run, move "
                f"the newer ones out of {stored.folder}, and start again with a lower learning rate, say"
            )
        self.message(
            f"{self._title} step {self.step}: the model may be ruined ({'; '.join(faults)}); {kept}"
        )

    def _pace(self, metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
        tokens = metrics.get("perf/total_num_tokens", math.nan)
        return {
            "training/global_step": self.step,
            "timing_s/step": seconds,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / (seconds * self._num_devices),
        }

    def _write(self, metrics: dict[str, float]) -> None:
        if self._first_row:
            # Where there are rows there is, or was, a checkpoint: the loss of it can be noticed.
            self._checkpoints.wait()
            self._first_row = False
        if self._writer is not None:
            self._writer.write(self.step, metrics)
        self._progress.update(self.step, metrics)

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            kept = "none" if self._saved_step is None else f"step {self._saved_step}"
            raise UserError(
                f"{self._title} step {self.step + 1}: {', '.join(bad)}; training stops here (last "
                f"checkpoint: {kept}). Lower the learning rate or the gradient clip, or look at "
                "the batch of this step"
            )


def open_stage(
    parts: Parts,
    title: str,
    folder: pathlib.Path,
    *,
    num_steps: int,
    save_every: int,
    log_every: int = 1,
    stop: StopSignal,
) -> Stage:
    """A stage of a run in its folder, as the config wants it kept and logged."""
    config = parts.config
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
        collapse=config.run.collapse,
        may_restart=config.run.resume == "or_restart",
        num_devices=parts.placement.num_devices,
        stop=stop,
        # Its own folder the run holds from the start; a warm start that several runs share is another one's.
        ownership=None if folder.parent == config.run_folder else only_run_in(folder.parent),
        on_begin=functools.partial(keep_run_files, parts),
        wandb=wandb,
    )


def _num_rows(folder: pathlib.Path) -> int:
    path = folder / METRICS_FILE
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def run_until_stopped(
    stage: Stage, learners: Mapping[str, Learner], recipe: Callable[[], None]
) -> None:
    """Runs a recipe. On a stop signal or an error it saves the last finished step and passes them on."""
    try:
        recipe()
    except StopRequested:
        stage.save_last_step(learners)
        raise
    except Exception:  # a step may raise anything; all of it is passed on
        stage.save_what_is_finished(learners)
        raise
