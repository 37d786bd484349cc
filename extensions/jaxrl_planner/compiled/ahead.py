"""Compiles programs for accelerators that need not be present, and reads their memory and traffic.

    Program --> lower --> compile for the topology --> memory, by the compiler
                  |                                    collectives by axis, from the HLO text
                  +--> jaxpr --> operations, times the rounds of loops --> roofline

Results are cached: a folder beside JAX's own cache keeps the text and the memory figures of a program under a
hash of its inputs. Nothing here runs a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.mesh.compilation_cache import cache_folder
from jaxrl.private import compiler_options
from jaxrl.tracking.durable import write_atomically
from jaxrl_planner.compiled.counts import CompiledText, Counts
from jaxrl_planner.compiled.programs import Program
from jaxrl_planner.compiled.traffic import Traffic, counted_collectives, merged, traffic_of
from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.hardware.cluster import Topology
from jaxrl_planner.memory import ResidentBuffers

# Environment variables and packages that change the result of a compilation: part of the cache key.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt")
# Two messages of the TPU's compiler, for the whole program and for its temporaries alone.
_USED = re.compile(r"(?:Used |HLO temporaries \()([\d.]+)([KMGT]?)(?: of|\))")
_SUFFIX = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TEXTS = "*.after_optimizations.txt"


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Predicted lower bounds of the seconds of a program in a step, each part as if it ran alone.

    Not covered: element-wise operations, reads and writes of activations, the host, latencies, waiting for
    the longest sample.

    Attributes:
      matmuls: seconds of matmuls.
      memory: seconds of memory reads.
      traffic: seconds of traffic between devices.
    """

    matmuls: float
    memory: float
    traffic: float

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.matmuls, self.memory, self.traffic

    @property
    def total(self) -> float:
        """Lower bound of the seconds, as if the parts overlapped completely."""
        return max(self.parts)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(("matmuls", "memory", "traffic"), key=lambda name: getattr(self, name))


def roofline(
    kind: Accelerator,
    flops: float,
    reads: float,
    traffic: Sequence[Traffic] = (),
    *,
    num_devices: int,
    dtype: str,
) -> Seconds:
    """The seconds of a program at the vendor's rates.

    Args:
      kind: devices, whose rates are used.
      flops: operations of matmuls, over all devices.
      reads: bytes that a device reads.
      traffic: traffic between devices; empty if it is not known.
      num_devices: number of devices of the program's mesh.
      dtype: data type of the matmuls, "float32" or "bfloat16".
    """
    return Seconds(
        matmuls=flops / num_devices / (kind.roof.tflops(dtype) * 1e12),
        memory=reads / (kind.memory_gbs * 1e9),
        traffic=sum(each.least_s(kind.links_gbs, kind.network_gbs) for each in traffic),
    )


