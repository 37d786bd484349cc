"""Counts what a compiled program launches and moves, from its text (optimised HLO).

A kernel is an instruction that a device starts by itself: a fusion, a product, a copy, a custom call. Of TPUs
it is an operation on an array. A fusion reads and writes slices, and what it updates in place, as large as
these are; an array that a TPU keeps on the chip has no bytes.

    text --> computations --> runs of each (traffic.py) --> kernels --> Counts of the decode loop, or of all

Of a conditional the branch with a matmul counts, of several the shortest. The profile of a decode loop of an
H200 had 1,015 kernels a token, its text has 1,017. Not covered: what runs side by side, collectives' bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxrl_planner.compiled.traffic import (
    INDEX,
    LOOP,
    ONE_CALLEE,
    Computation,
    Instruction,
    branches_of,
    computations_of,
    nbytes_of,
    root_of,
    rounds_of,
    runs_of,
)

# An array with its layout; S(1) is the memory on a TPU's chip.
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = frozenset({"while", "conditional", "call"})
_FREE = _CALLS | {
    *(
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
    ),
    *("replica-id", "opt-barrier", "optimization-barrier", "add-dependency"),
}
# What a TPU does not run as an operation of its own.
_FREE_ON_TPU = frozenset({"reshape", "iota"})
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")
_PRODUCTS = frozenset({"dot", "convolution", "custom-call"})
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# A kernel of these alone leaves every value as it was.
_MOVES = frozenset(
    {
        *(
            "parameter",
            "constant",
            "bitcast",
            "copy",
            "slice",
            "dynamic-slice",
            "transpose",
            "reshape",
        ),
        *("concatenate", "tuple", "get-tuple-element", "copy-start", "fusion", "copy-done"),
    }
)
_SAME = frozenset({"bitcast", "convert", "copy"})

Platform = Literal["gpu", "tpu", "cpu"]


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a device does for a token of the decode loop, or in a whole program.

    Attributes:
      kernels: number of kernels (of TPUs: operations).
      kernels_a_layer: those of the layers, divided by their number.
      weight_bytes_copied: bytes of weights that are written once more as they are, such as slices of a stack.
      other_bytes: bytes read and written by all other kernels but matmuls and custom calls.
      product_bytes: bytes that these write.
      logits_passes: how often an array of [rows, V] is read or written.
      host_visits: loops and conditionals for which a GPU's host must know a result: rounds of loops that end
        by data, and conditionals; 0 if they are part of CUDA graphs.
      loops_beside: loops of a dispatch beside the decode loop; on GPUs the host starts each of their rounds.
    """

    kernels: float
    kernels_a_layer: float
    weight_bytes_copied: float
    other_bytes: float
    product_bytes: float
    logits_passes: float
    host_visits: float
    loops_beside: int = 0


@dataclasses.dataclass(frozen=True)
class _Kernel:
    # One launch; `times` of them, with the bytes of one. `logits`: reads and writes of arrays of that size.
    instruction: Instruction
    times: float
    copied: float = 0.0
    other: float = 0.0
    made: float = 0.0
    logits: int = 0


