"""What the parts of a step ask of the loop around them: which step this is, and where its time goes."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax


class StepTimer(Protocol):
    """The loop, as seen from within a step."""

    @property
    def step(self) -> int:
        """Finished steps."""
        ...

    def phase(
        self, name: str, *, shown: str = "", may_stop: bool = False
    ) -> AbstractContextManager[None]:
        """Times what happens within as timing_s/<name>, and shows it to whoever watches.

        Args:
          name: of the timer.
          shown: what the live view says; `name` by default.
          may_stop: nothing is half done before this phase, so a stop signal takes effect here.
        """
        ...

    def when_done(self, result: Any) -> Any:
        """The result, once its arrays are there if all roles share their devices: timers tell phases apart.

        Roles of different pools work side by side only if nothing waits.
        """
        ...

    @property
    def stop_pending(self) -> bool:
        """A signal has come to this process; what takes long should end early and call `check_stop`."""
        ...

    def check_stop(self) -> None:
        """Ends the step if a signal has come to any process, which all of them have to ask. Collective."""
        ...


class NoTimer:
    """A timer that measures nothing and never stops, for parts of a step on their own."""

    stop_pending = False

    def __init__(self, step: int = 0):
        self.step = step

    def check_stop(self) -> None:
        """Does nothing."""

    def phase(
        self, name: str, *, shown: str = "", may_stop: bool = False
    ) -> AbstractContextManager[None]:
        """Does nothing."""
        del name, shown, may_stop
        return contextlib.nullcontext()

    def when_done(self, result: Any) -> Any:
        """Waits."""
        return jax.block_until_ready(result)
