"""A process of its own for functions of a user, which can be ended where a function in this one cannot.

    Worker                             a second Python
      start: paths           ------->    imports the functions
      call:  path, argument  ------->    function(argument)
                             <-------    its result, or what went wrong; either within the time limit

The process starts once, from nothing: a fork would take along threads and devices in the midst of their work.
It is no sandbox. The functions are trusted code, which may nevertheless hang or crash, or be asked for more
than they can
do: `Limits` has the kernel end a call by its processor time, which a busy machine does not use up, and
refuse memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.errors import UserError

# How often a wait looks whether it is still wanted.
_LOOK_EVERY_S = 0.1

_PROGRAM = f"from {__name__} import main; main()"
_DONE, _REFUSED, _FAILED = "done", "refused", "failed"


class Interrupted(Exception):
    """The caller did not want to wait any longer."""


class WorkerFault(Exception):
    """A call has no result.

    Attributes:
      kind: "timeout", "died", "memory" or "raised"; after the first two the process is gone.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Limits:
    """What each call may take; 0 is no limit.

    Attributes:
      cpu_seconds: processor time.
      memory_bytes: address space beyond what the process has once its functions are imported.
    """

    cpu_seconds: float = 0.0
    memory_bytes: int = 0


class Worker:
    """A process that holds functions and calls them, one at a time. Close it after use."""

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[str], Callable[[Any], Any]],
        *,
        what: str,
        timeout_s: float,
        limits: Limits = Limits(),
    ):
        """Starts the process and has it import the functions.

        Args:
          paths: of the functions.
          load: makes a function of a path, in the process; it is itself one of a module.
          what: they are called in errors.
          timeout_s: of the imports, and of each call.
          limits: of each call, beside the time that passes.

        Raises:
          UserError: a function cannot be imported.
        """
        self._limits = limits
        self._what = what
        self.timeout_s = timeout_s
        self._pipe, theirs = multiprocessing.Pipe()
        # Held open by this process alone: however it dies, the other one reads the end of it and follows.
        end, self._lifeline = os.pipe()
        descriptors = (theirs.fileno(), end)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, descriptors)],
            pass_fds=descriptors,
            env=_environment(),
            # Ctrl-C in a terminal is for the run, which then ends this.
            start_new_session=True,
        )
        theirs.close()
        os.close(end)
        try:
            self._ask((tuple(paths), load, what, limits), "; ".join(paths), lambda: False)
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerFault):
                raise UserError(str(error)) from error
            raise

    def call(self, path: str, argument: Any, *, interrupted: Callable[[], bool]) -> Any:
        """What the function at `path` returns.

        Args:
          path: of the function, one of those that the worker was made with.
          argument: to it; it is pickled.
          interrupted: asked now and then; True ends the wait, and the process with it.

        Raises:
          UserError: the function did.
          WorkerFault: it raised another exception; or it ended its process or took too long, and is then
          closed. Interrupted: the wait was ended.
        """
        return self._ask((path, argument), path, interrupted)

    def close(self) -> None:
        """Ends the process, with all that it has started."""
        if not self._pipe.closed:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        os.close(self._lifeline)

    def _ask(self, message: Any, path: str, interrupted: Callable[[], bool]) -> Any:
        named = f"{self._what} {path!r}"
        try:
            self._pipe.send(message)
            until = time.monotonic() + self.timeout_s
            while not self._pipe.poll(_LOOK_EVERY_S):
                if interrupted():
                    self.close()
                    raise Interrupted
                if time.monotonic() > until:
                    self.close()
                    raise WorkerFault(
                        "timeout",
                        f"{named} has not answered within {self.timeout_s:g} s and was ended",
                    )
            outcome, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            # It closes its end a little before it is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LOOK_EVERY_S)
            status = self._process.returncode
            self._end()
            if status == -signal.SIGPROF:
                message = f"{named} has taken {self._limits.cpu_seconds:g} s of processor time and was ended"
                raise WorkerFault("timeout", message) from error
            raise WorkerFault(
                "died",
                f"{named} ended its process (status {status}); it must return instead: see what it printed",
            ) from error
        if outcome == _REFUSED:
            raise UserError(value)
        if outcome == _FAILED:
            raise WorkerFault(*value)
        return value

    @property
    def closed(self) -> bool:
        """The process is gone."""
        return self._pipe.closed


def _environment() -> dict[str, str]:
    """Of the process: it finds the same modules as this one, and leaves the accelerators alone."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    """The process: imports what it is given, then calls one function after the other."""
    paths, load, what, limits = pipe.recv()
    try:
        functions = {path: load(path) for path in paths}
    except UserError as error:
        pipe.send((_REFUSED, str(error)))
        return
    if limits.memory_bytes:
        _limit_memory(limits.memory_bytes)
    pipe.send((_DONE, None))
    while True:
        path, argument = pipe.recv()
        # Left at its default action it ends the process, whatever that is doing.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        reply = _called(functions[path], argument, f"{what} {path!r}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(reply)


def _limit_memory(further_bytes: int) -> None:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + further_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _called(function: Callable[[Any], Any], argument: Any, named: str) -> tuple[str, Any]:
    try:
        return _DONE, function(argument)
    except UserError as error:
        return _REFUSED, str(error)
    except MemoryError:
        return _FAILED, ("memory", f"{named} took more memory than it may")
    except Exception as error:  # a user's function may raise anything
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        return _FAILED, (
            "raised",
            f"{named} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}, the traceback "
            "is above); fix it",
        )


def _follow(descriptor: int) -> None:
    """Ends this process when the one that started it is gone, in whatever way."""
    os.read(descriptor, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serves the process that started this one, until that ends."""
    pipe, lifeline = map(int, sys.argv[1:])
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(multiprocessing.connection.Connection(pipe))


if __name__ == "__main__":
    main()
