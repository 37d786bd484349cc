"""The checkpoints of a training stage, with what a resumed stage needs besides the learners' states.

resume                       the states and the record of the newest intact checkpoint
start_saving, commit_step    a finished step: its states, then its manifest beside the rows of the log
save_after_failure           the last finished step, unless the failed one has changed the learners
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import read_bytes
from jaxrl.mesh import hosts
from jaxrl.roles.learner import Learner
from jaxrl.tracking.checkpoints import Checkpoints, StoredCheckpoints, wait_for_all_processes
from jaxrl.tracking.metrics import RowChecksum
from jaxrl.tracking.run_folder import StageFolder

# Seconds that a failed process waits for the others to fail in the same way.
_MEET_S = 30


class StageCheckpoints(Checkpoints):
    """The checkpoints of one training stage.

    Attributes:
      saved_step: step of the newest checkpoint; None without one.
      record: state of the stage besides the learners', for the next save; set after every step.
    """

    def __init__(
        self,
        folder: StageFolder,
        *,
        keep: int | None,
        may_restart: bool,
        processes: Collection[int] | None = None,
    ):
        """Writes nothing.

        Args:
          folder: folder of the stage.
          keep: number of the newest checkpoints that are kept; None keeps all.
          may_restart: whether a stage without a usable checkpoint starts again.
          processes: as for `Checkpoints`.
        """
        super().__init__(folder.checkpoints.path, keep=keep, processes=processes)
        self.saved_step: int | None = None
        self._folder = folder
        self._may_restart = may_restart
        self.record: dict[str, Any] = {}
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
        for name, state in self.restore(step, like, layers=_layers_of(learners)).items():
            learners[name].state = state
        self.record = self.read_record(step)
        self.saved_step = step
        return self.record

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
            f"{self._folder} has started and no intact checkpoint is left ({found}); restore {checkpoints} "
            f"and {manifests} from where they are whole, use another `name`, or begin the stage again with "
            "--config.run.resume=or_restart, which moves what is there aside"
        )

    def move_aside(self) -> str | None:
        """Moves the old folder aside for a new start; returns its new place, None if there was nothing."""
        if not (self.stored.remains() or self._num_rows()):
            return None
        # Renamed and not removed: the user may find that nothing was damaged.
        aside = self._folder.path.with_name(f"{self._folder.path.name}.aside.{time.time_ns()}")
        self._folder.path.rename(aside)
        return str(aside)

    def _num_rows(self) -> int:
        path = self._folder.metrics
        if not path.exists():
            return 0
        return len(read_bytes(path, absent="remove it").splitlines())

    # The end of a step

    def note_finished(self, step: int, learners: Mapping[str, Learner]) -> None:
        """Marks a step as finished and its row as written, so that its state may be saved."""
        # Compared after a failure: equal counts mean that the failed step has changed no weights.
        self._noted_step = step
        self._num_updates = {name: role.num_updates for name, role in learners.items()}

    def start_saving(self, step: int, learners: Mapping[str, Learner]) -> None:
        """Begins to write the states of the learners after a step."""
        states = {name: role.for_training() for name, role in learners.items()}
        self.save(step, states, self.record, layers=_layers_of(learners))

    def commit_step(self, step: int, rows: RowChecksum | None) -> None:
        """Completes the checkpoint of a step once the rows of the log have reached it."""
        self.commit(rows)
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
        fault = "had started to change the weights"
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


def _layers_of(learners: Mapping[str, Learner]) -> dict[str, int]:
    return {name: role.model.num_periods for name, role in learners.items()}


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
        content = b""
        if folder.metrics.exists():
            content = read_bytes(folder.metrics, absent="remove it")
        if written is None or written.matches(content):
            return None
        # Reading a whole checkpoint is slow, so it is done only after a mismatch.
        if stored.fault(step) is None:
            has = "other content than" if content else "none of"
            return (
                f"{folder.metrics} has {has} the {written.num_rows} rows to step {written.last_step}, with "
                f"which the checkpoint of step {step} was saved"
            )
    return None