class CompiledText:
    """The text of a program, to be counted.

    Args:
      text: `compiled.as_text()`.
      platform: of the devices that it is for.
      logits: number of values of [rows, V] on a device.
      weights: how the names of the weights among the arguments begin.
      longest_branch: as of `runs_of`.
    """

    def __init__(
        self,
        text: str,
        platform: Platform,
        *,
        logits: int = 0,
        weights: str = "params",
        longest_branch: bool = False,
    ):
        self._computations, self._entry = computations_of(text)
        self._platform, self._logits, self._weights = platform, logits, weights
        self._longest = longest_branch
        # Where each computation is called: caller, instruction and the operand that becomes its parameter.
        self._callers: dict[str, tuple[str, Instruction, int]] = {}
        for caller, computation in self._computations.items():
            for each in computation.values():
                for operand, callee in _callees(each):
                    self._callers[callee] = caller, each, operand

    def decoding(self, layers: int = 1, *, in_graphs: bool = False) -> Counts:
        """Counts of a token of the decode loop, which is the entry's loop with the most kernels.

        Args:
          layers: number of layers of the model, on a device, by which kernels of layers are divided.
          in_graphs: whether loops and conditionals are part of CUDA graphs, which XLA leaves out by default.
        """
        entry = self._computations[self._entry].values()
        loops = {each.name: self._loop_runs(each) for each in entry if each.opcode == "while"}
        loop = max(loops, key=lambda name: sum(k.times for k in self._kernels(loops[name])))
        counts = self._counts(loops[loop], layers, in_graphs)
        if self._platform != "gpu" or in_graphs:
            return counts
        names = [name for name in self._runs(self._entry) if name not in loops[loop]]
        beside = [i for name in names for i in self._computations[name].values()]
        number = sum(i.opcode == "while" and i.name != loop for i in beside)
        # Whether there is another round the host is told, too.
        return dataclasses.replace(counts, host_visits=counts.host_visits + 1, loops_beside=number)

    def whole(self, layers: int) -> Counts:
        """Counts of the program; a loop that ends by data has one round."""
        return self._counts(self._runs(self._entry), layers, in_graphs=False)

    def _runs(self, start: str) -> dict[str, float]:
        # Runs of the computations whose instructions a device starts by themselves.
        runs = runs_of(*(self._computations, start), longest_branch=self._longest, of_products=True)
        own, waiting = {start}, [start]
        while waiting:
            for each in self._computations[waiting.pop()].values():
                new = {callee for _, callee in _callees(each)} & runs.keys() - own
                own |= new
                waiting += new
        return {name: times for name, times in runs.items() if name in own}

    def _loop_runs(self, loop: Instruction) -> dict[str, float]:
        parts = [self._runs(callee) for _, callee in _callees(loop)]
        return functools.reduce(lambda all, part: all | part, parts)

    def _counts(self, runs: dict[str, float], layers: int, in_graphs: bool) -> Counts:
        kernels = list(self._kernels(runs))

        def total(values: Iterator[float]) -> float:
            return float(sum(values))

        visits = 0.0
        for name, times in runs.items():
            around = self._computations[name]
            for each in around.values():
                ends = each.opcode == "while" and not rounds_of(each, around, self._computations)
                visits += times * (ends or each.opcode == "conditional")
        return Counts(
            kernels=total(k.times for k in kernels),
            kernels_a_layer=_of_layers(kernels, layers) / layers,
            weight_bytes_copied=total(k.times * k.copied for k in kernels),
            other_bytes=total(k.times * k.other for k in kernels),
            product_bytes=total(k.times * k.made for k in kernels),
            logits_passes=total(k.times * k.logits for k in kernels),
            host_visits=visits if self._platform == "gpu" and not in_graphs else 0.0,
        )

    def _kernels(self, runs: dict[str, float]) -> Iterator[_Kernel]:
        for name, times in runs.items():
            for each in self._computations[name].values():
                if not self._is_free(each):
                    yield self._kernel(each, name, times)

    def _is_free(self, each: Instruction) -> bool:
        if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
            return True
        if self._platform != "tpu":
            return False
        sizes = _arrays(each.type, on_chip=True)
        is_number = each.opcode != "fusion" and all(n <= 1 for n, _ in sizes)
        return is_number or each.opcode in _FREE_ON_TPU or "AllocateBuffer" in each.line

    def _kernel(self, each: Instruction, where: str, times: float) -> _Kernel:
        if each.opcode.startswith(_COLLECTIVES):
            return _Kernel(each, times)
        callee = ONE_CALLEE.search(each.line)
        inner = self._computations.get(callee[1]) if callee else None
        if inner is None:
            reads, writes = self._plain_bytes(each, where)
            inside = [each]
        else:
            reads, writes = _fused_bytes(each, inner, self._computations[where])
            inside = list(self._inside(inner))
        passes = sum(n == self._logits for n, _ in (*reads, *writes)) if self._logits else 0
        written = sum(nbytes for _, nbytes in writes)
        if any(i.opcode in _PRODUCTS for i in inside):
            return _Kernel(each, times, made=written, logits=passes)
        arrays = (i for i in inside if any(n > 1 for n, _ in _arrays(i.type, on_chip=True)))
        if all(i.opcode in _MOVES for i in arrays) and self._reads_weights(each, where):
            return _Kernel(each, times, copied=written, logits=passes)
        both = written + sum(nbytes for _, nbytes in reads)
        return _Kernel(each, times, other=both, logits=passes)

    def _plain_bytes(self, each: Instruction, where: str) -> tuple[list, list]:
        # (values, bytes) of what an instruction reads and writes.
        types = self._computations[where]
        writes = _arrays(each.type)
        if each.opcode == "copy-start":
            # (target, source, state)
            writes = _first(each.type)
        if each.opcode == "dynamic-update-slice":
            writes = _arrays(types[each.operands[1]].type)
        if each.opcode in _SLICES or each.opcode == "dynamic-update-slice":
            return writes, writes
        return [
            a for name in each.operands if name in types for a in _arrays(types[name].type)
        ], writes

    def _inside(self, computation: Computation) -> Iterator[Instruction]:
        for each in computation.values():
            yield each
            for callee in ONE_CALLEE.findall(each.line):
                if each.opcode == "fusion" and callee in self._computations:
                    yield from self._inside(self._computations[callee])

    def _reads_weights(self, each: Instruction, where: str) -> bool:
        sources = (self._source(where, name) for name in each.operands)
        names = (_OP_NAME.search(s.line) for s in sources if s is not None)
        return any(name[1].startswith(self._weights) for name in names if name)

    def _source(self, where: str, name: str, path: tuple[int, ...] = ()) -> Instruction | None:
        # The argument of the program that a value is, or None. `path` is its place in a tuple.
        found = self._computations[where].get(name)
        if found is None:
            return None
        if found.opcode in ("bitcast", "opt-barrier", "optimization-barrier"):
            return self._source(where, found.operands[0], path)
        if found.opcode == "get-tuple-element":
            index = INDEX.search(found.line)
            assert index, "an element of a tuple has an index"
            return self._source(where, found.operands[0], (int(index[1]), *path))
        if found.opcode == "tuple" and path:
            return self._source(where, found.operands[path[0]], path[1:])
        if found.opcode == "while" and self._passes_on(found, path):
            return self._source(where, found.operands[0], path)
        if found.opcode == "parameter":
            if where == self._entry:
                return found
            if where in self._callers:
                caller, call, operand = self._callers[where]
                if call.opcode != "while" or self._passes_on(call, path):
                    return self._source(caller, call.operands[operand], path)
        return None

    def _passes_on(self, loop: Instruction, path: tuple[int, ...]) -> bool:
        # Whether every round of a loop leaves an element of its tuple as it was.
        called = LOOP.search(loop.line)
        body = self._computations.get(called[2], {}) if called else {}
        root = root_of(body)
        if root is None or root.opcode != "tuple" or not path:
            return False
        same = body.get(root.operands[path[0]])
        index = INDEX.search(same.line) if same and same.opcode == "get-tuple-element" else None
        return index is not None and int(index[1]) == path[0]


