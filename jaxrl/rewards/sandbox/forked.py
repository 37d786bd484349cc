"""Runs trusted code on untrusted text in a forked process, locked down as far as the kernel allows.

The scorers of reasoning-gym take seconds to import, so they cannot start a new Python per response. They are
library code, but several of them evaluate an answer; answers that look like code are refused first. So limits
of time and memory suffice if Landlock or libseccomp is missing.
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
from jaxrl.rewards.sandbox.native import (
    CLOCK_FACTOR,
    MAX_OUTPUT_BYTES,
    READABLE,
    SandboxLimits,
    SandboxUnavailable,
    syscall_filter,
)


def run_forked(
    function: Callable[[], bytes], limits: SandboxLimits, readable: Sequence[str] = ()
) -> bytes | None:
    """Runs `function` in a forked process and returns its bytes.

    Args:
      function: function to run; it sees all memory of this process.
      limits: limits of the process; memory counts on top of the use of this process.
      readable: additional files and folders that it may read.

    Returns:
      The first megabyte; empty if the function failed; None if it ran out of time.
    """
    try:
        # Before the fork: libseccomp writes a temporary file, and the child may write none.
        syscalls = syscall_filter()
    except SandboxUnavailable:
        syscalls = b""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # JAX warns that its threads do not survive a fork; the child needs none of them.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        _child(function, limits, [*READABLE, *readable], syscalls, writing)
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
    # The kernel kills it when it reaches its limit of processor time.
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
    function: Callable[[], bytes],
    limits: SandboxLimits,
    readable: list[str],
    syscalls: bytes,
    writing: int,
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
        lockdown.restrict(readable, syscalls, landlock=lockdown.landlock_version() > 0)
        content = function()
        while content:
            content = content[os.write(3, content) :]
        os._exit(0)
    except BaseException:  # the child must never continue with the parent's code
        os._exit(1)
