"""A trace of `jax.profiler`, read: what devices did in each phase, in seconds, operations and bytes.

Phases are annotations of the host, operations those of devices, on CPU those of its threads. What an
operation takes comes from the programs that this process has compiled (`operations.py`). On devices that
nobody has tried this with an operation may be named in another way, and is then of kind "other".
"""

from __future__ import annotations

import bisect
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend import backend

from jaxrl.planner.compiled.operations import Operation, operations_of

PHASE = "phase:"
_UNKNOWN = Operation("other", 0.0, 0.0)
# Lines of a TPU that tell of the same time once more.
_SUMMARIES = ("XLA Modules", "Steps", "XLA TraceMe", "Framework Ops", "Framework Name Scope")


@dataclasses.dataclass(frozen=True)
class Sum:
    """What some operations of all devices add up to: seconds, operations of products, bytes."""

    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Sum) -> Sum:
        return Sum(
            self.seconds + other.seconds, self.flops + other.flops, self.nbytes + other.nbytes
        )


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was done in a trace.

    Attributes:
      seconds: of the host in each phase, in order of their first begin.
      done: by (phase, kind of operation); the phase is "" between phases.
    """

    seconds: dict[str, float]
    done: dict[tuple[str, str], Sum]

    def phase(self, name: str) -> Sum:
        """All of a phase."""
        return sum((s for (phase, _), s in self.done.items() if phase == name), Sum())

    def kind(self, name: str) -> Sum:
        """All of a kind."""
        return sum((s for (_, kind), s in self.done.items() if kind == name), Sum())


def compiled_operations() -> dict[tuple[str, str], Operation]:
    """Operations of every program that this process holds, by (program, operation)."""
    found = {}
    for executable in backend.get_backend().live_executables():
        for module in executable.hlo_modules():
            for name, operation in operations_of(module.to_string()).items():
                found[module.name, name] = operation
    return found


def read_profile(folder: pathlib.Path, known: dict[tuple[str, str], Operation]) -> Profile:
    """The newest trace in a folder.

    Args:
      folder: that `jax.profiler.trace` was given.
      known: operations by (program, name).
    """
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    lines = [
        (plane.name, line)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
    ]
    spans = sorted(
        (event.start_ns, event.end_ns, event.name.removeprefix(PHASE))
        for _, line in lines
        for event in line.events
        if event.name.startswith(PHASE)
    )
    seconds: dict[str, float] = {}
    for start, end, name in spans:
        seconds[name] = seconds.get(name, 0.0) + (end - start) / 1e9
    done: dict[tuple[str, str], Sum] = {}
    for plane, line in lines:
        if line.name in _SUMMARIES:
            continue
        for start, own_ns, program, name in _own_times(_events(plane, line)):
            operation = known.get((program, name), _UNKNOWN)
            key = (_phase_at(spans, start), operation.kind)
            more = Sum(own_ns / 1e9, operation.flops, operation.nbytes)
            done[key] = done.get(key, Sum()) + more
    return Profile(seconds, done)


def _events(plane: str, line: Any) -> Iterator[tuple[float, float, str, str]]:
    """(start, end, program, operation) of each operation of a device."""
    for event in line.events:
        stats = {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module")}
        if "hlo_op" in stats or (plane.startswith("/device:") and line.name == "XLA Ops"):
            name = str(stats.get("hlo_op", event.name)).lstrip("%").split(" ")[0]
            yield event.start_ns, event.end_ns, str(stats.get("hlo_module", "")), name


def _own_times(
    events: Iterable[tuple[float, float, str, str]],
) -> Iterator[tuple[float, float, str, str]]:
    """(start, own time, program, operation): without the operations inside, such as those of a loop."""
    # Of each that is open: (end, start, program, operation), and the time of what is inside.
    open_: list[tuple[tuple[float, float, str, str], float]] = []

    def closed(until: float) -> Iterator[tuple[float, float, str, str]]:
        while open_ and open_[-1][0][0] <= until:
            (end, start, program, name), inside = open_.pop()
            if open_:
                parent, so_far = open_[-1]
                open_[-1] = (parent, so_far + end - start)
            yield start, max(0.0, end - start - inside), program, name

    for start, end, program, name in sorted(events, key=lambda e: (e[0], -e[1])):
        yield from closed(start)
        open_.append(((end, start, program, name), 0.0))
    yield from closed(float("inf"))


def _phase_at(spans: list[tuple[float, float, str]], time: float) -> str:
    """The innermost phase around a moment."""
    begun = spans[: bisect.bisect_right(spans, time, key=lambda span: span[0])]
    return next((name for _, end, name in reversed(begun) if time < end), "")
