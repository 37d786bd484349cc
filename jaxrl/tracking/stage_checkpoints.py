"""The checkpoints of a training stage, with what a resumed stage needs besides the learners' states.

resume                       the states and the record of the newest intact checkpoint
start_saving, commit_step    a finished step: its states, then its manifest beside the rows of the log
save_after_failure           the last finished step, unless the failed one has changed the learners
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import read_bytes
from jaxrl.mesh import hosts
from jaxrl.roles.learner import Learner
from jaxrl.tracking.checkpoints import (
    Checkpoints,
    StoredCheckpoints,
    wait_for_all_processes,
)
from jaxrl.tracking.metrics import RowChecksum, parse_row
from jaxrl.tracking.run_config import DivergenceConfig
from jaxrl.tracking.run_folder import StageFolder

# Key of the divergence detector's state in a checkpoint's record; checkpoints of older versions use it too.
_DIVERGENCE = "collapse"
# Seconds that a failed process waits for the others to fail in the same way.
_MEET_S = 30


# Prefix of evaluation accuracies; higher is better.
_EVALUATION = "val-core/"


class StageCheckpoints(Checkpoints):
    """The checkpoints of one training stage, and whether its model has diverged since.

    Attributes:
      saved_step: step of the newest checkpoint; None without one.
    """

    def __init__(
        self, folder: StageFolder, *, keep: int, divergence: DivergenceConfig, may_restart: bool
    ):
        """Writes nothing.

        Args:
          folder: folder of the stage.
          keep: number of the newest checkpoints that are kept.
          divergence: settings of the divergence detector, which keeps an additional checkpoint.
          may_restart: whether a stage without a usable checkpoint starts again.
        """
        super().__init__(folder.checkpoints.path, keep=keep)
        self.saved_step: int | None = None
        self._folder = folder
        self._may_restart = may_restart
        self._detector = DivergenceDetector(divergence)
        self._record: dict[str, Any] = {}
        # The last step with a written row, and the update count of each learner at that step.
        self._noted_step = 0
        self._num_updates: dict[str, int] = {}

    # Start

    def newest_intact(self) -> int | None:
        """The newest step that can be restored; None if there is none. Collective."""
        return hosts.on_first(self.stored.newest_intact)

    def resume(self, step: int, learners: Mapping[str, Learner]) -> dict[str, Any]:
        """Restores the checkpoint of a step into `learners`; returns its record."""
        like = {name: role.abstract_state() for name, role in learners.items()}
        for name, state in self.restore(step, like).items():
            learners[name].state = state
        self._record = self.read_record(step)
        if _DIVERGENCE in self._record:
            self._detector.restore(self._record[_DIVERGENCE])
        self.saved_step = step
        return self._record

    def check_nothing_is_lost(self) -> None:
        """Raises UserError if the folder has traces of progress but no checkpoint to resume from."""
        remains, rows = self.stored.remains(), self._num_rows()
        if self._may_restart or not (remains or rows):
            return
        checkpoints, manifests = self._folder.checkpoints.path, self._folder.checkpoints.manifests
        found = "; ".join(
            [*remains, f"{rows} rows in {self._folder.metrics.name}"] if rows else remains
        )
        raise UserError(
            f"{self._folder} has begun and no intact checkpoint is left ({found}); restore {checkpoints} and "
            f"{manifests} from where they are whole, use another `name`, or begin the stage again with "
            "--config.run.resume=or_restart, which moves what is there aside"
        )

    def move_aside(self) -> str | None:
        """Moves the old folder aside for a new start; returns its new place, None if there was nothing."""
        if not (self.stored.remains() or self._num_rows()):
            return None
        aside = self._folder.path.with_name(f"{self._folder.path.name}.aside.{time.time_ns()}")
        self._folder.path.rename(aside)
        return str(aside)

    def _num_rows(self) -> int:
        path = self._folder.metrics
        if not path.exists():
            return 0
        return len(read_bytes(path, absent="remove it", max_bytes=None).splitlines())

    # The end of a step

    def note_record(self, record: Mapping[str, Any]) -> None:
        """Keeps the record of a step for its checkpoint."""
        self._record = {**record, _DIVERGENCE: self._detector.record()}

    def note_finished(self, step: int, learners: Mapping[str, Learner]) -> None:
        """Marks a step as finished and its row as written, so that its state may be saved."""
        self._noted_step = step
        self._num_updates = {name: role.num_updates for name, role in learners.items()}

    def start_saving(self, step: int, learners: Mapping[str, Learner]) -> None:
        """Begins to write the states of the learners after a step."""
        self.save(
            step, {name: role.for_training() for name, role in learners.items()}, self._record
        )

    def commit_step(self, step: int, rows: RowChecksum | None) -> None:
        """Completes the checkpoint of a step once the rows of the log have reached it."""
        self.commit(self._detector.sound_steps, rows=rows)
        self.saved_step = step

    def save_after_failure(
        self, learners: Mapping[str, Learner], save: Callable[[], None]
    ) -> str | None:
        """Saves the last finished step after a failed one, unless the failed step has changed the learners.

        Raises nothing, so that the original error is reported. Collective.

        Args:
          learners: roles of the stage.
          save: function that saves the last finished step.

        Returns:
          A message for the user; None if nothing can be saved.
        """
        # A save is collective. Other processes may have died, or may wait for this one.
        failed = f"step {self._noted_step + 1}"
        if self.saved_step is None or not wait_for_all_processes(f"{failed} failed", _MEET_S):
            return None
        fault = "had begun to change the weights"
        if self._num_updates == {name: role.num_updates for name, role in learners.items()}:
            fault = "was not finished"
            try:
                save()
            except Exception as error:  # only logged: it must not replace the original error
                fault = f"was not finished, and what came before could not be saved ({error!r})"
        # A checkpoint may still be in writing. If that fails, it may be the reason why the step has failed.
        with contextlib.suppress(UserError):
            self.wait()
        last = self.stored.newest_complete(up_to=self._noted_step)
        return f"{failed} {fault}; the last checkpoint is of step {last}"

    def divergence(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Takes in the metrics of a step; returns a warning when a divergence begins, otherwise None."""
        faults = self._detector.observe(step, metrics)
        if not faults:
            return None
        self.wait()
        sound = max(self._detector.sound_steps, default=None)
        last = None if sound is None else self.stored.newest_complete(up_to=sound)
        kept = "no checkpoint from before was saved"
        if last is not None:
            kept = (
                f"the checkpoint of step {last}, from before, is kept. To go on from it stop the run, move "
                f"the newer ones out of {self.stored.paths.path}, and start again with a lower learning "
                "rate, say"
            )
        return f"step {step}: the model may have diverged ({'; '.join(faults)}); {kept}"


