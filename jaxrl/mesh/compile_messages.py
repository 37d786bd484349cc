"""Says when a program takes long to compile, wherever that happens.

    compiling generate ...
    compiled generate in 34 s

Without it a command seems to hang. JAX reports the start and the end of every compilation to listeners; only
those that last longer than a few seconds are told.
"""

from __future__ import annotations

import threading
from typing import Any

import jax

# Programs that compile faster than this are not worth a line.
_SHORTEST_S = 3.0
# The event of JAX (jax/_src/dispatch.py). Its scalar comes at the start, its duration at the end.
_EVENT = "/jax/core/compile/backend_compile_duration"

_lock = threading.Lock()
# Timers of the compilations that are running, by thread.
_running: dict[int, threading.Timer] = {}
_announcing = False


def announce_compilations() -> None:
    """Prints a line when a compilation has taken some seconds, and one when it ends.

    Of several processes only the first one prints. Further calls change nothing.
    """
    global _announcing
    if _announcing or jax.process_index():
        return
    _announcing = True
    jax.monitoring.register_scalar_listener(_begin)
    jax.monitoring.register_event_duration_secs_listener(_end)


def _begin(event: str, value: float | int, **about: Any) -> None:
    del value
    if event != _EVENT:
        return
    text = f"compiling {_name(about)} ..."
    timer = threading.Timer(_SHORTEST_S, lambda: print(text, flush=True))
    timer.daemon = True
    with _lock:
        _running[threading.get_ident()] = timer
    timer.start()


def _end(event: str, duration_secs: float, **about: Any) -> None:
    if event != _EVENT:
        return
    with _lock:
        timer = _running.pop(threading.get_ident(), None)
    if timer is None:
        return
    timer.cancel()
    if duration_secs > _SHORTEST_S:
        print(f"compiled {_name(about)} in {duration_secs:.0f} s", flush=True)


def _name(about: dict[str, Any]) -> str:
    """The name of the program, without the prefix of JAX."""
    name = str(about.get("fun_name", "a program"))
    return name.removeprefix("jit(").removesuffix(")").removeprefix("jit_")
