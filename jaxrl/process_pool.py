"""Processes that call functions which may hang or crash: graders, reward functions, chat templates.

    ProcessPool                                   a worker: a second Python
      first question: names, load      ------->     functions = {name: load(name)}
      name, argument                   ------->     functions[name](argument)
                                       <-------     its result, or what went wrong

A call that fails costs its own result, a `WorkerFault`. The pool replaces the process and goes on. It looks
ten times a second at the clock and at the process's processor time, which a busy machine does not use up.
A timer of the kernel would need SIGPROF, which libtpu makes its process ignore, and a worker inherits that.
The kernel refuses allocations beyond a call's memory. This is no sandbox: the functions are trusted code.

A worker is a new interpreter. A fork would copy locks that other threads hold. `multiprocessing`'s "spawn"
would run the user's script again, which fails unless the script guards `__main__`.

Why no library? Measured with four workers, November 2026:

    pebble 5.2       Starts all four for the first question. If an idle worker is killed, it refuses all
                     further questions. If a worker is killed while it answers, the shared lock is lost: no
                     question was answered within 100 s. What a worker has started outlives it.
    billiard 4.3     If an idle worker is killed, no question is answered within 30 s. What a worker has
                     started outlives it.
    loky 3.7         Knows no time limits. If one worker is killed, it refuses all further questions.
    deadpool 2026.7  Does not end a regular expression at its time limit: its timer is a thread of the worker,
                     and the expression does not let it run. A call takes 6 ms.

Here each worker has a socket of its own, so that none can disturb another. A call takes .05 ms, and a worker
starts in 45 ms, plus what its functions import. A function can reach the socket of its worker and write to
it. So an answer begins with the mark of its question, and what begins otherwise ends the worker.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import pickle
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.errors import UserError

_LOOK_EVERY_S = 0.1
# The most that one look adds to a call's time: a machine that stood still, a laptop asleep, uses up no time.
_MOST_COUNTED_S = 1.0
# A process that has closed its socket exits a little later.
_LAST_MOMENTS_S = 1.0
_PROGRAM = f"from {__name__} import main; main()"
_DONE, _REFUSED, _FAILED = "done", "refused", "failed"
# Begins an answer: the mark of its question, and the number of bytes that follow.
_HEADER = struct.Struct("8sQ")


class Interrupted(Exception):
    """The caller has stopped waiting for the result."""


class WorkerFault(Exception):
    """A call has failed without a result.

    Attributes:
      kind: "timeout", "died", "memory" or "raised". After the first two the process is gone.
      reason: verb phrase, such as "took more memory than it may".
    """

    def __init__(self, kind: str, subject: str, reason: str):
        super().__init__(f"{subject} {reason}")
        self.kind = kind
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class _Functions:
    """Settings of a worker; see `ProcessPool`."""

    names: tuple[str, ...]
    load: Callable[[str], Callable[[Any], Any]]
    what: str
    cpu_seconds: float
    memory_bytes: int


class ProcessPool:
    """Processes for functions of one argument, started when they are needed. May be used from any thread.

    Close it after use. A program that ends without that waits for the calls that it has submitted. However it
    ends, the processes end with it, and all that they have started.

    Args:
      names: Names of the functions.
      load: Makes the function of a name, in the process. It is pickled, so it is a function of a module.
      what: A function's kind, for messages: "grader".
      patience_s: Clock time of a call.
      start_s: Clock time in which a process has to load its functions.
      workers: The most processes.
      cpu_seconds: Processor time of a call; 0 is no limit.
      memory_bytes: Address space of a call beyond what the loaded functions hold; 0 is no limit.

    Attributes:
      cpu_seconds: See above.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[str], Callable[[Any], Any]],
        *,
        what: str,
        patience_s: float,
        start_s: float = 120.0,
        workers: int = 1,
        cpu_seconds: float = 0.0,
        memory_bytes: int = 0,
    ):
        self.cpu_seconds = cpu_seconds
        self._functions = _Functions(tuple(names), load, what, cpu_seconds, memory_bytes)
        self._patience_s = patience_s
        self._start_s = start_s
        self._size = workers
        self._free = threading.Semaphore(workers)
        self._idle: collections.deque[_Worker] = collections.deque()
        # The executor starts a thread only if none is idle, so few calls start few processes.
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix=what)
        self._closed = False

    def start(self) -> None:
        """Starts one process now.

        Raises:
          UserError: the functions cannot be loaded.
        """
        with self._free:
            self._idle.append(_Worker(self._functions, self._start_s, lambda: self._closed))

    def call(
        self,
        name: str,
        argument: Any,
        *,
        patience_s: float = 0.0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Any:
        """The result of a function, as soon as a process is free for it.

        Args:
          name: Name of the function.
          argument: Its argument, which is pickled.
          patience_s: Clock time of this call; 0 takes the pool's.
          interrupted: Asked every tenth of a second. True ends the wait and the process.

        Raises:
          UserError: The function raised one, or the functions cannot be loaded.
          WorkerFault: The call has no result, or the pool was closed before its turn came.
          Interrupted: `interrupted` returned True, or the pool was closed during the call.
        """
        with self._free:
            if self._closed:
                raise WorkerFault(
                    "died", self._functions.what, "was not asked: the pool was closed"
                )

            def unwanted() -> bool:
                return self._closed or interrupted()

            worker = None
            with contextlib.suppress(IndexError):
                worker = self._idle.pop()
            if worker is None or worker.ended:
                worker = _Worker(self._functions, self._start_s, unwanted)
            try:
                subject = f"{self._functions.what} {name!r}"
                patience_s = patience_s or self._patience_s
                return worker.ask((name, argument), subject, patience_s, unwanted)
            finally:
                if not worker.ended:
                    self._idle.append(worker)

    def submit(
        self, name: str, argument: Any, *, patience_s: float = 0.0
    ) -> concurrent.futures.Future[Any]:
        """Runs a call on a thread; see `call`."""
        return self._threads.submit(self.call, name, argument, patience_s=patience_s)

    def close(self) -> None:
        """Ends the processes. Calls without an answer fail."""
        self._closed = True
        self._threads.shutdown()
        with contextlib.ExitStack() as all_free:
            # With all permits taken no call is at work, and none can start a process.
            for _ in range(self._size):
                all_free.enter_context(self._free)
            while self._idle:
                self._idle.pop().end()


class _Worker:
    """A process that holds functions and calls them, one at a time."""

    def __init__(self, functions: _Functions, start_s: float, interrupted: Callable[[], bool]):
        """Starts the process and loads the functions; raises UserError if they cannot be loaded."""
        # Loading has a limit of clock time alone.
        self._cpu_seconds = 0.0
        self._socket, theirs = socket.socketpair()
        # Only this process holds the other end open. However it dies, the kernel then ends the worker.
        lifeline, self._lifeline = os.pipe()
        descriptors = (theirs.fileno(), lifeline)
        modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            # -P: a worker finds modules in the working directory only if this process does, too.
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, descriptors)],
            pass_fds=descriptors,
            # It finds the modules of this process, and no accelerators.
            env={**os.environ, "PYTHONPATH": modules, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            # Own group: Ctrl-C in a terminal goes to the run, which then ends the worker and its children.
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline)
        subject = f"{functions.what} {'; '.join(functions.names)!r}"
        try:
            self.ask(functions, subject, start_s, interrupted)
        except BaseException as error:
            self.end()
            if isinstance(error, WorkerFault):
                raise UserError(str(error)) from error
            raise
        self._cpu_seconds = functions.cpu_seconds

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        if not self._closed and self._process.poll() is not None:
            self.end()
        return self._closed

    def end(self) -> None:
        """Ends the process and everything it has started."""
        if self._closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        os.close(self._lifeline)

    @property
    def _closed(self) -> bool:
        return self._socket.fileno() < 0

    def ask(
        self, question: Any, subject: str, patience_s: float, interrupted: Callable[[], bool]
    ) -> Any:
        """The answer to a question. Ends the process on a timeout; raises as `ProcessPool.call`."""
        # Random, so that what a function has written to the socket does not begin with it.
        mark = secrets.token_bytes(8)
        # Since the question, in seconds: the clock, and the process's processor time.
        waited = worked = 0.0
        before = self._clocks()

        def go_on() -> None:
            nonlocal waited, worked, before
            if interrupted():
                raise Interrupted
            now = self._clocks()
            passed, taken = (min(b - a, _MOST_COUNTED_S) for a, b in zip(before, now, strict=True))
            waited, worked, before = waited + passed, worked + taken, now
            if 0 < self._cpu_seconds < worked:
                reason = f"has taken {self._cpu_seconds:g} s of processor time and was ended"
                raise WorkerFault("timeout", subject, reason)
            if waited > patience_s:
                reason = f"has not answered within {patience_s:g} s and was ended"
                raise WorkerFault("timeout", subject, reason)

        try:
            # A worker that hangs may leave the socket full.
            self._socket.settimeout(patience_s)
            try:
                self._socket.sendall(pickle.dumps((mark, question)))
            except TimeoutError:  # a process that does not read does not answer either
                waited = patience_s
            self._socket.settimeout(_LOOK_EVERY_S)
            begins_with, size = _HEADER.unpack(self._read(_HEADER.size, go_on))
            if begins_with != mark:
                reason = (
                    "has written to the socket that its result is sent through, and was ended; it may write "
                    "only to files that it has opened"
                )
                raise WorkerFault("died", subject, reason)
            answer = self._read(size, go_on)
        except (EOFError, OSError) as error:
            raise self._death(subject) from error
        except BaseException:
            # A late answer must not be taken for the answer to the next question.
            self.end()
            raise
        try:
            outcome, value = pickle.loads(answer)
        except Exception as error:  # unpickling may run code of any module
            reason = f"returned something that cannot be read here ({error}); return plain values"
            raise WorkerFault("raised", subject, reason) from error
        if outcome == _REFUSED:
            raise UserError(value)
        if outcome == _FAILED:
            kind, reason = value
            raise WorkerFault(kind, subject, reason)
        return value

    def _read(self, size: int, go_on: Callable[[], None]) -> bytearray:
        """The next bytes; raises EOFError if the process has ended, or what `go_on` raises meanwhile."""
        found = bytearray()
        while len(found) < size:
            # Asked before the read, which then still gets what the process has written before its end.
            ended = self._process.poll() is not None
            try:
                piece = self._socket.recv(min(size - len(found), 1 << 20))
            except TimeoutError:
                # A child forked by the function may hold the other end open, so no EOF arrives.
                if ended:
                    raise EOFError from None
                go_on()
                continue
            if not piece:
                raise EOFError
            found += piece
        return found

    def _clocks(self) -> tuple[float, float]:
        """The clock, and the processor time of the process, in seconds; OSError if the process is gone."""
        # The kernel's number of another process's clock (clock_getcpuclockid of the C library).
        return time.monotonic(), time.clock_gettime((~self._process.pid << 3) | 2)

    def _death(self, subject: str) -> WorkerFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_LAST_MOMENTS_S)
        self.end()
        status = self._process.returncode
        reason = f"ended its process (status {status}); it must return instead: see what it printed"
        return WorkerFault("died", subject, reason)


