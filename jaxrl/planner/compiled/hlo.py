"""Parses the text of a compiled program (optimised HLO): its instructions, and its collectives.

Of a collective it reads the device groups and the bytes that they deliver. Devices are numbered in the order
of the program's flattened mesh. Covered: collectives that XLA uses on CPU, GPU and TPU. Not covered: the
rounds of loops, whose bodies the text shows once (`traffic.py` counts them).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name, type, opcode: name, type of the result, and operation.
      inputs: text between its parentheses: operands, the value of a constant, or the number of a parameter.
      rest: text after the parentheses.
      line: the whole line.
      is_root: whether its value is the result of the computation.
    """

    name: str
    type: str
    opcode: str
    inputs: str
    rest: str
    line: str
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands."""
        return tuple(_OPERAND.findall(self.inputs))

    @property
    def parameter(self) -> int | None:
        """Number of the computation's argument that it stands for; None for other instructions."""
        return int(self.inputs) if self.opcode == "parameter" else None


Computation = dict[str, Instruction]


def computations_of(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the name of the entry."""
    found: dict[str, Computation] = {}
    current: Computation = {}
    entry = ""
    for line in text.splitlines():
        if line.endswith("{") and (header := _HEADER.match(line)):
            current = found.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, type, opcode, after = match.groups()
            inputs, _, rest = after.partition(")")
            current[name] = Instruction(name, type, opcode, inputs, rest, line, bool(root))
    return found, entry


def root_of(computation: Computation) -> Instruction | None:
    """The instruction whose value is the result of the computation; None if there is none."""
    return next((i for i in computation.values() if i.is_root), None)


_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_UNKNOWN = re.compile(r" (collective-broadcast|ragged-all-to-all|send|recv)(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: XLA's name, such as "all-gather".
      groups: groups of devices that exchange data; (source, target) pairs for a permute.
      result_bytes: bytes of the result on one device.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    result_bytes: int

    def received(self, num_devices: int) -> np.ndarray:
        """Lower bound of the bytes that each device receives: float64 [num_devices]."""
        received = np.zeros(num_devices)
        for group in self.groups:
            if self.kind == "collective-permute":
                source, target = group
                received[target] += self.result_bytes * (source != target)
            else:
                received[list(group)] += self.result_bytes * self._share(len(group))
        return received

    def _share(self, size: int) -> float:
        """Received bytes over bytes of the result, in a group of `size`, with the best algorithm."""
        if self.kind == "reduce-scatter":
            return size - 1
        # An all-reduce is a reduce-scatter followed by an all-gather.
        return (2 if self.kind == "all-reduce" else 1) * (size - 1) / size


def collectives(text: str, num_devices: int) -> list[Collective]:
    """All collectives of a compiled program.

    Args:
      text: `compiled.as_text()`.
      num_devices: number of devices of the program.
    """
    found = []
    for line in text.splitlines():
        assert not _UNKNOWN.search(line), f"a collective this module cannot count: {line.strip()}"
        match = _COLLECTIVE.search(line)
        if match:
            kind = match["kind"]
            groups = _groups(line, num_devices)
            arrays = [(name, _dims(dims)) for name, dims in _ARRAY.findall(match["result"])]
            if not match["start"] or kind == "all-reduce":
                nbytes = sum(_nbytes(name, dims) for name, dims in arrays)
            else:
                # The result of an asynchronous start also has the operands, and scalars that mark
                # its progress.
                size = len(groups[0])
                shares = {"all-gather": (size, size + 1), "reduce-scatter": (1, size + 1)}
                part, whole = shares.get(kind, (1, 2))
                nbytes = sum(_nbytes(name, dims) for name, dims in arrays if dims) * part // whole
            found.append(Collective(kind, tuple(sorted(groups)), nbytes))
    return found


def _nbytes(name: str, dims: list[int]) -> int:
    bits = 8 if name == "pred" else int(re.findall(r"\d+", name)[0])
    return math.ceil(math.prod(dims) * bits / 8)


def _groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The device groups, in any of the three notations of XLA; of a permute the pairs."""
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", line):
        return _braces(pairs[1])
    if re.search(r"replica_groups=\{\}", line):
        return (tuple(range(num_devices)),)
    if inner := re.search(r"replica_groups=\{(.*?\})\}", line):
        return _braces(inner[1])
    # [groups, size]<=[dims]T(order): consecutive numbers, transposed
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        rows = _iota(iota[2], iota[3]).reshape(_dims(iota[1]))
        return tuple(map(tuple, rows.tolist()))
    # mesh['a'=2,'b'=4], device_ids=([dims]T(order)) {'b','a':(1)2}: along these axes of this mesh
    named = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}",
        line,
    )
    assert named, f"replica groups in an unknown notation: {line.strip()}"
    mesh, dims, order, axes = named.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    ids = _iota(dims or str(math.prod(sizes.values())), order)
    shape, moved = [], []
    parts = {name: (int(before or 1), int(size or 0)) for name, before, size in _AXIS.findall(axes)}
    for name, size in sizes.items():
        if name not in parts:
            shape.append(size)
            continue
        # A part of an axis splits it into [before, part, rest].
        before, part = parts[name][0], parts[name][1] or size
        moved.append(len(shape) + 1)
        shape += [before, part, size // (before * part)]
    kept = [i for i in range(len(shape)) if i not in moved]
    group_size = math.prod(shape[i] for i in moved)
    rows = ids.reshape(shape).transpose(*kept, *moved).reshape(-1, group_size)
    return tuple(map(tuple, rows.tolist()))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _dims(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_dims(order)) if order else ids


def _braces(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_dims(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
