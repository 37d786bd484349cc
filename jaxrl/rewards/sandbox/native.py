"""Sandboxes that run the Python of this process again, locked down by the kernel.

run(program) -> a new process, started by the subclass's command (bubblewrap, or Python itself)
                lockdown.main: limits -> Landlock -> seccomp filter -> program
             <- its two outputs and its status; or it is killed when its clock is over
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from jaxrl.rewards.sandbox import lockdown
from jaxrl.rewards.sandbox.sandbox_interface import (
    CLOCK_FACTOR,
    MAX_OUTPUT_BYTES,
    Outcome,
    Sandbox,
    SandboxLimits,
    SandboxUnavailable,
)
from jaxrl.rewards.sandbox.syscalls import syscall_filter

READABLE = (
    sys.prefix,
    sys.base_prefix,
    # An interpreter in a virtual environment is a link to another one, or to a chain of links.
    os.path.dirname(os.path.realpath(sys.executable)),
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/dev/urandom",
)
"""Files and folders that a Python and its packages need; programs can read them."""

# One thread per library, because stacks count as address space and other programs need the cores.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# The kernel's memory of a thread (26 KB) is not in the address space of its process, and 60,000 threads start
# in a second. RLIMIT_NPROC counts all processes of a user and does not hold for root, so they are watched.
_MAX_THREADS = 128
_LOOK_EVERY_S = 0.05
# The test program takes milliseconds. The wide limit holds on a machine with a load of a hundred.
CHECK_LIMITS = SandboxLimits(seconds=10.0)


class NativeSandbox(Sandbox):
    """Base class of the sandboxes that start a Python process.

    Attributes:
      landlock: whether Landlock limits files.
      seccomp: whether a filter limits system calls.
      direct: whether Python is a child of this process, and not of a program that ends Python with itself.
    """

    landlock = False
    seccomp = True
    direct = True

    def command(self, python: Sequence[str]) -> list[str]:
        """The command line that starts Python with these arguments; Python itself by default."""
        return [sys.executable, *python]

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> Outcome:
        """Runs a program; see `Sandbox.run`."""
        options = {
            "parent": os.getpid() if self.direct else 0,
            "seconds": max(1, math.ceil(limits.seconds)),
            "memory_bytes": limits.memory_bytes,
            "readable": READABLE,
            "landlock": self.landlock,
            "syscall_filter": base64.b64encode(syscall_filter() if self.seccomp else b"").decode(),
        }
        with _file_of(stdin) as given, _file_of(program.encode(errors="replace")) as source:
            options["source"] = source.fileno()
            python = ["-I", "-B", "-c", _lockdown_source(), json.dumps(options)]
            return _supervised(self.command(python), given, source, limits)

    def check(self) -> None:
        """Raises SandboxUnavailable if a small program does not run."""
        try:
            outcome = self.run("print('ready')", b"", CHECK_LIMITS)
        except OSError as error:
            raise SandboxUnavailable(str(error)) from error
        if outcome.stdout != b"ready\n":
            lines = outcome.stderr.decode(errors="replace").strip().splitlines()
            raise SandboxUnavailable(lines[-1] if lines else f"status {outcome.status}")


class Unconfined(NativeSandbox):
    """A process with limits; `reward.code_sandbox="none"` selects it."""

    name = "none"
    gaps = (
        "programs can do all that this user can: read and change files, use the network, start processes "
        "with limits of their own",
    )
    seccomp = False


@functools.cache
def _lockdown_source() -> str:
    return inspect.getsource(lockdown) + "\n\nmain()\n"


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[BinaryIO]:
    """An unnamed file with this content, open for reading only."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with open(file.name, "rb") as reading:
            yield reading


def _supervised(
    command: list[str], given: BinaryIO, source: BinaryIO, limits: SandboxLimits
) -> Outcome:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        command,
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[source.fileno()],
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )
    with process:
        try:
            found, status, asleep_s = _followed(process, limits.seconds)
        finally:
            # Without a sandbox it may have started others, which are in its session unless they left it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if status is not None and status < 0:
        status = 128 - status
    return Outcome(status, *found, seconds + asleep_s)


def _followed(
    process: subprocess.Popen[bytes], seconds: float
) -> tuple[tuple[bytes, bytes], int | None, float]:
    """Returns both outputs of a process, its status, and the seconds that it has slept.

    The status is None if the process must be killed: its time is over, it sleeps too long, it has too many
    threads, or it prints so much that reading takes too long.
    """
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    output, errors = process.stdout.fileno(), process.stderr.fileno()
    found = {output: bytearray(), errors: bytearray()}
    looked = time.monotonic()
    until, asleep_s = looked + CLOCK_FACTOR * seconds, 0.0
    with selectors.DefaultSelector() as selector:
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        status = None
        while selector.get_map() or (status := process.poll()) is None:
            # With both pipes closed a process usually ends within a millisecond.
            events = selector.select(_LOOK_EVERY_S if selector.get_map() else 0.002)
            states = _thread_states(process.pid)
            looked, before = time.monotonic(), looked
            if not events and not {"R", "D"}.intersection(states):
                # This process may itself have waited for a core meanwhile.
                asleep_s += min(looked - before, 2 * _LOOK_EVERY_S)
            if (
                looked > until
                or asleep_s > seconds
                or max(map(len, found.values())) > MAX_OUTPUT_BYTES
                or len(states) > _MAX_THREADS
            ):
                break
            for key, _ in events:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                found[key.fd] += piece
    kept = [bytes(found[pipe][:MAX_OUTPUT_BYTES]) for pipe in (output, errors)]
    return (kept[0], kept[1]), status, asleep_s


def _thread_states(pid: int) -> list[str]:
    """The kernel's letter for each thread of a process and its children (bwrap has one)."""
    threads: list[str] = []
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            pids = [str(pid), *file.read().split()]
        threads = [
            f"/proc/{each}/task/{n}" for each in pids for n in os.listdir(f"/proc/{each}/task")
        ]
    states = []
    for thread in threads[: _MAX_THREADS + 1]:
        with contextlib.suppress(OSError), open(f"{thread}/stat", "rb") as file:
            # The second field, the name in brackets, may contain blanks.
            states.append(file.read().rpartition(b")")[2].split()[0].decode())
    return states
