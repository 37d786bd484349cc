"""The interface of all sandboxes, and their limits and results."""

from __future__ import annotations

import abc
import dataclasses

MAX_OUTPUT_BYTES = 1 << 20
"""Bytes kept of each output stream of a program. A program that prints more may be ended."""

CLOCK_FACTOR = 10
"""A program's limit of clock time, in multiples of its limit of processor time. It is wide because a right
program must not fail on a machine where ten others want each core."""


class SandboxUnavailable(Exception):
    """A sandbox does not work on this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program.

    Attributes:
      seconds: processor time, and as many seconds asleep; the clock may run `CLOCK_FACTOR` times as long.
      memory_bytes: address space of the program. Programs cannot start processes, so this is the sum.
    """

    seconds: float = 4.0
    memory_bytes: int = 1 << 29


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a program.

    Attributes:
      status: the exit status; 128 + n after signal n; None if it was ended, most often by its time.
      stdout: the first megabyte of its output.
      stderr: the first megabyte of its error output.
      seconds: processor time that the program has taken, and time that it has slept.
    """

    status: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class Sandbox(abc.ABC):
    """Runs Python programs that nobody trusts, one at a time.

    No sandbox but `none` lets a program write a file, open a socket or start a process.

    Attributes:
      name: the value of `reward.code_sandbox` that selects it.
      gaps: sentences about what it does not protect, for the log.
    """

    name: str
    gaps: tuple[str, ...]

    @abc.abstractmethod
    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> Outcome:
        """Runs a program as `__main__` in a process or instance of its own and waits for its end.

        Args:
          program: Python source.
          stdin: its whole standard input.
          limits: when it is ended.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Raises SandboxUnavailable if this machine lacks something that the sandbox needs."""
