"""Operations of a compiled program, by kind: how many floating-point operations and bytes each takes.

Read from the program's text (HLO). Floating-point operations are those of matmuls; bytes are a lower bound of
the reads and writes, where a slice counts only its own size. Not covered: element-wise arithmetic, and
matmuls inside custom calls except plain matrix multiplications (gemm).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from jaxrl.planner.compiled.hlo_text import Computation, Instruction, computations_of, root_of

KINDS = ("dot", "attention", "elementwise", "copy/transpose", "collective", "control", "other")

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
# The named scope of attention (`roles.packed_model`), which gradients keep, and names of attention kernels.
_ATTENTION = re.compile(r"\battend\b|attention_kernel|flash|splash|paged_attention|fmha")
_COLLECTIVE = re.compile(r"^(all-|reduce-scatter|collective-|ragged-all|send|recv)")
_CONTROL = {"while", "call", "conditional", "tuple", "get-tuple-element", "parameter", "constant"}
_COPIES = {"copy", "transpose", "reshape", "slice", "concatenate", "pad", "reverse", "bitcast"}
_MOVES = _COPIES | {"dynamic-slice", "dynamic-update-slice", "broadcast", "gather", "scatter"}
_NOTHING = _CONTROL | {"bitcast", "iota"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
      kind: one of `KINDS`.
      flops: floating-point operations of its matmuls.
      nbytes: lower bound of the bytes read and written.
    """

    kind: str
    flops: float
    nbytes: float


def operations_of(text: str) -> dict[str, Operation]:
    """Every operation of a program by its name, from `hlo_module.to_string()`."""
    computations, _ = computations_of(text)
    return {
        name: _operation(instruction, computation, computations)
        for computation in computations.values()
        for name, instruction in computation.items()
    }


def _operation(
    instruction: Instruction, around: Computation, computations: Mapping[str, Computation]
) -> Operation:
    called = _CALLS.search(instruction.rest)
    inside = computations.get(called[1], {}) if called else {}
    parts = {**inside} if instruction.opcode == "fusion" else {instruction.name: instruction}
    scopes = " ".join(_scope(part) for part in (instruction, *parts.values()))
    flops = sum(_flops(part, inside or around) for part in parts.values())
    kind = _kind(instruction, {part.opcode for part in parts.values()}, scopes)
    return Operation(kind, flops, _nbytes(instruction, around, inside))


def _scope(instruction: Instruction) -> str:
    match = _SCOPE.search(instruction.rest)
    return match[1] if match else ""


def _kind(instruction: Instruction, opcodes: set[str], scopes: str) -> str:
    if _COLLECTIVE.match(instruction.opcode):
        return "collective"
    if instruction.opcode in _CONTROL:
        return "control"
    if _ATTENTION.search(scopes) or _ATTENTION.search(instruction.rest):
        return "attention"
    if opcodes & {"dot", "convolution"} or "gemm" in instruction.rest:
        return "dot"
    if opcodes - _NOTHING <= _MOVES:
        return "copy/transpose"
    return "other" if instruction.opcode in ("custom-call", "sort", "rng") else "elementwise"


def _flops(instruction: Instruction, around: Computation) -> float:
    shapes = [_dims(around[name].type) for name in instruction.operands if name in around]
    if instruction.opcode == "dot" and shapes and (match := _CONTRACTED.search(instruction.rest)):
        contracted = [shapes[0][int(axis)] for axis in match[1].split(",") if axis]
        return 2.0 * math.prod(_dims(instruction.type)) * math.prod(contracted)
    if "gemm" in instruction.rest and len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) == 2:
        # Sizes are M x K, K x N and M x N; the square root of their product is M x N x K.
        sizes = (*map(math.prod, shapes[:2]), math.prod(_dims(instruction.type)))
        return 2.0 * math.prod(sizes) ** 0.5
    return 0.0


def _nbytes(instruction: Instruction, around: Computation, inside: Computation) -> float:
    if instruction.opcode in _NOTHING:
        return 0.0
    if instruction.opcode == "dynamic-slice":
        return 2.0 * _size(instruction.type)
    if instruction.opcode == "dynamic-update-slice":
        update = around.get(instruction.operands[1])
        return 2.0 * _size(update.type) if update else 0.0
    types = [around[name].type if name in around else "" for name in instruction.operands]
    if not inside:
        return float(_size(instruction.type) + sum(map(_size, types)))
    return _written(instruction, inside) + sum(
        min(_size(type), _read(inside, number)) for number, type in enumerate(types)
    )


def _written(fusion: Instruction, inside: Computation) -> float:
    """Bytes of a fusion's result; only the slice if it updates a slice in place."""
    root = root_of(inside)
    if root is not None and root.opcode == "dynamic-update-slice":
        return float(_size(inside[root.operands[1]].type)) if len(root.operands) > 1 else 0.0
    return float(_size(fusion.type))


def _read(inside: Computation, number: int) -> float:
    """Maximum bytes that a fusion reads of an argument: the slices if it is only sliced, else infinite."""
    name = next((i.name for i in inside.values() if i.parameter == number), None)
    users = [i for i in inside.values() if name in i.operands]
    if users and all(i.opcode == "dynamic-slice" for i in users):
        return float(sum(_size(i.type) for i in users))
    if users and all(i.opcode == "dynamic-update-slice" and i.operands[0] == name for i in users):
        return 0.0
    return math.inf


def _dims(type: str) -> list[int]:
    match = _ARRAY.search(type)
    return [int(n) for n in match[3].split(",") if n] if match else []


def _size(type: str) -> float:
    total = 0.0
    for name, bits, dims in _ARRAY.findall(type):
        width = 8 if name == "pred" else int(bits)
        total += math.prod(int(n) for n in dims.split(",") if n) * width / 8
    return total
