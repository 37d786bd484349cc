"""SIGTERM and Ctrl-C: finish what must not be torn, save, leave."""

from __future__ import annotations

import signal
from types import FrameType

from jaxrl.mesh import hosts


class StopRequested(Exception):
    """Raised at a safe point after a signal asked the run to stop."""


class StopSignal:
    """Remembers that SIGTERM or SIGINT arrived; a second SIGINT interrupts at once.

    Use as a context manager in the main thread. Where several processes run one program a signal to any of
    them counts for all, from the next time they ask.
    """

    def __init__(self):
        self._received = 0
        self._agreed = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    @property
    def pending(self) -> bool:
        """This process has got a signal, whether or not the others know of it."""
        return self._received > 0

    def arrived(self) -> bool:
        """Whether any process has got a signal; every process gets the same answer. Collective."""
        # A signal may come at any moment: later readers must see what was agreed on, not what came since.
        self._agreed = hosts.largest(self._received)
        return self._agreed > 0

    def check(self) -> None:
        """Raises StopRequested if a signal has arrived. Call where nothing is half done. Collective."""
        if self.arrived():
            raise StopRequested

    @property
    def exit_status(self) -> int:
        """0 after SIGTERM, which is how schedulers end a healthy job; 130 after Ctrl-C."""
        return 130 if self._agreed == signal.SIGINT else 0
