"""A plan: what a run would take of its devices, by shapes, and by what a compiler says where one was asked.

    trace      buffers of every pool, operations of every program                    seconds
    compile    and memory, traffic and the roofline of every program, on a topology   minutes
    search     the same, for the mapping that the search finds                        minutes

The memory of a program is the compiler's own figure; what lies beside it is counted from shapes. Seconds and
hours are predicted, and marked so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.pools import Pool
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.compiled.programs import StepLoad
from jaxrl.planner.compiled.roofline import Seconds, chip_hours, seconds_of
from jaxrl.planner.hardware.topologies import Topology
from jaxrl.planner.memory import ResidentBuffers, generate_name, phase_bytes, train_name


@dataclasses.dataclass(frozen=True)
class PlannedPool:
    """A pool of devices.

    Attributes:
      name: of the pool.
      layout: training and generation, for people.
      num_devices: of the pool.
      resident_buffers: what lies on each device; traced plans count the largest temporaries of updates too.
      programs: of its roles, compiled; none in a traced plan.
    """

    name: str
    layout: str
    num_devices: int
    resident_buffers: tuple[ResidentBuffers, ...]
    programs: tuple[CompiledProgram, ...] = ()

    def bytes_in(self, phase: str) -> int:
        """Bytes of a device while "sampling" or "learning", before what compiled programs need besides."""
        return phase_bytes(self.resident_buffers, phase)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a plan was compiled for, and what a step is taken to do there.

    Attributes:
      topology: the devices.
      dtype: of most matmuls.
      load: of a step.
      num_steps: of the run.
    """

    topology: Topology
    dtype: str
    load: StepLoad
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would take. `plan_tables.show` prints it.

    Attributes:
      title: of the run.
      pools: of devices.
      notes: (what, which) for people; in a traced plan the flow of a step too.
      left_out: (what, why) is not counted.
      target: what it was compiled for; None if it was traced alone.
    """

    title: str
    pools: tuple[PlannedPool, ...]
    notes: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    target: Target | None = None

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """Of all pools."""
        return tuple(program for pool in self.pools for program in pool.programs)

    @property
    def fits(self) -> bool:
        """Every compiled program does; a traced plan has none that could not."""
        return all(program.fits for program in self.programs)

    @property
    def compiled_s(self) -> float:
        """Seconds of compiling, when it was done."""
        return sum(program.compiled_s for program in self.programs)

    @property
    def compiled_for(self) -> Target:
        """What it was compiled for."""
        assert self.target is not None, "this plan was traced, not compiled"
        return self.target

    def seconds(self, program: CompiledProgram) -> Seconds:
        """Predicted, of a program in a step."""
        return seconds_of(program, self.compiled_for.topology, self.compiled_for.dtype)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: programs of a pool one after the other, pools side by side."""
        return max(sum(self.seconds(p).total for p in pool.programs) for pool in self.pools)

    @property
    def chip_hours(self) -> float:
        """Predicted, of the run."""
        target = self.compiled_for
        return chip_hours([self.step_s], len(target.topology.devices), target.num_steps)

    def as_json(self) -> dict[str, Any]:
        """Everything, in bytes and seconds."""
        found: dict[str, Any] = {
            "title": self.title,
            "fits": self.fits,
            "notes": [list(note) for note in self.notes],
            "left_out": [list(each) for each in self.left_out],
        }
        if self.target is not None:
            found |= self._target_json(self.target)
        return found | {"pools": [self._pool_json(pool) for pool in self.pools]}

    def _target_json(self, target: Target) -> dict[str, Any]:
        return {
            "topology": target.topology.name,
            "device": target.topology.kind,
            "devices": len(target.topology.devices),
            "memory_bytes": target.topology.memory_bytes,
            "load": dataclasses.asdict(target.load),
            "compiled_s": round(self.compiled_s, 1),
            "predicted": {
                "step_s": self.step_s,
                "steps": target.num_steps,
                "chip_hours": self.chip_hours,
            },
        }

    def _pool_json(self, pool: PlannedPool) -> dict[str, Any]:
        return {
            "name": pool.name,
            "layout": pool.layout,
            "devices": pool.num_devices,
            "resident_buffers": [dataclasses.asdict(held) for held in pool.resident_buffers],
            "bytes": {phase: pool.bytes_in(phase) for phase in ("sampling", "learning")},
            "programs": [self._program_json(program) for program in pool.programs],
        }

    def _program_json(self, program: CompiledProgram) -> dict[str, Any]:
        named = ("role", "name", "phase", "arguments", "temporaries", "peak", "co_resident")
        seconds = self.seconds(program)
        return {
            **{name: getattr(program, name) for name in named},
            "total": program.total,
            "spare": program.spare,
            "fits": program.fits,
            "compiled_s": round(program.compiled_s, 1),
            "cached": program.cached,
            "flops": program.flops,
            "reads": program.reads,
            "traffic": [dataclasses.asdict(each) for each in program.traffic],
            "predicted": {**dataclasses.asdict(seconds), "total": seconds.total},
        }


def layout_names(pool: Pool) -> str:
    """How the roles of a pool are split, for people."""
    by_layout: dict[ParallelLayout, list[str]] = {}
    for role, layout in pool.layouts.items():
        by_layout.setdefault(layout, []).append(role)
    shown = []
    for layout, roles in by_layout.items():
        whose = f"{' and '.join(roles)} " if len(by_layout) > 1 else ""
        samples = not {"actor", "rollout", "judge"}.isdisjoint(roles)
        generation = f", generation {generate_name(layout)}" if samples else ""
        shown.append(f"{whose}training {train_name(layout)}{generation}")
    return "; ".join(shown)
