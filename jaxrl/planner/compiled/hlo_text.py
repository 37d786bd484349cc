"""A compiled program's text (optimised HLO) as computations of instructions."""

from __future__ import annotations

import dataclasses
import functools
import re

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name, type, opcode: of it.
      inputs: as written between its parentheses: names, a constant's value, a parameter's number.
      rest: what follows them.
      line: all of it.
      is_root: its value is the computation's.
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
        """Names of the instructions that it takes."""
        return tuple(_OPERAND.findall(self.inputs))

    @property
    def parameter(self) -> int | None:
        """Which argument of the computation it is, if it is one."""
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
    """The instruction whose value the computation has."""
    return next((i for i in computation.values() if i.is_root), None)
