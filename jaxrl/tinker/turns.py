"""Who may use the devices: the trainer's thread and the sampler's take turns.

Programs of several devices wait for each other on the way. Two threads that start such programs may start
them in another order on each device, and then all of them wait forever. On one device both may work at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Turns:
    """The turns of a trainer, which waits for the samples at work, and of a sampler, which is told when."""

    def __init__(self, *, exclusive: bool):
        """Args: whether only one may have a turn at a time."""
        self._exclusive = exclusive
        self._changed = threading.Condition()
        self._wants_training = False
        self._is_sampling = False
        # Called when sampling is possible again.
        self.on_free: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The trainer's turn; it waits until no sample is at work."""
        if not self._exclusive:
            yield
            return
        with self._changed:
            self._wants_training = True
            self._changed.wait_for(lambda: not self._is_sampling)
        try:
            yield
        finally:
            with self._changed:
                self._wants_training = False
            self.on_free()

    def may_sample(self) -> bool:
        """Begins or keeps the sampler's turn; False while the trainer has one or waits for it."""
        if not self._exclusive:
            return True
        with self._changed:
            if self._wants_training:
                return False
            self._is_sampling = True
            return True

    def end_sampling(self) -> None:
        """Ends the sampler's turn: none of its programs is at work."""
        with self._changed:
            self._is_sampling = False
            self._changed.notify_all()
