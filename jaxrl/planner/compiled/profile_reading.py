"""Reads a trace of `jax.profiler`: seconds, operations and bytes of the devices in each phase.

Phases are annotations of the host. Operations are events of the devices, on CPU of its threads. Their FLOPs
and bytes come from the programs that this process has compiled (`operations.py`). Untested kinds of device
may name operations differently; these then count as "other".
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
# Lines of a TPU trace that repeat the time of other lines.
_SUMMARIES = ("XLA Modules", "Steps", "XLA TraceMe", "Framework Ops", "Framework Name Scope")


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over operations of all devices: seconds, FLOPs of matmuls, bytes."""

    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Sum) -> Sum:
        return Sum(
            self.seconds + other.seconds, self.flops + other.flops, self.nbytes + other.nbytes
        )


@dataclasses.dataclass(frozen=True)
class Profile:
    """The contents of a trace.

    Attributes:
      seconds: host seconds of each phase, in the order in which they first begin.
      done: sums by (phase, kind of operation); the phase is "" between phases.
    """

    seconds: dict[str, float]
    done: dict[tuple[str, str], Sum]

    def phase(self, name: str) -> Sum:
        """The sum over a phase."""
        return sum((s for (phase, _), s in self.done.items() if phase == name), Sum())

    def kind(self, name: str) -> Sum:
        """The sum over a kind of operation."""
        return sum((s for (_, kind), s in self.done.items() if kind == name), Sum())


def compiled_operations() -> dict[tuple[str, str], Operation]:
    """Operations of every compiled program of this process, by (program, operation)."""
    found = {}
    for executable in backend.get_backend().live_executables():
        for module in executable.hlo_modules():
            for name, operation in operations_of(module.to_string()).items():
                found[module.name, name] = operation
    return found


def read_profile(folder: pathlib.Path, known: dict[tuple[str, str], Operation]) -> Profile:
    """Reads the newest trace in a folder.

    Args:
      folder: folder that was given to `jax.profiler`.
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
    """(start, own time, program, operation); own time excludes nested operations, such as those of a loop."""
    # Each open event: (end, start, program, operation), and the time of its nested events.
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
    """The innermost phase at a time; "" outside of phases."""
    begun = spans[: bisect.bisect_right(spans, time, key=lambda span: span[0])]
    return next((name for _, end, name in reversed(begun) if time < end), "")
