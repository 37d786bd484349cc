"""Reads the text of a compiled program (optimised HLO): its collectives, and its traffic by mesh axes.

Of a collective it reads the device groups and the bytes that they deliver. Devices are numbered in the order
of the program's flattened mesh. Covered: collectives that XLA uses on CPU, GPU and TPU.

Bytes are a lower bound of what a device receives, with the best algorithm; of a ragged all-to-all, whose rows
depend on data, they are those that there is room for. The text shows the body of a loop
once. Its number of rounds is the compiler's own note, or follows from its condition: a counter that starts at
a constant, grows by a constant step, and stays below another constant. The caller gives the number for loops
whose end depends on data (the last microbatch of a batch, the last token of a dispatch).

    text --> computations --> walk from the entry: body x rounds, calls x 1, one branch --> runs of each
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxrl.mesh.layout import TENSOR_GEN

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# TPUs' compilers write element 3 of a tuple as %tuple#3.
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)?)")
_OF_TUPLE = re.compile(r"(?:[^,(){}\[\]]|\([^()]*\)|\{(?:[^{}]|\([^()]*\))*\}|\[[^\]]*\])+")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name, type, opcode: name, type of the result, and operation.
      inputs: text between its parentheses: operands, the value of a constant, or the number of a parameter.
      line: the whole line.
      is_root: whether its value is the result of the computation.
    """

    name: str
    type: str
    opcode: str
    inputs: str
    line: str
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self.inputs))


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
            inputs = after.partition(")")[0]
            current[name] = Instruction(name, type, opcode, inputs, line, bool(root))
    for computation in found.values():
        for name in {n for each in computation.values() for n in each.operands if "#" in n}:
            tuple_name, _, place = name.partition("#")
            if tuple_name in computation:
                inside = re.sub(r"/\*.*?\*/", "", computation[tuple_name].type).strip()[1:-1]
                type = _OF_TUPLE.findall(inside)[int(place)].strip()
                line = f"%{name} = {type} get-tuple-element(%{tuple_name}), index={place}"
                of_tuple = name, type, "get-tuple-element", f"%{tuple_name}", line
                computation[name] = Instruction(*of_tuple, is_root=False)
    return found, entry


def root_of(computation: Computation) -> Instruction | None:
    """The instruction whose value is the result of the computation; None if there is none."""
    return next((i for i in computation.values() if i.is_root), None)


_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|"
    r"collective-permute)"
    r"(?P<start>-start)?\("
)
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_UNKNOWN = re.compile(r" (collective-broadcast|send|recv)(-start)?\(")
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

    def entering(self, hosts: np.ndarray) -> np.ndarray:
        """Lower bound of the bytes that each host receives from others: float64 [num_hosts].

        Args:
          hosts: int [num_devices], the host of each device.
        """
        entering = np.zeros(int(hosts.max()) + 1)
        for group in self.groups:
            members = collections.Counter(hosts[list(group)].tolist())
            for host, count in members.items() if len(members) > 1 else ():
                if self.kind == "collective-permute":
                    entering[host] += self.result_bytes * (host == hosts[group[1]])
                elif self.kind.endswith("all-to-all"):
                    entering[host] += self.result_bytes * count * (1 - count / len(group))
                else:
                    # The members of a host are like one: of an all-gather one of them may receive what the
                    # others pass on, and a sum may be made on a host first.
                    parts = count if self.kind == "reduce-scatter" else 1
                    entering[host] += self.result_bytes * parts * self._share(len(members))
        return entering

    def _share(self, size: int) -> float:
        # Received bytes over bytes of the result, in a group of `size`, with the best algorithm.
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
        # A collective that is not counted would be a bound below the truth, without a word.
        assert not _UNKNOWN.search(line), f"a collective this module cannot count: {line.strip()}"
        match = _COLLECTIVE.search(line)
        if match:
            kind = match["kind"]
            groups = _groups(line, num_devices)
            arrays = [(name, _dims(dims)) for name, dims in _ARRAY.findall(match["result"])]
            if not match["start"] or kind == "all-reduce":
                nbytes = sum(nbytes_of(name, dims) for name, dims in arrays)
            else:
                # The result of an asynchronous start also has the operands, and scalars that mark
                # its progress.
                size = len(groups[0])
                shares = {"all-gather": (size, size + 1), "reduce-scatter": (1, size + 1)}
                part, whole = shares.get(kind, (1, 2))
                nbytes = sum(nbytes_of(name, dims) for name, dims in arrays if dims) * part // whole
            found.append(Collective(kind, tuple(sorted(groups)), nbytes))
    return found