class DivergenceDetector:
    """Checks the metrics of a training stage for divergence, so that a checkpoint from before it is kept.

    With a learning rate that is too high, the weights can diverge within one step and stay finite. The run
    continues, and a few saves later all of its checkpoints are useless. The detector therefore remembers the
    newest steps with sound weights:

        step               18      19      20      21      22
        training metrics   fine    fine    fine    out     out     measured before the step: 19 is sound
        evaluation         .75             .74             .02     measured after the step: 20 is sound

    Stopping the run or going back to a checkpoint is left to the user.

    Attributes:
      found: present faults: metric -> one sentence.
    """

    def __init__(self, config: DivergenceConfig):
        """Args: the thresholds."""
        self._config = config
        self._best: dict[str, float] = {}
        self._evaluated_step: int | None = None
        self._trained_step: int | None = None
        self.found: dict[str, str] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Checks the metrics of one step.

        Args:
          step: number of the step.
          metrics: metrics of the step. Training metrics are measured with the weights at its beginning,
            evaluation metrics with those at its end.

        Returns:
          One sentence for each fault that is new at this step.
        """
        before = dict(self.found)
        for name in metrics:
            fault = self._fault(name, metrics[name])
            self.found.pop(name, None)
            if fault is not None:
                self.found[name] = fault
        if not self.found:
            # Training metrics of a step are measured with the weights of the step before.
            self._trained_step = max(step - 1, 0)
            if any(name.startswith(_EVALUATION) for name in metrics):
                self._evaluated_step = step
        return [fault for name, fault in self.found.items() if name not in before]

    @property
    def sound_steps(self) -> list[int]:
        """The newest step that an evaluation found sound, and the newest by training metrics if later."""
        evaluated, trained = self._evaluated_step, self._trained_step
        if trained is None:
            return []
        if evaluated is None:
            return [trained]
        return [evaluated] if trained <= evaluated else [evaluated, trained]

    def _fault(self, name: str, value: float) -> str | None:
        if name in self._config.ranges:
            low, high = self._config.ranges[name]
            if not low <= value <= high:
                return f"{name} {value:.3g} is not between {low:g} and {high:g}"
        if name.startswith(_EVALUATION) and self._config.accuracy_loss < 1:
            best = self._best_of(name, value)
            if value < (1 - self._config.accuracy_loss) * best:
                return f"{name} {value:.3g} has lost more than {self._config.accuracy_loss:.0%} of {best:.3g}"
        return None

    def _best_of(self, name: str, value: float) -> float:
        self._best[name] = max(value, self._best.get(name, value))
        return self._best[name]

    # Saving and restoring

    def record(self) -> dict[str, Any]:
        """The state of the detector as JSON-able values, for a checkpoint."""
        return {
            "best": dict(self._best),
            "evaluated_step": self._evaluated_step,
            "trained_step": self._trained_step,
            "found": dict(self.found),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restores the state that `record` returned."""
        self._best, self.found = dict(record["best"]), dict(record["found"])
        self._evaluated_step, self._trained_step = record["evaluated_step"], record["trained_step"]