def _callees(each: Instruction) -> Iterator[tuple[int, str]]:
    # The computations whose instructions run by themselves, and the operand that is the parameter of each.
    if each.opcode == "while" and (loop := LOOP.search(each.line)):
        yield from ((0, callee) for callee in loop.groups())
    elif each.opcode == "conditional":
        yield from enumerate(branches_of(each.line), 1)
    elif each.opcode == "call":
        yield from enumerate(ONE_CALLEE.findall(each.line))


def _of_layers(kernels: Sequence[_Kernel], layers: int) -> float:
    # Kernels of a loop over layers. Without one: from the first to the last with a layer's scope, those that
    # have like ones in another, and in a quarter of the layers; a scheduler puts others between them.
    in_loops = sum(k.times for k in kernels if k.times > 1)
    if in_loops and layers > 1:
        return in_loops
    named = [_OP_NAME.search(k.instruction.line) for k in kernels]
    alike = [(name and name[1], k.instruction.type) for name, k in zip(named, kernels, strict=True)]
    often, places = collections.Counter(alike), range(len(kernels))
    scoped = [n for n in places if (name := named[n]) and re.search("/(attention|mlp)/", name[1])]
    region = places[scoped[0] : scoped[-1] + 1] if scoped else places[:0]
    least = max(min(2, layers), layers / 4)
    return float(sum(often[alike[n]] >= least for n in region))


def _arrays(type: str, *, on_chip: bool = False) -> list[tuple[int, int]]:
    # (values, bytes) of the arrays of a type; those on a TPU's chip are left out.
    found = []
    for name, dims, layout in _ARRAY.findall(type):
        sizes = [int(n) for n in dims.split(",") if n]
        if on_chip or "S(1)" not in layout:
            found.append((math.prod(sizes), nbytes_of(name, sizes)))
    return found


def _first(type: str) -> list[tuple[int, int]]:
    # The first array of a tuple.
    first = _ARRAY.search(type)
    return _arrays(first[0]) if first else []


def _fused_bytes(each: Instruction, inner: Computation, around: Computation) -> tuple[list, list]:
    # (values, bytes) of what a fusion reads and writes: slices, and updates in place, are as large as these.
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for one in inner.values():
        for name in one.operands:
            users[name].append(one)

    def sliced(name: str) -> list[tuple[int, int]] | None:
        # What is read of a value that is only sliced or updated in place; else None.
        found = []
        for user in users[name]:
            if user.opcode in _SLICES and user.operands[0] == name:
                found += _arrays(user.type, on_chip=True)
            elif user.opcode == "bitcast" and (below := sliced(user.name)) is not None:
                found += below
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                return None
        return found

    root = root_of(inner)
    assert root, "a fusion has a result"
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    reads, writes = [], []
    for result in results:
        made = result
        while made.opcode in _SAME and made.operands[0] in inner:
            made = inner[made.operands[0]]
        is_update = made.opcode == "dynamic-update-slice"
        writes += _arrays(inner[made.operands[1]].type if is_update else result.type)
    for one in inner.values():
        if one.opcode == "parameter" and int(one.inputs) < len(each.operands):
            outer = around.get(each.operands[int(one.inputs)])
            parts = sliced(one.name)
            reads += _arrays(outer.type if outer else one.type) if parts is None else parts
    return reads, writes