def nbytes_of(name: str, dims: list[int]) -> int:
    """Bytes of an array; `name` is XLA's name of its type."""
    # The first number of a name is its bits: f8e4m3 has 8, bf16 has 16.
    bits = 8 if name == "pred" else int(re.findall(r"\d+", name)[0])
    return math.ceil(math.prod(dims) * bits / 8)


def _groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    # The device groups, in any of the three notations of XLA; of a permute the pairs.
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


ONE_CALLEE = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_CHOICE = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_NOTED = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
INDEX = re.compile(r"index=(\d+)")
_PRODUCT = re.compile(r" dot\(| convolution\(|cudnn|cublas")
# Operations that pass a value on unchanged.
_SAME = frozenset({"copy", "bitcast", "convert", "reshape"})

# (kind, axes).
_Key: TypeAlias = tuple[str, tuple[str, ...]]


def runs_of(
    computations: Mapping[str, Computation],
    entry: str,
    *,
    open_loops: float = 1,
    longest_branch: bool = True,
    of_products: bool = False,
) -> dict[str, float]:
    """Number of runs of each computation of a program; those that never run are missing.

    Args:
      computations, entry: as from `computations_of`.
      open_loops: mean rounds of an outermost loop whose end depends on data; one inside it counts once.
      longest_branch: whether conditionals take the branch with the most instructions; else with the fewest.
      of_products: whether only branches with matmuls count, where a conditional has any.
    """
    total: dict[str, float] = collections.defaultdict(float)

    def walk(name: str, times: float, open_loops: float) -> None:
        total[name] += times
        for instruction in computations[name].values():
            loop = LOOP.search(instruction.line) if instruction.opcode == "while" else None
            if loop is not None:
                rounds, inside = (
                    rounds_of(instruction, computations[name], computations),
                    open_loops,
                )
                if rounds is None:
                    # The given number is of both loops together.
                    rounds, inside = open_loops, 1
                for callee in loop.groups():
                    walk(callee, times * rounds, inside)
                continue
            callees = [c for c in ONE_CALLEE.findall(instruction.line) if c in computations]
            if instruction.opcode == "conditional":
                branches = [b for b in branches_of(instruction.line) if b in computations]
                if of_products:
                    multiply = [b for b in branches if _PRODUCT.search(_text(b, computations))]
                    branches = multiply or branches
                pick = max if longest_branch else min
                sizes = {b: _text(b, computations).count("\n") for b in branches}
                callees = [pick(branches, key=lambda b: sizes[b])] if branches else []
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


def branches_of(line: str) -> list[str]:
    """Names of the branches of a conditional."""
    listed = ",".join(_BRANCHES.findall(line)).split(",")
    return _CHOICE.findall(line) + [name.strip().lstrip("%") for name in listed if name]


def _text(name: str, computations: Mapping[str, Computation]) -> str:
    # The lines of a computation and of all computations that it calls.
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in computations:
            continue
        seen.add(current)
        for instruction in computations[current].values():
            waiting += ONE_CALLEE.findall(instruction.line) + branches_of(instruction.line)
            waiting += [name for loop in LOOP.findall(instruction.line) for name in loop]
    return "".join(f"{i.line}\n" for each in seen for i in computations[each].values())


