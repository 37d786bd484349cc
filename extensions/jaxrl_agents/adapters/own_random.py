"""Random numbers of its own for each game that draws from the global generators of Python and NumPy.

After a seed such a game draws the same numbers again only if nothing else draws between its turns. The games
of a worker are played at the same time. So the generators get the state of a game back before each turn.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Held during a turn. Games of one process take turns, those of other workers do not wait.
_LOCK = threading.Lock()


class OwnRandom:
    """The state of the global generators as one game sees it. Any thread may call it."""

    def __init__(self, seed: int):
        """Args: seed, 0 to 2**32 - 1."""
        self._seed = seed
        self._state: tuple[Any, Any] | None = None

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function that draws from this state. The function must not wait for another game."""
        with _LOCK:
            before = _get()
            if self._state is None:
                random.seed(self._seed)
                if numpy_random := _numpy():
                    numpy_random.seed(self._seed)
            else:
                _set(self._state)
            try:
                return function(*args, **kwargs)
            finally:
                self._state = _get()
                # Whoever draws outside of games goes on as if no game had been played.
                _set(before)


def _numpy() -> Any:
    """numpy.random if anybody has imported it; else None."""
    return sys.modules.get("numpy.random")


def _get() -> tuple[Any, Any]:
    numpy_random = _numpy()
    return random.getstate(), numpy_random.get_state() if numpy_random else None


def _set(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        _numpy().set_state(state[1])
