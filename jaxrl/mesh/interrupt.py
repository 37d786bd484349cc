"""Handles SIGTERM and Ctrl-C: finishes the current step, saves, and ends the process before a deadline.

Python runs signal handlers in the main thread, between two bytecode instructions. While that thread compiles
a program, which may take many minutes, no handler runs. So a second thread waits for the signal on a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from jaxrl.errors import EXIT_INTERRUPTED, EXIT_TRY_AGAIN
from jaxrl.mesh import hosts

# Fraction of the deadline that the current step may use; the rest is for the report.
_SHARE_OF_STEP = 0.6
_POLL_S = 0.1


class StopRequested(Exception):
    """Raised at a safe point after a signal asked the run to stop."""


class StopSignal:
    """Records that SIGTERM or SIGINT has arrived; a second SIGINT interrupts at once.

    Use it as a context manager in the main thread. With several processes a signal to one of them counts for
    all, from the next collective check.

    A second thread ends the process if the deadline after a signal passes, but never during a save.
    """

    def __init__(self, *, within_s: float = 20.0, end: Callable[[int], None] = os._exit):
        """Only stores the arguments; the context manager installs the handlers.

        Args:
          within_s: seconds from a signal to the end of the process.
          end: function that ends the process with an exit status; replaced in tests.
        """
        self._within_s = within_s
        self._end = end
        self._received = 0
        self._agreed = 0
        self._ends_at_once = False
        self._previous: dict[int, object] = {}
        self._last_acts: list[Callable[[float], str]] = []
        # Shared by the second thread and the main thread; guarded by the lock.
        self._lock = threading.Lock()
        self._num_saving = 0
        self._saved_at_s = -float("inf")
        self._has_given_up = False
        self._left = threading.Event()

    def __enter__(self) -> StopSignal:
        self._wakes, self._woken_by = os.pipe()
        # Python refuses a descriptor that could block a signal handler. A full pipe has woken the thread
        # already.
        os.set_blocking(self._woken_by, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._woken_by, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        self._thread = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        signal.set_wakeup_fd(self._previous_wakeup)
        self._left.set()
        # The second thread reads from the pipe.
        os.close(self._woken_by)
        self._thread.join()
        os.close(self._wakes)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        # A second Ctrl-C: the user does not want to wait for the step.
        again = self._received == signal.SIGINT and number == signal.SIGINT
        self._received = number
        if again or (self._ends_at_once and number == signal.SIGINT):
            raise KeyboardInterrupt
        if self._ends_at_once:
            print("stopped before training began: there is nothing to save", flush=True)
            # Raising makes the other processes see this one as failed.
            raise SystemExit(EXIT_TRY_AGAIN)

    @property
    def pending(self) -> bool:
        """Whether this process has received a signal, even if other processes do not know yet."""
        return self._received > 0

    def arrived(self) -> bool:
        """Whether any process has received a signal; equal on all processes. Collective."""
        # Signals arrive at any moment, so the agreed value is stored: later readers must see the same.
        self._agreed = hosts.largest(self._received)
        return self._agreed > 0

    def check(self) -> None:
        """Raises StopRequested if a signal has arrived. Call it where no work is half done. Collective."""
        if self.arrived():
            raise StopRequested

    @property
    def exit_status(self) -> int:
        """75 after SIGTERM, because schedulers read 0 as a completed job; 130 after Ctrl-C."""
        return _status_of(self._agreed)

    # What a signal may interrupt

    @contextlib.contextmanager
    def ends_at_once(self) -> Iterator[None]:
        """Inside, there is nothing to save: a signal ends the program as soon as Python handles it."""
        self._ends_at_once = True
        try:
            yield
        finally:
            self._ends_at_once = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, the deadline is suspended; the remaining time counts from the end of the block."""
        with self._lock:
            given_up = self._has_given_up
            self._num_saving += not given_up
        if given_up:
            # The process is about to end, and a save started now would be torn.
            threading.Event().wait()
        try:
            yield
        finally:
            with self._lock:
                self._num_saving -= 1
                self._saved_at_s = time.monotonic()

    @contextlib.contextmanager
    def last_act(self, act: Callable[[float], str]) -> Iterator[None]:
        """Registers what the second thread does before it ends the process; the newest entry runs first.

        Args:
          act: function that gets the remaining seconds and returns a line to print, or "".
        """
        self._last_acts.append(act)
        try:
            yield
        finally:
            self._last_acts.remove(act)

    # The thread

    def _watch(self) -> None:
        # Wait for a signal, or for the end of the context: the pipe is closed, and reads nothing.
        number = 0
        while number not in (signal.SIGTERM, signal.SIGINT):
            content = os.read(self._wakes, 1)
            if not content:
                return
            number = content[0]
        arrived_s = time.monotonic()
        while not self._left.wait(_POLL_S):
            with self._lock:
                # A save that ended after the signal starts the deadline anew.
                waited_s = time.monotonic() - max(arrived_s, self._saved_at_s)
                self._has_given_up = (
                    not self._num_saving and waited_s > _SHARE_OF_STEP * self._within_s
                )
            if self._has_given_up:
                seconds = (1 - _SHARE_OF_STEP) * self._within_s
                # On its own thread: an act may need a lock that the stuck main thread holds.
                acts = threading.Thread(target=self._act, args=(number, seconds), daemon=True)
                acts.start()
                acts.join(timeout=seconds)
                self._end(_status_of(number))
                return

    def _act(self, number: int, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        print(
            f"stopped by {signal.Signals(number).name} in the middle of a step, which did not end within "
            f"{_SHARE_OF_STEP * self._within_s:.0f} s (run.stop_within_s); the same command goes on from "
            "what was saved",
            file=sys.stderr,
            flush=True,
        )
        for act in reversed(self._last_acts):
            try:
                if line := act(until_s - time.monotonic()):
                    print(line, flush=True)
            except Exception as error:  # the process ends, whatever it is
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _status_of(number: int) -> int:
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TRY_AGAIN
