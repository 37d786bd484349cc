"""`StepTimer`, the interface between a step and the loop around it: step number, timers, stop signals."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax


class StepTimer(Protocol):
    """The loop around a step."""

    step: int
    """The number of finished steps."""

    def phase(
        self, name: str, *, shown: str = "", may_stop: bool = False
    ) -> AbstractContextManager[None]:
        """Times the block as the metric timing_s/<name>, and shows it in the live view.

        Args:
          name: name of the timer.
          shown: text of the live view; "" means `name`.
          may_stop: whether a stop signal takes effect here, because no work is half done.
        """
        ...

    def when_done(self, result: Any) -> Any:
        """Returns `result`, after waiting for its arrays if all roles share their devices.

        Without the wait, the time of a phase would count for the next one. Roles on different pools must not
        wait, so that they work at the same time.
        """
        ...

    @property
    def stop_pending(self) -> bool:
        """Whether this process has a signal; long work should then end early and call `check_stop`."""
        ...

    def check_stop(self) -> None:
        """Ends the step if any process has received a signal. Collective."""
        ...


class NoTimer:
    """A timer that measures nothing and never stops, for code outside a loop."""

    stop_pending = False
    step = 0

    def check_stop(self) -> None:
        """Does nothing."""

    def phase(
        self, name: str, *, shown: str = "", may_stop: bool = False
    ) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def when_done(self, result: Any) -> Any:
        return jax.block_until_ready(result)
