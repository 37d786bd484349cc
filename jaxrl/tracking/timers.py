"""Seconds by phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Timers:
    """Accumulates seconds by phase.

        with timers("gen"):
            completions = actor.generate(prompts)
        metrics |= timers.take()  # {"timing_s/gen": ...}

    JAX returns before the device is done: a phase whose values nobody reads inside its block is
    charged to the phase that reads them.
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time spent in the block to `name`, also when the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The accumulated seconds as {"timing_s/<name>": seconds}, and starts again from none."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