@dataclasses.dataclass(frozen=True)
class CompiledPiece:
    """The compiler's figures for one function.

    Attributes:
      arguments, temporaries, peak: bytes per device.
      fits: whether it compiled within the device's memory; if not, `peak` is the memory that it needs.
      text: optimised HLO; "" if it does not fit.
      seconds: seconds of its compilation; of the original one if cached.
      cached: whether the figures come from the cache.
    """

    arguments: int
    temporaries: int
    peak: int
    fits: bool
    text: str
    seconds: float
    cached: bool = False


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Memory that a program needs on each device, and its work in a step.

    Attributes:
      role, name, phase: role, name and phase of the program.
      arguments, temporaries, peak: bytes per device, from the compiler.
      co_resident: bytes per device of other buffers at the same time, counted from shapes.
      memory: bytes of memory of a device.
      flops: floating-point operations of matmuls per step, over the whole mesh.
      reads: lower bound of the bytes that a device reads from its memory per step.
      traffic: traffic between devices per step.
      seconds: lower bound of its seconds per step.
      compiled_s: seconds of compilation.
      cached: whether all its functions come from the cache.
      compiles: whether all its functions compile within the device's memory.
      token: what its decode loop does for a token; None of other programs.
    """

    role: str
    name: str
    phase: str
    arguments: int
    temporaries: int
    peak: int
    co_resident: int
    memory: int
    flops: float
    reads: float
    traffic: tuple[Traffic, ...]
    seconds: Seconds
    compiled_s: float
    cached: bool
    compiles: bool = True
    token: Counts | None = None

    @property
    def title(self) -> str:
        return f"{self.role} {self.name}"

    @property
    def total(self) -> int:
        """Peak bytes per device, with co-resident buffers."""
        return self.peak + self.co_resident

    @property
    def spare(self) -> int:
        """Bytes left on a device; negative if it does not fit."""
        return self.memory - self.total

    @property
    def fits(self) -> bool:
        """Whether the program and its co-resident buffers fit into a device."""
        return self.compiles and self.spare >= 0


def compile_program(
    program: Program,
    topology: Topology,
    residents: Iterable[ResidentBuffers],
    *,
    mesh: Mesh,
    dtype: str,
) -> CompiledProgram:
    """Compiles the functions of a program, and sums up their figures.

    Args:
      program: program to compile.
      topology: devices to compile for.
      residents: buffers that stay on the devices between programs.
      mesh: mesh of the program's role.
      dtype: data type of most matmuls, for their rate.
    """
    compiled, flops, traffic, token = [], 0.0, [], None
    for piece in program.pieces:
        traced = piece.function.trace(*piece.arguments, **piece.keywords)
        flops += piece.flops(traced.jaxpr.jaxpr)
        found = compile_piece(traced.lower(), topology)
        compiled.append(found)
        if found.text:
            moved = counted_collectives(
                *(found.text, mesh.size),
                open_loops=piece.open_loops,
                longest_branch=piece.longest_branch,
            )
            # Bytes are of the largest call; a step may make calls of smaller sizes.
            by_axes = traffic_of(moved, mesh, devices_per_host=topology.devices_per_host)
            if program.name == "generate":
                platform, longest = topology.accelerator.platform, piece.longest_branch
                token = CompiledText(found.text, platform, longest_branch=longest).decoding()
            runs = piece.calls * piece.used
            traffic += [each.times(runs, share=piece.share) for each in by_axes]
    traffic = merged(traffic)
    seconds = roofline(
        *(topology.accelerator, flops, program.reads, traffic), num_devices=mesh.size, dtype=dtype
    )
    return CompiledProgram(
        role=program.role,
        name=program.name,
        phase=program.phase,
        arguments=max(piece.arguments for piece in compiled),
        temporaries=max(piece.temporaries for piece in compiled),
        peak=_peak(program, compiled),
        co_resident=co_resident_bytes(program, residents),
        memory=topology.memory_bytes,
        flops=flops,
        reads=program.reads,
        traffic=tuple(traffic),
        seconds=seconds,
        compiled_s=sum(piece.seconds for piece in compiled),
        cached=all(piece.cached for piece in compiled),
        compiles=all(piece.fits for piece in compiled),
        token=token,
    )


def peak_here(program: Program) -> int:
    """Peak bytes per device of a program, compiled for the devices of its arguments."""
    compiled = []
    for piece in program.pieces:
        lowered = piece.function.lower(*piece.arguments, **piece.keywords)
        try:
            compiled.append(_described(lowered.compile(), "", 0.0))
        except jax.errors.JaxRuntimeError as error:
            compiled.append(_too_large(error, 0.0))
    return _peak(program, compiled)


def _peak(program: Program, compiled: Sequence[CompiledPiece]) -> int:
    if program.peak is None:
        return max(piece.peak for piece in compiled)
    return program.peak([piece.temporaries for piece in compiled])


def co_resident_bytes(program: Program, residents: Iterable[ResidentBuffers]) -> int:
    """Bytes per device of buffers that are neither arguments nor temporaries of a program."""
    return sum(
        held.bytes_per_device
        for held in residents
        if held.name not in program.holds
        and (held.sampling if program.phase == "sampling" else held.learning)
    )


def compile_piece(lowered: Any, topology: Topology) -> CompiledPiece:
    """Compiles a lowered function, or reads its figures from the cache.

    Args:
      lowered: function, lowered for devices of the topology.
      topology: the topology.
    """
    inputs = [topology.name, *(f"{name}={os.environ.get(name, '')}" for name in _FLAGS)]
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    inputs += [f"{name} {installed.get(name, 'none')}" for name in _COMPILERS]
    # Options of `jax.jit` are not in the program's text.
    inputs += [f"{name}={value}" for name, value in compiler_options(lowered)]
    # Everything that changes the result of the compiler is in the key, so a kept figure is never stale.
    key = hashlib.sha256("\n".join([*inputs, lowered.as_text()]).encode()).hexdigest()
    folder = cache_folder().parent.parent / "ahead"
    figures, text_file = folder / f"{key}.json", folder / f"{key}.hlo.gz"
    try:
        text = gzip.decompress(text_file.read_bytes()).decode()
        return CompiledPiece(**json.loads(figures.read_text()), text=text, cached=True)
    except (OSError, EOFError, ValueError, TypeError):
        pass  # absent or damaged
    # Compiling a large program takes minutes; its figures are a few kilobytes.
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as dump:
        is_tpu = topology.devices[0].platform == "tpu"
        options = {"xla_dump_to": dump} if is_tpu else None
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            found = _too_large(error, time.perf_counter() - start)
        else:
            seconds = time.perf_counter() - start
            # On TPUs from libtpu's dump: jaxlib may be too old to read its programs.
            texts = sorted(pathlib.Path(dump).glob(_TEXTS))
            text = texts[-1].read_text() if texts else compiled.as_text()
            found = _described(compiled, text, seconds)
    # The text is kept too, compressed: its collectives are counted anew each time.
    stored = dataclasses.asdict(found)
    del stored["text"], stored["cached"]
    # If the folder cannot be written, the next plan compiles again.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(text_file, gzip.compress(found.text.encode()))
        write_atomically(figures, json.dumps(stored).encode())
    return found


def _described(compiled: Any, text: str, seconds: float) -> CompiledPiece:
    memory = compiled.memory_analysis()
    arguments, inside = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    most = arguments + inside + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The compiler's peak has the buffers in host memory too.
    peak = min(getattr(memory, "peak_memory_in_bytes", 0) or most, most)
    return CompiledPiece(arguments, inside, peak, True, text, seconds)


def _too_large(error: Exception, seconds: float) -> CompiledPiece:
    # The figures of a program that the compiler refused for its memory; raises any other error again.
    match = _USED.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or match is None:
        raise error
    used = int(float(match[1]) * _SUFFIX[match[2]])
    return CompiledPiece(0, used, used, False, "", seconds)
