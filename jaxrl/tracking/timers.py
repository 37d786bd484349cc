"""Measures the seconds of each phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Timers:
    """Accumulates seconds by phase.

        with timers("gen"):
            completions = actor.generate(prompts)
        metrics |= timers.take()  # {"timing_s/gen": ...}

    JAX returns before the device has finished. The time of a computation counts for the phase that first
    reads its result.
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
        """Returns the accumulated seconds as {"timing_s/<name>": seconds} and resets them."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