def rounds_of(
    loop: Instruction, around: Computation, computations: Mapping[str, Computation]
) -> int | None:
    """Rounds of a loop in the computation around it; None if they depend on data."""
    # A GPU's compiler writes the note, a TPU's leaves most of them out.
    if noted := _NOTED.search(loop.line):
        return int(noted[1])
    called = LOOP.search(loop.line)
    assert called, "a loop without a body"
    condition, body = (computations.get(name, {}) for name in called.groups())
    test, start, root = root_of(condition), around.get(loop.operands[0]), root_of(body)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.line:
        return None
    # The positions of both sides of the test in the tuple that the loop carries; None if not from there.
    carried = [condition.get(_source(name, condition)) for name in test.operands]
    counter, bound = (
        int(index[1])
        if found and found.opcode == "get-tuple-element" and (index := INDEX.search(found.line))
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
    # The value of an integer constant; None if the value is not one.
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
      calls: number of collectives.
      nbytes: bytes received by the device that receives most.
      network: bytes that enter the host that receives most from other hosts, by device of a host.
    """

    kind: str
    axes: tuple[str, ...]
    calls: float
    nbytes: float
    network: float = 0.0

    def times(self, factor: float, *, share: float = 1.0) -> Traffic:
        """The traffic of `factor` repetitions with this share of the bytes."""
        size = factor * share
        return Traffic(
            self.kind, self.axes, self.calls * factor, self.nbytes * size, self.network * size
        )

    def least_s(self, links_gbs: float, network_gbs: float) -> float:
        """Lower bound of its seconds, at a device's GB/s inside a host and to other hosts."""
        near = max(0.0, self.nbytes - self.network)
        # Links and network carry data at the same time; the slower one decides.
        return max(near / links_gbs, self.network / network_gbs) / 1e9


def traffic_of(
    found: Iterable[tuple[float, Collective]], mesh: Mesh, *, devices_per_host: int
) -> list[Traffic]:
    """Sums collectives by kind and axes, those with the most bytes first.

    Args:
      found: (number of runs, collective); devices are numbered in the order of the flattened mesh.
      mesh: mesh of the program.
      devices_per_host: number of devices of a host; they have consecutive ids.
    """
    ids = [device.id // devices_per_host for device in mesh.devices.flat]
    hosts = np.unique(ids, return_inverse=True)[1]
    calls: dict[_Key, float] = collections.defaultdict(float)
    received: dict[_Key, np.ndarray] = collections.defaultdict(lambda: np.zeros(mesh.size))
    entering: dict[_Key, np.ndarray] = collections.defaultdict(lambda: np.zeros(hosts.max() + 1))
    for times, each in found:
        axes = axes_of(each, mesh)
        if not axes:
            continue
        key = each.kind, axes
        calls[key] += times
        received[key] += times * each.received(mesh.size)
        entering[key] += times * each.entering(hosts)
    # Summed by device before the maximum: one device need not receive most of every collective.
    sums = (
        Traffic(
            *(*key, calls[key], float(received[key].max())),
            network=float(entering[key].max()) / devices_per_host,
        )
        for key in calls
    )
    return sorted(sums, key=lambda t: -t.nbytes)


def merged(parts: Iterable[Traffic]) -> list[Traffic]:
    """Adds up the traffic of several functions by kind and axes, most bytes first."""
    sums: dict[tuple, Traffic] = {}
    for part in parts:
        key = part.kind, part.axes
        before = sums.get(key, Traffic(*key, 0.0, 0.0))
        sums[key] = Traffic(
            *(*key, before.calls + part.calls, before.nbytes + part.nbytes),
            network=before.network + part.network,
        )
    return sorted(sums.values(), key=lambda t: -t.nbytes)


def axes_of(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes along which the devices of a collective's groups differ; the parts of tensor_gen are one."""
    sizes = tuple(mesh.shape.values())
    places = np.stack(np.unravel_index(np.arange(mesh.size), sizes), axis=-1)
    differ = np.zeros(len(sizes), bool)
    for group in collective.groups:
        of_group = places[list(group)]
        differ |= (of_group != of_group[:1]).any(axis=0)
    names = (name for name, along in zip(mesh.shape, differ, strict=True) if along)
    return tuple(dict.fromkeys(TENSOR_GEN[0] if name in TENSOR_GEN else name for name in names))
