"""Counts the runs of each computation of a compiled program, whose text shows the body of a loop once.

The number of rounds of a loop is the compiler's own note, or follows from its condition: a counter that
starts at a constant, grows by a constant step, and stays below another constant. The caller gives the number
for loops whose end depends on data (the last microbatch of a batch, the last token of a dispatch).

    text --> computations --> walk from the entry: body x rounds, calls x 1, one branch --> runs of each
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

from jaxrl.planner.compiled.hlo import Collective, collectives
from jaxrl.planner.compiled.hlo_text import Computation, Instruction, computations_of, root_of

_ONE_CALLEE = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_CHOICE = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_NOTED = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
_INDEX = re.compile(r"index=(\d+)")
# Operations that pass a value on unchanged.
_SAME = frozenset({"copy", "bitcast", "convert", "reshape"})


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often each computation of a program runs.

    Attributes:
      times: number of runs by computation; computations that never run are missing.
      lines: lines of each computation's instructions.
    """

    times: Mapping[str, float]
    lines: Mapping[str, tuple[str, ...]]

    def collectives(self, num_devices: int) -> list[tuple[float, Collective]]:
        """(number of runs, collective) of every collective of the program.

        Args:
          num_devices: number of devices of the program.
        """
        found = []
        for name, times in self.times.items():
            for each in collectives("\n".join(self.lines[name]), num_devices):
                # A TPU's compiler writes a reduce-scatter as an all-reduce fused with the cut.
                if name.startswith("all-reduce-scatter") and each.kind == "all-reduce":
                    part = each.result_bytes // len(each.groups[0])
                    each = Collective("reduce-scatter", each.groups, part)
                found.append((times, each))
        return found


def runs_of(text: str, *, open_loops: float = 1, longest_branch: bool = True) -> Runs:
    """Counts the runs of the computations of a compiled program.

    Args:
      text: text of the compiled program.
      open_loops: mean rounds of an outermost loop whose end depends on data; one inside it counts once.
      longest_branch: whether conditionals take the branch with the most instructions; else with the fewest.
    """
    computations, entry = computations_of(text)
    times: dict[str, float] = collections.defaultdict(float)
    _walk(entry, 1.0, computations, times, _Taken(open_loops, longest_branch))
    lines = {name: tuple(i.line for i in computations[name].values()) for name in times}
    return Runs(dict(times), lines)


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Assumptions about loops and conditionals: the arguments of `runs_of`."""

    open_loops: float
    longest_branch: bool


def _walk(
    name: str,
    times: float,
    computations: Mapping[str, Computation],
    total: dict[str, float],
    taken: _Taken,
) -> None:
    total[name] += times
    for instruction in computations[name].values():
        loop = _LOOP.search(instruction.line) if instruction.opcode == "while" else None
        if loop is None:
            for callee in _callees(instruction, computations, taken):
                _walk(callee, times, computations, total, taken)
            continue
        rounds, inside = _rounds(instruction, computations[name], computations), taken
        if rounds is None:
            rounds, inside = taken.open_loops, dataclasses.replace(taken, open_loops=1)
        for callee in loop.groups():
            _walk(callee, times * rounds, computations, total, inside)


def _callees(
    instruction: Instruction, computations: Mapping[str, Computation], taken: _Taken
) -> list[str]:
    """Computations that an instruction runs; for a conditional only one of its branches."""
    if instruction.opcode != "conditional":
        return [name for name in _ONE_CALLEE.findall(instruction.line) if name in computations]
    branches = _branches(instruction.line)
    sizes = {name: _size(name, computations) for name in branches if name in computations}
    pick = max if taken.longest_branch else min
    return [pick(sizes, key=lambda name: sizes[name])] if sizes else []


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
    root = root_of(condition)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.line:
        return None
    counter, bound = (_place(name, condition) for name in root.operands)
    start = around.get(loop.operands[0])
    if not isinstance(counter, _Place) or start is None or start.opcode != "tuple":
        return None
    first = _value(start.operands[counter.index], around)
    last = _value(start.operands[bound.index], around) if isinstance(bound, _Place) else bound
    step = _step(body, counter.index)
    if first is None or last is None or not step:
        return None
    return max(0, -(-(last - first) // step))


@dataclasses.dataclass(frozen=True)
class _Place:
    """A position in the tuple that a loop carries."""

    index: int


def _place(name: str, computation: Computation) -> _Place | int | None:
    """The origin of a value: a constant, or a position in the computation's argument; else None."""
    name = _source(name, computation)
    instruction = computation.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "get-tuple-element" and (index := _INDEX.search(instruction.line)):
        return _Place(int(index[1]))
    return _value(name, computation)


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


def _step(body: Computation, index: int) -> int | None:
    """The constant that a round adds to a counter; None if there is none."""
    root = root_of(body)
    if root is None or root.opcode != "tuple":
        return None
    add = body.get(_source(root.operands[index], body))
    if add is None or add.opcode != "add":
        return None
    return next((v for name in add.operands if (v := _value(name, body)) is not None), None)
