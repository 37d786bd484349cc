"""The worker processes of a run's agents: started for its first sessions, and again if one dies or hangs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import secrets
import time

from jaxrl.process_pool import Interrupted, ProcessPool, WorkerFault
from jaxrl_agents.sessions import Sessions
from jaxrl_agents.worker import load_worker

# Agents mostly wait for answers and tools, so there may be more processes than cores.
_MOST_WORKERS = 8
# A worker that is silent for longer is ended.
_SILENT_S = 60.0
# Shorter silences are no sign: the trainer may be busy compiling.
_LEAST_SILENT_S = 5.0
# Time limit of a worker's call, which the pool wants: it lasts as long as the run.
_FOREVER_S = 1e9


class Runner:
    """Worker processes for one agent.

    Attributes:
      sessions: sessions that the workers run.
      silent_s: time after which a worker is ended that has not asked for sessions, because an agent keeps its
        event loop to itself. The other sessions of the worker should have time left then.
    """

    def __init__(self, path: str, sessions: Sessions, *, seconds: float):
        """Starts no process yet.

        Args:
          path: path of the agent.
          sessions: the sessions to run.
          seconds: time that a session has.
        """
        self.sessions = sessions
        self.silent_s = min(_SILENT_S, max(_LEAST_SILENT_S, seconds / 4))
        self._path = path
        self._size = max(2, min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
        self._pool = ProcessPool(
            (path,), load_worker, what="agent", patience_s=_FOREVER_S, workers=self._size
        )
        self._threads = concurrent.futures.ThreadPoolExecutor(self._size, "agents")
        self._heard: dict[str, float] = {}
        self._begun: list[concurrent.futures.Future[None]] = []

    def start(self, url: str) -> None:
        """Starts the workers, if they are not there yet. They ask `url` for sessions.

        Raises:
          UserError: the agent cannot be loaded.
        """
        if not self._begun:
            # The first one alone, so that an error of the user's file is reported once.
            self._pool.start()
            self._begun = [self._threads.submit(self._keep, url) for _ in range(self._size)]

    def heard(self, worker: str) -> int:
        """Notes that a worker has asked for something; returns how many sessions it may run.

        Raises:
          KeyError: no worker that runs has this key.
        """
        if worker not in self._heard:
            raise KeyError(worker)
        self._heard[worker] = time.monotonic()
        # An equal share of the open sessions, rounded up.
        return -(-self.sessions.num_open // self._size)

    def knows(self, worker: str) -> bool:
        """Whether a worker that runs has this key."""
        return worker in self._heard

    def check(self) -> None:
        """Raises UserError if a worker could not start again."""
        for worker in self._begun:
            if worker.done():
                worker.result()

    def close(self) -> None:
        self.sessions.close()
        self._pool.close()
        self._threads.shutdown()

    def _keep(self, url: str) -> None:
        """Keeps one worker process running until the sessions are closed."""
        while not self.sessions.closed:
            # A key for each process, so that the last request of a dead one takes no sessions.
            worker = secrets.token_urlsafe(18)
            # Importing what the agent needs may take longer than a silence.
            self._heard[worker] = math.inf

            def is_silent(worker: str = worker) -> bool:
                return time.monotonic() - self._heard[worker] > self.silent_s

            with contextlib.suppress(WorkerFault, Interrupted):
                self._pool.call(self._path, (url, worker), interrupted=is_silent)
            del self._heard[worker]
            self.sessions.lost(worker)
