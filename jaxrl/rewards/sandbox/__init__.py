"""Sandboxes for code that a model wrote; `choose_sandbox` picks one that works on this machine.

    bubblewrap    namespaces by `bwrap`, and a seccomp filter     best; needs the program and user namespaces
    webassembly   a CPython in wasmtime                           extra `sandbox`; slower, without threads
    landlock      Landlock and a seccomp filter                   Linux 6.2; outside paths are visible
    none          limits of time and memory                       only if asked for

In the first three a program cannot start another process. So its memory limit bounds its total use, and
nothing remains after it is killed. It can write no file, so it cannot fill a disk.
"""

from jaxrl.rewards.sandbox.choose import (
    SANDBOXES,
    choose_sandbox,
    sandbox_called,
)
from jaxrl.rewards.sandbox.forked import run_forked
from jaxrl.rewards.sandbox.sandbox_interface import (
    CLOCK_FACTOR,
    Outcome,
    Sandbox,
    SandboxLimits,
    SandboxUnavailable,
)

__all__ = [
    "CLOCK_FACTOR",
    "SANDBOXES",
    "Outcome",
    "Sandbox",
    "SandboxLimits",
    "SandboxUnavailable",
    "choose_sandbox",
    "run_forked",
    "sandbox_called",
]
