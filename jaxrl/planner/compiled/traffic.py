"""Sums the traffic between devices of a compiled program, by mesh axes.

Bytes are a lower bound of what a device receives, with the best algorithm. The text shows the body of a loop
once. Its number of rounds is the compiler's own note, or follows from its condition: a counter that starts at
a constant, grows by a constant step, and stays below another constant. The caller gives the number for loops
whose end depends on data (the last microbatch of a batch, the last token of a dispatch).

    text --> computations --> walk from the entry: body x rounds, calls x 1, one branch --> runs of each
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxrl.planner.compiled.hlo import (
    Collective,
    Computation,
    Instruction,
    collectives,
    computations_of,
    root_of,
)

_ONE_CALLEE = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_CHOICE = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_NOTED = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
_INDEX = re.compile(r"index=(\d+)")
# Operations that pass a value on unchanged.
_SAME = frozenset({"copy", "bitcast", "convert", "reshape"})

# (kind, axes, across hosts).
_Key: TypeAlias = tuple[str, tuple[str, ...], bool]


def runs_of(
    computations: Mapping[str, Computation],
    entry: str,
    *,
    open_loops: float = 1,
    longest_branch: bool = True,
) -> dict[str, float]:
    """Number of runs of each computation of a program; those that never run are missing.

    Args:
      computations, entry: as from `computations_of`.
      open_loops: mean rounds of an outermost loop whose end depends on data; one inside it counts once.
      longest_branch: whether conditionals take the branch with the most instructions; else with the fewest.
    """
    total: dict[str, float] = collections.defaultdict(float)

    def walk(name: str, times: float, open_loops: float) -> None:
        total[name] += times
        for instruction in computations[name].values():
            loop = _LOOP.search(instruction.line) if instruction.opcode == "while" else None
            if loop is not None:
                rounds, inside = _rounds(instruction, computations[name], computations), open_loops
                if rounds is None:
                    rounds, inside = open_loops, 1
                for callee in loop.groups():
                    walk(callee, times * rounds, inside)
                continue
            callees = [c for c in _ONE_CALLEE.findall(instruction.line) if c in computations]
            if instruction.opcode == "conditional":
                branches = [b for b in _branches(instruction.line) if b in computations]
                pick = max if longest_branch else min
                callees = [pick(branches, key=lambda b: _size(b, computations))] if branches else []
            for callee in callees:
                walk(callee, times, open_loops)

    walk(entry, 1.0, open_loops)
    return dict(total)


def counted_collectives(
    text: str, num_devices: int, *, open_loops: float = 1, longest_branch: bool = True
) -> Iterator[tuple[float, Collective]]:
    """(number of runs, collective) of every collective of a program; args as of `runs_of`."""
    computations, entry = computations_of(text)
    runs = runs_of(computations, entry, open_loops=open_loops, longest_branch=longest_branch)
    for name, times in runs.items():
        lines = "\n".join(instruction.line for instruction in computations[name].values())
        for each in collectives(lines, num_devices):
            # A TPU's compiler writes a reduce-scatter as an all-reduce fused with the cut.
            if name.startswith("all-reduce-scatter") and each.kind == "all-reduce":
                part = each.result_bytes // len(each.groups[0])
                each = Collective("reduce-scatter", each.groups, part)
            yield times, each


def _branches(line: str) -> list[str]:
    """Names of the branches of a conditional."""
    listed = ",".join(_BRANCHES.findall(line)).split(",")
    return _CHOICE.findall(line) + [name.strip().lstrip("%") for name in listed if name]


def _size(name: str, computations: Mapping[str, Computation]) -> int:
    """Number of instructions of a computation and of all computations that it calls."""
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in computations:
            continue
        seen.add(current)
        for instruction in computations[current].values():
            waiting += _ONE_CALLEE.findall(instruction.line) + _branches(instruction.line)
            waiting += [name for loop in _LOOP.findall(instruction.line) for name in loop]
    return sum(len(computations[each]) for each in seen)


def _rounds(
    loop: Instruction, around: Computation, computations: Mapping[str, Computation]
) -> int | None:
    """Rounds of a loop; None if they depend on data."""
    if noted := _NOTED.search(loop.line):
        return int(noted[1])
    called = _LOOP.search(loop.line)
    assert called, "a loop without a body"
    condition, body = (computations.get(name, {}) for name in called.groups())
    test, start, root = root_of(condition), around.get(loop.operands[0]), root_of(body)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.line:
        return None
    # The positions of both sides of the test in the tuple that the loop carries; None if not from there.
    carried = [condition.get(_source(name, condition)) for name in test.operands]
    counter, bound = (
        int(index[1])
        if found and found.opcode == "get-tuple-element" and (index := _INDEX.search(found.line))
        else None
        for found in carried
    )
    if counter is None or start is None or root is None:
        return None
    if not start.opcode == root.opcode == "tuple":
        return None
    first = _value(start.operands[counter], around)
    last = _value(test.operands[1], condition)
    if bound is not None:
        last = _value(start.operands[bound], around)
    add = body.get(_source(root.operands[counter], body))
    added = add.operands if add is not None and add.opcode == "add" else ()
    step = next((v for name in added if (v := _value(name, body)) is not None), None)
    if first is None or last is None or not step:
        return None
    return max(0, -(-(last - first) // step))


def _source(name: str, computation: Computation) -> str:
    while (found := computation.get(name)) and found.opcode in _SAME and found.operands:
        name = found.operands[0]
    return name


def _value(name: str, computation: Computation) -> int | None:
    """The value of an integer constant; None if the value is not one."""
    found = computation.get(_source(name, computation))
    if found is None or found.opcode != "constant":
        return None
    return int(found.inputs) if found.inputs.lstrip("-").isdigit() else None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes.

    Attributes:
      kind: XLA's name, such as "all-gather".
      axes: mesh axes along which devices exchange data.
      across_hosts: whether some groups span several hosts.
      calls: number of collectives.
      nbytes: bytes received by the device that receives most.
    """

    kind: str
    axes: tuple[str, ...]
    across_hosts: bool
    calls: float
    nbytes: float

    def times(self, factor: float, *, share: float = 1.0) -> Traffic:
        """The traffic of `factor` repetitions with this share of the bytes."""
        nbytes = self.nbytes * factor * share
        return dataclasses.replace(self, calls=self.calls * factor, nbytes=nbytes)