def lost_rows(folder: StageFolder) -> str | None:
    """Compares metrics.jsonl with the checksum in the newest intact checkpoint. Only reads.

    Rows of later steps are not compared: a run that resumes from the checkpoint writes them again.

    Returns:
      One line with the file and its fault; None if the rows are unchanged.
    """
    stored = StoredCheckpoints(folder.checkpoints.path)
    for step in reversed(stored.manifest_steps):
        # Read the manifest before the rows: a run at work only appends to the rows.
        written = stored.rows(step)
        fault = None if written is None else _rows_fault(folder.metrics, written)
        if fault is None:
            return None
        # Reading a whole checkpoint is slow, so it is done only after a mismatch.
        if stored.fault(step) is None:
            return f"{folder.metrics} {fault}, with which the checkpoint of step {step} was saved"
    return None


def _rows_fault(path: pathlib.Path, written: RowChecksum) -> str | None:
    content = path.read_bytes() if path.exists() else b""
    expected = f"of the {written.num_rows} rows to step {written.last_step}"
    if not written.matches(content):
        return _rows_difference(path, content, written, expected)
    after = content[written.num_bytes :].splitlines()
    step = _step_of(after[0]) if after else None
    if step is not None and step <= written.last_step:
        return f"has a second row of step {step} after the last {expected}"
    return None


def _rows_difference(
    path: pathlib.Path, content: bytes, written: RowChecksum, expected: str
) -> str:
    if not content:
        return f"{'is empty' if path.exists() else 'is missing'} and has none {expected}"
    last = -1
    found = 0
    for number, line in enumerate(content.splitlines(), start=1):
        step = _step_of(line)
        if step is None:
            return f"has a line {number} that is no row, instead {expected}"
        if step <= last:
            return f"has a row of step {step} after that of step {last} in the place {expected}"
        last = step
        found += step <= written.last_step
    if found < written.num_rows:
        return f"has {found} {expected}"
    return f"has other content than that {expected}"


def _step_of(line: bytes) -> int | None:
    try:
        return parse_row(line)["step"]
    except (TypeError, ValueError):
        return None
