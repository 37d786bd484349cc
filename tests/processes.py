"""Processes that a test starts and that never outlive it."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def started(commands: Sequence[Sequence], **options) -> Iterator[list[subprocess.Popen]]:
    """One process for each command, with pipes of text; what still runs at the end is killed.

    Args:
      options: for `subprocess.Popen`, other streams than pipes too.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, **options)
            # In the opposite order: killed, then waited for, and its pipes closed.
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_for(condition):
    """What the condition gives, once that is something."""
    until = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < until, "did not come"
        time.sleep(0.05)
    return found
