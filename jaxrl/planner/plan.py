"""A plan: the memory and time that a run needs, from shapes and, if compiled, from the compiler.

    trace      buffers of every pool, operations of every program; on a topology
               also the expected seconds of a step                                   seconds
    compile    also memory, traffic and roofline of every program, on a topology     minutes
    search     the same as compile, for the mapping that the search finds            minutes

The memory of a program is the compiler's figure; other buffers are counted from shapes. Seconds and hours are
predictions and are marked as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.config.config_tree import flatten_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.pools import Pool, take_devices
from jaxrl.mesh.sharding_strategies import HYBRID
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.compiled.roofline import Seconds, seconds_of
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import Topology
from jaxrl.planner.layouts.drawing import in_words, phase_groups
from jaxrl.planner.measured_run import MeasuredRun
from jaxrl.planner.memory import ResidentBuffers, generate_name, phase_bytes
from jaxrl.planner.search.mapping import Alternative
from jaxrl.planner.simulation.workload import train_name
from jaxrl.planner.step_times import StepTimes

# Version of the JSON format; `jaxrl plan --compare` reads files of this version only.
VERSION = 1
_SAMPLERS = frozenset({"actor", "rollout", "judge"})
# Settings that a saved plan keeps: those that change memory or seconds of a step.
_SECTIONS = (
    "model.",
    "mesh.",
    "placement",
    "rollout.",
    "train.",
    "algorithm.",
    "optim.",
    "data.max",
)


@dataclasses.dataclass(frozen=True)
class PlannedPool:
    """A pool of devices.

    Attributes:
      name: name of the pool.
      layout: description of its training and generation layouts.
      num_devices: number of devices.
      resident_buffers: buffers on each device; in traced plans also the largest temporaries of updates.
      programs: compiled programs of its roles; empty in a traced plan.
      roles: names of its roles.
      devices: positions of its devices among those of the cluster; empty if no devices are named.
      groups: (kind, device groups in words) of each layout; the pool's first device is G1.
    """

    name: str
    layout: str
    num_devices: int
    resident_buffers: tuple[ResidentBuffers, ...]
    programs: tuple[CompiledProgram, ...] = ()
    roles: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    groups: tuple[tuple[str, str], ...] = ()

    def bytes_in(self, phase: str) -> int:
        """Bytes per device while "sampling" or "learning", without temporaries of compiled programs."""
        return phase_bytes(self.resident_buffers, phase)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a plan was compiled for.

    Attributes:
      topology: devices.
      dtype: data type of most matmuls.
    """

    topology: Topology
    dtype: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resources that a run needs. `plan_tables.show` prints it.

    Attributes:
      title: title of the run.
      pools: pools of devices.
      notes: (subject, text) pairs to print; in a traced plan also the batch flow of a step.
      left_out: (subject, reason) pairs of everything that is not counted.
      target: devices that it was compiled for; None if it was only traced.
      times: predicted seconds of a step; None if no devices are named.
      measured: a run to compare with; None without one.
      settings: settings that change memory or seconds, by dotted name; "auto" is replaced by what was chosen.
      alternatives: other mappings that are nearly as fast; None without a search.
      price_per_hour: price of a device for an hour, in any currency; None if none was given.
    """

    title: str
    pools: tuple[PlannedPool, ...]
    notes: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    target: Target | None = None
    times: StepTimes | None = None
    measured: MeasuredRun | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alternatives: tuple[Alternative, ...] | None = None
    price_per_hour: float | None = None

    @property
    def price(self) -> float | None:
        """Price of the expected run; None without a price per hour or without seconds."""
        if self.price_per_hour is None or self.times is None:
            return None
        return self.price_per_hour * self.times.chip_hours(self.times.step_s)

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """The compiled programs of all pools."""
        return tuple(program for pool in self.pools for program in pool.programs)

    @property
    def fits(self) -> bool:
        """Whether every compiled program fits; True for a traced plan, which has none."""
        return all(program.fits for program in self.programs)

    @property
    def compiled_s(self) -> float:
        """Seconds that compilation took."""
        return sum(program.compiled_s for program in self.programs)

    @property
    def compiled_for(self) -> Target:
        """The target; only for compiled plans."""
        assert self.target is not None, "this plan was traced, not compiled"
        return self.target

    def seconds(self, program: CompiledProgram) -> Seconds:
        """Lower bound of the seconds per step of a program."""
        target = self.compiled_for
        return seconds_of(program, target.topology.accelerator, target.dtype)

    def as_json(self) -> dict[str, Any]:
        """All figures, in bytes and seconds."""
        found: dict[str, Any] = {
            "version": VERSION,
            "title": self.title,
            "fits": self.fits,
            "notes": [list(note) for note in self.notes],
            "left_out": [list(each) for each in self.left_out],
        }
        if self.target is not None:
            found |= self._target_json(self.target)
        if self.times is not None:
            found["predicted"] = self.times.as_json()
        if self.price_per_hour is not None:
            found |= {"price_per_hour": self.price_per_hour, "price": self.price}
        if self.alternatives is not None:
            found["alternatives"] = [dataclasses.asdict(each) for each in self.alternatives]
        if self.measured is not None:
            found["measured"] = {
                "run": self.measured.name,
                "steps": list(self.measured.steps),
                "seconds": dict(self.measured.seconds),
                "step_s": self.measured.step_s,
                "differing_settings": list(self.measured.differing),
            }
        found["settings"] = dict(self.settings)
        return found | {"pools": [self._pool_json(pool) for pool in self.pools]}

    def _target_json(self, target: Target) -> dict[str, Any]:
        return {
            "topology": target.topology.name,
            "device": target.topology.kind,
            "devices": len(target.topology.devices),
            "memory_bytes": target.topology.memory_bytes,
            "compiled_s": round(self.compiled_s, 1),
        }

    def _pool_json(self, pool: PlannedPool) -> dict[str, Any]:
        return {
            "name": pool.name,
            "layout": pool.layout,
            "devices": pool.num_devices,
            "positions": list(pool.devices),
            "roles": list(pool.roles),
            "groups": [list(each) for each in pool.groups],
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
            "at_least_s": {**dataclasses.asdict(seconds), "total": seconds.total},
        }


def positions_on(pools: Sequence[Pool], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """The positions of each pool's devices on a cluster, in a run with a process on each host.

    Raises:
      UserError: there are too few devices, pools overlap, or a pool does not divide over the hosts.
    """
    try:
        placed = take_devices(pools, cluster.devices).pools
    except UserError as error:
        raise UserError(f"{cluster.name}, a process on each host: {error}") from error
    return {each.name: tuple(device.id for device in each.devices) for each in placed}


def planned_pools(
    pools: Sequence[Pool],
    positions: Mapping[str, tuple[int, ...]],
    buffers: Mapping[str, Sequence[ResidentBuffers]],
    programs: Mapping[str, Sequence[CompiledProgram]] | None = None,
) -> tuple[PlannedPool, ...]:
    """Describes pools: their devices, the device groups of their layouts, and what they hold.

    Args:
      pools: pools of the run.
      positions: positions of each pool's devices; empty if no devices are named.
      buffers: resident buffers, by name of the pool.
      programs: compiled programs, by name of the pool; None for a traced plan.
    """
    return tuple(
        PlannedPool(
            pool.name,
            _layout_names(pool),
            pool.num_devices,
            tuple(buffers[pool.name]),
            tuple(programs[pool.name]) if programs else (),
            roles=pool.roles,
            devices=positions.get(pool.name, ()),
            groups=tuple(_groups(pool)),
        )
        for pool in pools
    )


def settings_of(config: Config) -> dict[str, str]:
    """The settings of a config that a plan keeps, as text, by dotted name."""
    values = flatten_config(config).items()
    return {name: repr(value) for name, value in values if name.startswith(_SECTIONS)}


def _groups(pool: Pool) -> Iterator[tuple[str, str]]:
    """(layout's roles and kind, groups in words) of the layouts of a pool."""
    by_layout = _roles_by_layout(pool)
    for layout, roles in by_layout.items():
        whose = f"{' and '.join(roles)}, " if len(by_layout) > 1 else ""
        for kind, found in phase_groups(HYBRID, abstract_mesh(layout)):
            if kind.startswith("training") or not _SAMPLERS.isdisjoint(roles):
                yield f"{whose}{kind}", in_words(found)


def _layout_names(pool: Pool) -> str:
    """Describes how the roles of a pool are sharded."""
    by_layout = _roles_by_layout(pool)
    shown = []
    for layout, roles in by_layout.items():
        whose = f"{' and '.join(roles)} " if len(by_layout) > 1 else ""
        samples = not _SAMPLERS.isdisjoint(roles)
        generation = f", generation {generate_name(layout)}" if samples else ""
        shown.append(f"{whose}training {train_name(layout)}{generation}")
    return "; ".join(shown)


def _roles_by_layout(pool: Pool) -> dict[ParallelLayout, list[str]]:
    found: dict[ParallelLayout, list[str]] = {}
    for role, layout in pool.layouts.items():
        found.setdefault(layout, []).append(role)
    return found