def main() -> None:
    """The program of a worker: answers questions until the process that started it ends."""
    channel, lifeline = map(int, sys.argv[1:])
    # Programs started by functions must not inherit these.
    os.set_inheritable(channel, False)
    os.set_inheritable(lifeline, False)
    # The kernel kills this process group when the other end of the lifeline is closed. Not a thread that
    # waits: an endless regular expression never releases the interpreter lock.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The other end may already be closed.
    poll = select.poll()
    poll.register(lifeline)
    if poll.poll(0):
        os.killpg(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(socket.socket(fileno=channel))


def _serve(channel: socket.socket) -> None:
    """Loads the functions, then answers calls one by one."""
    questions = channel.makefile("rb")

    def send(mark: bytes, answer: bytes) -> None:
        channel.sendall(_HEADER.pack(mark, len(answer)) + answer)

    mark, functions = pickle.load(questions)
    try:
        loaded = {name: functions.load(name) for name in functions.names}
    except UserError as error:
        send(mark, pickle.dumps((_REFUSED, str(error))))
        return
    if functions.memory_bytes:
        # Beyond what is held now: some functions import much more than others.
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + functions.memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    send(mark, pickle.dumps((_DONE, None)))
    while True:
        mark, (name, argument) = pickle.load(questions)
        send(mark, _answer(loaded[name], argument))


def _answer(function: Callable[[Any], Any], argument: Any) -> bytes:
    """The result, or what went wrong, pickled."""
    try:
        return pickle.dumps((_DONE, function(argument)))
    except UserError as error:
        return pickle.dumps((_REFUSED, str(error)))
    except MemoryError:
        return pickle.dumps((_FAILED, ("memory", "took more memory than it may")))
    except Exception as error:  # a user's function may raise anything
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = (
            f"raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}, the traceback is "
            "above); fix it"
        )
        return pickle.dumps((_FAILED, ("raised", reason)))
