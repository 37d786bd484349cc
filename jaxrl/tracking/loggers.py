"""Writes the metrics of a run to TensorBoard, Weights & Biases and trackio, as `run.loggers` selects.

A logger gets every row that metrics.jsonl gets, after it. metrics.jsonl stays the source of truth: reports
and resumed runs read nothing of what is written here.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tensorboardX import SummaryWriter

from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl.tracking.durable import ensure_writable, write_atomically
from jaxrl.tracking.run_folder import StageFolder


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """What loggers show of a run besides its metrics.

    Attributes:
      project: project of loggers whose entry names none.
      name: display name of the run.
      settings: setting -> value.
    """

    project: str = "jaxrl"
    name: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _TensorBoard:
    """Writes TensorBoard event files. TensorBoard shows `@` in a name as `_`."""

    def __init__(self, folder: StageFolder, resume_step: int | None, run: LoggedRun):
        directory = folder.tensorboard
        ensure_writable(directory)
        number = sum(1 for _ in directory.iterdir())
        self._writer = SummaryWriter(
            str(directory),
            # TensorBoard discards events of earlier files from this step on.
            purge_step=0 if resume_step is None else resume_step + 1,
            # No limit: the writer's thread dies on a disk error, and a full queue would wait for it forever.
            max_queue=0,
            # A run is watched while it goes on, and an end without warning loses this much of it here.
            flush_secs=5,
            # The name has a time in seconds. The number keeps it unique if a run is resumed within one.
            filename_suffix=f".{number}",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """Logs to a run of a library with wandb's interface, of which a resumed run goes on."""

    def __init__(self, package: str, run: LoggedRun, hint: str, **options: Any):
        """Starts the run; `hint` is what to do if it does not start, besides leaving the logger out."""
        # The user's extras: `pip install` knows each by its own name.
        try:
            library = importlib.import_module(package)
        except ImportError as error:
            raise UserError(
                f"run.loggers names {package}, which is not installed; "
                f"run pip install {package}, or leave it out"
            ) from error
        given = {"project": run.project, "name": run.name, "config": dict(run.settings)}
        try:
            self._run = library.init(**given, **options)
        except (ValueError, OSError, getattr(library, "Error", ValueError)) as error:
            raise UserError(
                f"{package} did not start ({error}); {hint}, or leave it out of run.loggers"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


Logger = _TensorBoard | _Hosted
"""Writes the metrics of each step somewhere."""


def _wandb(folder: StageFolder, resume_step: int | None, run: LoggedRun) -> Logger:
    # A resumed run keeps its id. wandb ignores steps that it already has: after a kill the run repeats some
    # steps with the same values, so nothing is lost.
    path = folder.path / "wandb_run_id"
    if resume_step is not None and path.exists():
        run_id = read_text(path, absent="remove it").strip()
    else:
        run_id = uuid.uuid4().hex[:12]
        write_atomically(path, run_id.encode())
    hint = "run `wandb login`, set WANDB_MODE=offline"
    options = {"dir": os.fspath(folder.path), "id": run_id, "resume": "allow"}
    return _Hosted("wandb", run, hint, **options)


def _trackio(folder: StageFolder, resume_step: int | None, run: LoggedRun) -> Logger:
    # Into TRACKIO_DIR, or to the Space or server that TRACKIO_* variables name. A resumed run goes on under
    # its name; trackio keeps both rows of a step that is repeated after a kill.
    hint = 'unset TRACKIO_SPACE_ID to log on this machine, name another project ("trackio:PROJECT")'
    resume = "never" if resume_step is None else "allow"
    return _Hosted("trackio", run, hint, resume=resume, embed=False)


LOGGER_KINDS: dict[str, Callable[[StageFolder, int | None, LoggedRun], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}
