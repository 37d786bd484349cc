"""Runs trusted code on untrusted text in a forked process, locked down as far as the kernel allows.

The scorers of reasoning-gym take seconds to import, so they cannot have a new Python for each response. They
are code of a library, several of which evaluate an answer; answers that look like code are refused before.
So limits of time and memory are enough where Landlock or libseccomp is missing.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
import warnings
from collections.abc import Callable, Sequence

from jaxrl.rewards.sandbox import lockdown
from jaxrl.rewards.sandbox.native import READABLE
from jaxrl.rewards.sandbox.sandbox_interface import (
    CLOCK_FACTOR,
    MAX_OUTPUT_BYTES,
    SandboxLimits,
    SandboxUnavailable,
)
from jaxrl.rewards.sandbox.syscalls import syscall_filter


def run_forked(
    function: Callable[[], bytes], limits: SandboxLimits, readable: Sequence[str] = ()
) -> bytes | None:
    """Returns the bytes that `function` returns in a process of its own.

    Args:
      function: it sees all that this process has in memory.
      limits: when it is ended; memory counts beyond what this process has.
      readable: further files and folders that it may read.

    Returns:
      The first megabyte; nothing if it has failed; None if its time was over.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # JAX warns that its threads do not survive; here none are needed.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        _child(function, limits, [*READABLE, *readable], writing)
    os.close(writing)
    until = time.monotonic() + CLOCK_FACTOR * limits.seconds
    found = None
    try:
        found = _read(reading, until)
    finally:
        os.close(reading)
        if found is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    # The kernel kills it at its limit of processor time.
    killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    return None if killed else found


def _read(pipe: int, until: float) -> bytes | None:
    found = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if selector.select(left):
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    return bytes(found)
                found += piece[: MAX_OUTPUT_BYTES - len(found)]
    return None


def _child(
    function: Callable[[], bytes], limits: SandboxLimits, readable: list[str], writing: int
) -> None:
    """The forked process; it never returns."""
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for target, source in enumerate((nothing, nothing, nothing, os.dup(writing))):
            os.dup2(source, target)
        os.closerange(4, 65536)
        os.environ.clear()
        with open("/proc/self/statm", encoding="ascii") as numbers:
            held = int(numbers.read().split()[0]) * resource.getpagesize()
        lockdown.limit_resources(max(1, round(limits.seconds)), held + limits.memory_bytes)
        try:
            syscalls = syscall_filter()
        except SandboxUnavailable:
            syscalls = b""
        lockdown.restrict(readable, syscalls, landlock=lockdown.landlock_version() > 0)
        content = function()
        while content:
            content = content[os.write(3, content) :]
        os._exit(0)
    except BaseException:  # nothing of this process may go on as its parent
        os._exit(1)
