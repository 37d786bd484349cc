"""The samples of some steps of a run, written beside training for people to look at.

A step's file appears whole. A run that goes on from a checkpoint drops the files of the steps that the
checkpoint does not hold, as it drops their rows of metrics, and writes them again. Nothing is learned from
these files: a disk that does not take one costs a warning, not the run.
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
    """Writes them, one at a time, on a thread of its own."""

    def __init__(self, folder: RolloutFolder, *, every: int):
        """Args: where they go, and steps between two; 0 writes none. Nothing is made yet."""
        self._folder = folder
        self._every = every
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether this step's samples are kept: the first one's, and every so many's."""
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def path(self, step: int) -> pathlib.Path:
        """Where a step's samples go."""
        return self._folder.step(step)

    def go_on_from(self, step: int) -> None:
        """Removes what later steps have left."""
        for later, path in self._folder.steps().items():
            if later > step:
                path.unlink(missing_ok=True)

    def write(self, step: int, make: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Starts writing a step's file; waits for the one before.

        Args:
          step: of the samples.
          make: makes the rows, on the thread that writes.
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
        """Waits until all is written."""
        self._wait()
        if self._writer is not None:
            self._writer.shutdown()
