"""Writes the samples of some steps of a run to files, in the background. People read them; training does not.

A file is written atomically. A resumed run deletes the files of steps after its checkpoint, like their metric
rows, and writes them again. If a file cannot be written, the run logs a warning and continues.
"""

from __future__ import annotations

import concurrent.futures
import logging
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.run_folder import RolloutFolder
from jaxrl.tracking.sample_rows import to_lines

logger = logging.getLogger(__name__)


class RolloutFiles:
    """Writes the sample files of a run, one at a time, in a background thread."""

    def __init__(self, folder: RolloutFolder, *, every: int):
        """Creates no file or folder.

        Args:
          folder: folder of the files.
          every: number of steps between files; 0 writes none.
        """
        self._folder = folder
        self._every = every
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the samples of this step are written: those of step 1 and of every `every`-th step."""
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def path(self, step: int) -> pathlib.Path:
        """The path of a step's file."""
        return self._folder.step(step)

    def remove_after(self, step: int) -> None:
        """Deletes the files of later steps."""
        for later, path in self._folder.steps().items():
            if later > step:
                path.unlink(missing_ok=True)

    def write(self, step: int, make: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Starts writing the file of a step, after waiting for the previous file.

        Args:
          step: number of the step.
          make: returns the rows; it is called in the background thread.
        """
        self._wait()
        if self._writer is None:
            self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._writing = self._writer.submit(self._write, step, make)

    def _write(self, step: int, make: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder.step(step), to_lines(make()))

    def _wait(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, UserError) as error:
            logger.warning(
                "samples could not be written to %s (%s); training goes on without them",
                self._folder.path,
                getattr(error, "strerror", None) or error,
            )

    def close(self) -> None:
        """Waits for the last file and ends the thread."""
        self._wait()
        if self._writer is not None:
            self._writer.shutdown()
