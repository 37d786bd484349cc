"""Parses the text of a compiled program (optimised HLO) into computations of instructions."""

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
