"""Makes a traced plan: traces every program on meshes without devices, in seconds.

    config --> the run's own roles on abstract meshes
                 |
                 +-- every program of a step is traced: a wrong shape or sharding is an error
                 +-- memory.py: bytes per device of resident buffers and of the largest temporaries
                 +-- batch_flow.py: numbers of samples that a step draws, keeps and trains on
                 |
                 v
               Plan

The totals cover every term that follows from shapes, for every role and pool. Only compiling the programs
shows their other temporaries (`compile_plan.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core as jax_core

from jaxrl.config.batch_shapes import step_shape
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool
from jaxrl.planner.batch_flow import describe_flow
from jaxrl.planner.compiled.programs import Program
from jaxrl.planner.compiled.roofline import roofline
from jaxrl.planner.compiled.trace import abstract_batch
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.memory import ResidentBuffers, activation_memory, update_memory
from jaxrl.planner.plan import Plan, planned_pools, positions_on, settings_of
from jaxrl.planner.planned_roles import (
    PlannedRoles,
    abstract_meshes,
    check_num_devices,
    planned_roles,
)
from jaxrl.planner.simulation.systems import OURS, System
from jaxrl.planner.slot_choice import with_counted_slots
from jaxrl.planner.step_load import StepLengths, StepLoad, load_of
from jaxrl.planner.step_programs import programs_of
from jaxrl.planner.step_times import StepTimes, step_times
from jaxrl.trainer.algorithm import algorithm_of
from jaxrl.trainer.roles import check_role_batches
from jaxrl.types import TrainBatch, ValueBatch

# Assumed memory of a device if a config chooses its slots by memory and no device is known.
ASSUMED_MEMORY = 80 * 10**9


def trace_plan(
    config: Config,
    cluster: Cluster | None = None,
    *,
    lengths: StepLengths | None = None,
    system: System = OURS,
) -> Plan:
    """Traces a recipe without its devices and data, and counts the memory that it needs.

    Args:
      config: config of the run.
      cluster: devices to predict seconds for; None predicts none.
      lengths: lengths of texts; None assumes them.
      system: the system whose fixed costs a step has.

    Raises:
      UserError: settings contradict each other or the checkpoint, or something does not divide.
    """
    if config.mesh.layout == "auto":
        raise UserError(
            'mesh.layout "auto" searches when it sees the devices, and --dry_run has none; run '
            "`jaxrl plan --search --topology h100:16x8` (or what you have), or set mesh.layout to as_given"
        )
    algorithm, meshes = algorithm_of(config), abstract_meshes(config)
    slots_are_chosen = config.rollout.slots == "auto"
    memory = int(cluster.accelerator.memory_gb * 1e9) if cluster else ASSUMED_MEMORY
    config = with_counted_slots(config, algorithm, meshes, memory)
    check_role_batches(config, meshes)
    roles = planned_roles(config, algorithm, meshes)
    pools, positions = tuple(roles.pools.values()), {}
    if cluster is not None:
        check_num_devices(pools, cluster.name, cluster.accelerator, cluster.num_devices)
        positions = positions_on(pools, cluster)
    load = load_of(config, lengths, system)
    traced = tuple(_traced(roles, load))
    updates = {each.program.role: each.jaxprs[0] for each in traced if each.is_update}
    buffers = {
        name: (*roles.resident_buffers(pool), *_in_updates(roles, pool, updates))
        for name, pool in roles.pools.items()
    }
    notes = (("shape of the model", roles.models.origin), *_notes(roles, slots_are_chosen, memory))
    return Plan(
        title=f"{config.name}, {algorithm.dataflow.title}",
        pools=planned_pools(pools, positions, buffers),
        notes=(*notes, *describe_flow(roles), *_operations(traced)),
        left_out=tuple(_left_out(roles)),
        times=None if cluster is None else _times(roles, cluster, load, traced),
        settings=settings_of(roles.config),
    )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A traced program.

    Attributes:
      program: the program.
      num_devices: number of devices of its mesh.
      jaxprs: jaxpr of each of its functions.
    """

    program: Program
    num_devices: int
    jaxprs: tuple[jax_core.Jaxpr, ...]

    @property
    def is_update(self) -> bool:
        """Whether it is the update of a role."""
        return self.program.name == "update"

    @functools.cached_property
    def flops(self) -> float:
        """Operations of matmuls in a step, over the whole mesh."""
        pairs = zip(self.program.pieces, self.jaxprs, strict=True)
        return sum(piece.flops(jaxpr) for piece, jaxpr in pairs)


def _traced(roles: PlannedRoles, load: StepLoad) -> Iterator[_Traced]:
    """Traces every program of a step."""
    for _, program, mesh in programs_of(roles, load):
        yield _Traced(program, mesh.size, tuple(_jaxpr(piece) for piece in program.pieces))


def _operations(traced: Iterable[_Traced]) -> Iterator[tuple[str, str]]:
    """(program, operations of a step) pairs."""
    for each in traced:
        total = each.flops
        shown = f"{total / 1e15:,.1f} PFLOP" if total > 1e14 else f"{total / 1e9:,.1f} GFLOP"
        # Moving weights and caches has no arithmetic operations.
        if total:
            yield f"{each.program.title}, traced", f"{shown} a step"


def _times(
    roles: PlannedRoles, cluster: Cluster, load: StepLoad, traced: Iterable[_Traced]
) -> StepTimes:
    """Expected seconds, with the rooflines of traced programs; only compiling shows their traffic."""
    kind, dtype = cluster.accelerator, roles.config.train.dtype
    programs = [
        (
            each.program.role,
            each.program.name,
            each.program.phase,
            roofline(
                kind, each.flops, each.program.reads, num_devices=each.num_devices, dtype=dtype
            ),
        )
        for each in traced
    ]
    return step_times(roles, cluster, load, programs)


def _jaxpr(piece: Any) -> jax_core.Jaxpr:
    # Not `make_jaxpr`, inside of which no function may have compiler options.
    return piece.function.trace(*piece.arguments, **piece.keywords).jaxpr.jaxpr


def _in_updates(
    roles: PlannedRoles, pool: Pool, updates: dict[str, jax_core.Jaxpr]
) -> Iterator[ResidentBuffers]:
    """The temporaries that the updates of a pool's roles add, one role at a time."""
    shape = step_shape(roles.config)
    for name, role in roles.roles.learners.items():
        if name in pool.roles:
            batch = abstract_batch(role, shape, TrainBatch if name == "actor" else ValueBatch)
            yield from update_memory(name, role, shape, batch)
            layout = pool.layout_of(name)
            yield from activation_memory(name, role, layout, shape.rows, updates[name])


def _notes(roles: PlannedRoles, slots_are_chosen: bool, memory: int) -> Iterator[tuple[str, str]]:
    config = roles.config
    yield from roles.models.assumed
    if slots_are_chosen:
        size = f"{memory / 1e9:.0f} GB"
        yield (
            "rollout.slots",
            f"{config.rollout.slots:,}, as many as fit a device of {size} by their shapes",
        )
    if config.rollout.partial:
        yield "rollout.partial", "unfinished samples wait on the host from one step to the next"
    if config.sft.num_steps:
        yield "SFT", "the stage before: the same weights, batches of its own"


def _left_out(roles: PlannedRoles) -> Iterator[tuple[str, str]]:
    """(subject, reason) pairs of memory that is not counted."""
    if roles.config.cost.pretrain_coef and "cost" in roles.roles.others:
        yield "cost.pretrain_coef", "the batch of written solutions in every update"
