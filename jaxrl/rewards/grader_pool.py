"""Worker processes that graders ask: several, killable, started once and only when they are needed.

    submit(path, argument) -> queue -> one thread for each `worker.Worker`, which holds the functions ->
    Future

A call that takes too long or brings its process down costs its own result, a `WorkerFault`, and nothing
else: the process is replaced, and the calls behind it go to the new one.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.rewards.worker import Limits, Worker, WorkerFault

# A call that sleeps takes no processor time; it has this many times its limit.
_PATIENCE = 6.0
# Of the imports: SymPy and JAX on a busy machine.
_START_S = 120.0
_MEMORY_BYTES = 1 << 30

_Job = tuple[str, Any, float, "concurrent.futures.Future[Any]"]


class GraderPool:
    """Processes for functions of one argument. Close it after use.

    Attributes:
      cpu_seconds: processor time that a call may take.
    """

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[str], Callable[[Any], Any]],
        *,
        workers: int,
        cpu_seconds: float,
        memory_bytes: int = _MEMORY_BYTES,
    ):
        """Starts nothing yet.

        Args:
          paths: of the functions.
          load: makes a function of a path, in the process; it is itself one of a module.
          workers: processes; 0 takes one for each core, and at most 8.
          cpu_seconds: processor time of a call.
          memory_bytes: that a call may take.
        """
        self._paths, self._load = tuple(paths), load
        self.cpu_seconds = cpu_seconds
        self._limits = Limits(cpu_seconds, memory_bytes)
        self._size = workers or min(8, len(os.sched_getaffinity(0)))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self, path: str, argument: Any, *, patience_s: float = 0.0
    ) -> concurrent.futures.Future[Any]:
        """Asks for what the function at `path` returns; the future may raise WorkerFault or UserError.

        Args:
          path: of the function.
          argument: to it; it is pickled.
          patience_s: clock time that the call may take; 0 is a multiple of its processor time.
        """
        patience_s = patience_s or self._limits.cpu_seconds * _PATIENCE
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            assert not self._closed, "it is closed"
            self._jobs.put((path, argument, patience_s, future))
            if len(self._threads) < self._size:
                thread = threading.Thread(target=self._serve, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Ends the processes; what was asked and is not answered yet fails."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _serve(self) -> None:
        """The life of one worker."""
        worker: Worker | None = None
        while (job := self._jobs.get()) is not None:
            path, argument, patience_s, future = job
            try:
                if self._closed:
                    raise WorkerFault("died", "grading was ended")
                if worker is None or worker.closed:
                    worker = self._started()
                worker.timeout_s = patience_s
                future.set_result(worker.call(path, argument, interrupted=lambda: self._closed))
            except BaseException as error:  # it is the caller's to see
                future.set_exception(error)
        if worker is not None:
            worker.close()

    def _started(self) -> Worker:
        return Worker(
            self._paths, self._load, what="grader", timeout_s=_START_S, limits=self._limits
        )