def traffic_of(
    found: Iterable[tuple[float, Collective]], mesh: Mesh, *, devices_per_host: int
) -> list[Traffic]:
    """Sums collectives by kind and axes, those with the most bytes first.

    Args:
      found: (number of runs, collective); devices are numbered in the order of the flattened mesh.
      mesh: mesh of the program.
      devices_per_host: number of devices of a host; they have consecutive ids.
    """
    hosts = np.array([d.id // devices_per_host for d in mesh.devices.flat])
    calls: dict[_Key, float] = collections.defaultdict(float)
    received: dict[_Key, np.ndarray] = {}
    for times, each in found:
        axes = axes_of(each, mesh)
        if not axes:
            continue
        wide = any(len(set(hosts[list(group)])) > 1 for group in each.groups)
        key = each.kind, axes, wide
        calls[key] += times
        received[key] = received.get(key, np.zeros(mesh.size)) + times * each.received(mesh.size)
    sums = (Traffic(*key, calls[key], float(received[key].max())) for key in calls)
    return sorted(sums, key=lambda t: -t.nbytes)


def merged(parts: Iterable[Traffic]) -> list[Traffic]:
    """Adds up the traffic of several functions by kind and axes, most bytes first."""
    sums: dict[tuple, Traffic] = {}
    for part in parts:
        key = part.kind, part.axes, part.across_hosts
        before = sums.get(key, dataclasses.replace(part, calls=0.0, nbytes=0.0))
        sums[key] = dataclasses.replace(
            part, calls=before.calls + part.calls, nbytes=before.nbytes + part.nbytes
        )
    return sorted(sums.values(), key=lambda t: -t.nbytes)


def axes_of(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes along which the devices of a collective's groups differ."""
    sizes = tuple(mesh.shape.values())
    places = np.stack(np.unravel_index(np.arange(mesh.size), sizes), axis=-1)
    differ = np.zeros(len(sizes), bool)
    for group in collective.groups:
        of_group = places[list(group)]
        differ |= (of_group != of_group[:1]).any(axis=0)
    return tuple(name for name, along in zip(mesh.shape, differ, strict=True) if along)
