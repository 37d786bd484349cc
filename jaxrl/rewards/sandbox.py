"""A cage for code that a model wrote: a process that is born locked down and ended when its time is over.

    run_caged(body)    fork -> session of its own, namespaces, then fork again
                       -> limits of time, memory, files and processes; empty environment, a folder of its own
                       -> body()

What the kernel is asked for, and what remains where it refuses:

    processor time, memory, size and number of files   rlimits: always
    the time limit          the whole session is killed; with a PID namespace nothing it started outlives it
    network, processes      namespaces of its own, if user namespaces are allowed
    files, others' memory   Landlock: nothing outside its folder can be written, made or removed, and nothing
                            be read but Python and the system's libraries

`protections()` says what holds here. Without Landlock such code can read what this user can.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

_NEW_USER, _NEW_NET, _NEW_PID, _NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_NO_NEW_PRIVILEGES = 38
# Landlock's system calls have these numbers on every architecture that it was made for.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
# Its first version: writing, removing and making files of every kind; reading files and folders.
_WRITES = sum(1 << n for n in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))
_READS = 1 << 2 | 1 << 3
_READABLE = (
    sys.prefix,
    sys.base_prefix,
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/dev/urandom",
)
_MAX_OUTPUT = 1 << 20
_REPORT = 3


@dataclasses.dataclass(frozen=True)
class Cage:
    """Limits of one process and of what it starts.

    Attributes:
      seconds: of processor time, and twice that of the clock.
      memory_bytes: of address space, beyond what the forked process has.
      file_bytes: the longest file it may write.
    """

    seconds: float = 4.0
    memory_bytes: int = 1 << 29
    file_bytes: int = 1 << 22


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a caged process.

    Attributes:
      status: its exit status; 128 + n after signal n; None if its time was over.
      output: what it printed, the first megabyte.
      report: what it wrote with the function that its body is given.
    """

    status: int | None
    output: bytes
    report: bytes


Report = Callable[[bytes], None]


def run_caged(body: Callable[[Report], None], cage: Cage, *, stdin: bytes = b"") -> Outcome:
    """Runs `body` in a cage; call it from a process with few threads, such as a grader's worker.

    Args:
      body: it may replace its process, with file descriptor 3 kept for reports.
      cage: the limits.
      stdin: what it can read.
    """
    folder = tempfile.mkdtemp(prefix="caged-")
    try:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            output, output_end = os.pipe()
            report, report_end = os.pipe()
            with warnings.catch_warnings():
                # JAX warns that its threads do not survive; here none are needed.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                _child(body, cage, folder, given.fileno(), output_end, report_end)
            os.close(output_end)
            os.close(report_end)
            status = None
            try:
                until = time.monotonic() + 2 * cage.seconds
                found = _read(output, report, until)
                status = None if found is None else _status(pid, until)
            finally:
                if status is None:
                    # Its session has the number of its first process, unless that has not come so far.
                    for end in (os.killpg, os.kill):
                        with contextlib.suppress(ProcessLookupError):
                            end(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                os.close(output)
                os.close(report)
        if found is None or status is None:
            return Outcome(None, b"", b"")
        return Outcome(status, *found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _status(pid: int, until: float) -> int | None:
    """How it has ended, 128 + n for signal n; None if it has not when the time is over."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            # What it left in its session goes with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if time.monotonic() > until:
            return None
        time.sleep(0.002)


def _read(output: int, report: int, until: float) -> tuple[bytes, bytes] | None:
    """All that comes out of both pipes; None if the time is over before they are closed."""
    found = {output: bytearray(), report: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return None
            for key, _ in selector.select(left):
                pipe = key.fd
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    selector.unregister(pipe)
                elif len(found[pipe]) < _MAX_OUTPUT:
                    found[pipe] += piece
    return bytes(found[output]), bytes(found[report])


def _child(
    body: Callable[[Report], None], cage: Cage, folder: str, given: int, output: int, report: int
) -> None:
    """The forked process; it never returns."""
    try:
        os.setsid()
        for target, source in enumerate(_moved_up(given, output, output, report)):
            os.dup2(source, target)
        os.closerange(_REPORT + 1, 65536)
        separated = _separate()
        first = os.fork() if separated else 0
        if first:
            os.closerange(0, _REPORT + 1)
            _, status = os.waitpid(first, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        os.chdir(folder)
        os.environ.clear()
        _lock_down(cage, folder)
        body(_write)
        os._exit(0)
    except BaseException:  # nothing of this process may go on as its parent
        os._exit(1)


def _moved_up(*descriptors: int) -> list[int]:
    """Copies out of the way of 0 to 3."""
    copies = []
    for descriptor in descriptors:
        while (copy := os.dup(descriptor)) <= _REPORT:
            pass
        copies.append(copy)
    return copies


def _write(content: bytes) -> None:
    while content:
        content = content[os.write(_REPORT, content) :]


def _separate() -> bool:
    """Takes namespaces of its own, as many as it can have; the next process is the first of them."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return any(
        unshare(flags) == 0
        for flags in (
            _NEW_USER | _NEW_NET | _NEW_PID | _NEW_IPC,
            _NEW_NET | _NEW_PID | _NEW_IPC,
            _NEW_USER | _NEW_NET,
        )
    )


def _lock_down(cage: Cage, folder: str) -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    with open("/proc/self/statm", encoding="ascii") as numbers:
        held = int(numbers.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_CPU, max(1, round(cage.seconds))),
        (resource.RLIMIT_AS, held + cage.memory_bytes),
        (resource.RLIMIT_FSIZE, cage.file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 64),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _confine_to(folder)


def _confine_to(folder: str) -> bool:
    """Other files are out of reach from here on; False where the kernel has no Landlock."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    handled = struct.pack("Q", _WRITES | _READS)
    rules = call(_CREATE_RULESET, ctypes.create_string_buffer(handled, 8), 8, 0)
    if rules < 0:
        return False
    allowances = {folder: _WRITES | _READS, "/dev/null": 1 << 1 | 1 << 2}
    allowances |= dict.fromkeys(_READABLE, _READS)
    try:
        for path, allowed in allowances.items():
            if not os.path.exists(path):
                continue
            if not os.path.isdir(path):
                allowed &= 1 << 1 | 1 << 2
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("<Qi", allowed, place), 12)
            call(_ADD_RULE, rules, 1, rule, 0)
            os.close(place)
        return call(_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


def protections() -> dict[str, bool]:
    """What the kernel grants a cage here, tried in one: no network, processes and files of its own."""
    probe = tempfile.mkdtemp(prefix="caged-probe-")
    pathlib.Path(probe, "file").touch()

    def body(report: Report) -> None:
        alone = all(name == "lo" for _, name in socket.if_nameindex())
        contained = True
        for mode in ("w", "r"):
            with contextlib.suppress(OSError), open(os.path.join(probe, "file"), mode):
                contained = False
        report(bytes([alone, os.getpid() <= 2, contained]))

    try:
        found = run_caged(body, Cage()).report
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    names = ("no_network", "own_processes", "own_files")
    return {name: len(found) > n and bool(found[n]) for n, name in enumerate(names)}
