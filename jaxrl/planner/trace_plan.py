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

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core as jax_core

from jaxrl.config.batch_shapes import step_shape
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool
from jaxrl.planner.batch_flow import describe_flow
from jaxrl.planner.compiled.programs import Program
from jaxrl.planner.compiled.trace import abstract_batch, matmul_flops
from jaxrl.planner.memory import ResidentBuffers, activation_memory, update_memory
from jaxrl.planner.plan import Plan, PlannedPool, layout_names
from jaxrl.planner.planned_roles import PlannedRoles, abstract_meshes, planned_roles
from jaxrl.planner.slot_choice import with_counted_slots
from jaxrl.planner.step_load import load_of
from jaxrl.planner.step_programs import programs_of
from jaxrl.trainer.algorithm import algorithm_of
from jaxrl.trainer.roles import check_role_batches
from jaxrl.types import TrainBatch, ValueBatch

# Assumed memory of a device if a config chooses its slots by memory and no device is known.
ASSUMED_MEMORY = 80 * 10**9


def trace_plan(config: Config) -> Plan:
    """Traces a recipe without its devices and data, and counts the memory that it needs.

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
    config = with_counted_slots(config, algorithm, meshes, ASSUMED_MEMORY)
    check_role_batches(config, meshes)
    roles = planned_roles(config, algorithm, meshes)
    updates, flops = _traced(roles)
    pools = tuple(
        PlannedPool(
            pool.name,
            layout_names(pool),
            pool.num_devices,
            (*roles.resident_buffers(pool), *_in_updates(roles, pool, updates)),
        )
        for pool in roles.pools.values()
    )
    notes = (("shape of the model", roles.models.origin), *_notes(roles, slots_are_chosen))
    return Plan(
        title=f"{config.name}, {algorithm.dataflow.title}",
        pools=pools,
        notes=(*notes, *describe_flow(roles), *flops),
        left_out=tuple(_left_out(roles)),
    )


def _traced(roles: PlannedRoles) -> tuple[dict[str, jax_core.Jaxpr], list[tuple[str, str]]]:
    """Traces every program; returns the update of each role and the operations of each program."""
    updates, flops = {}, []
    for role, program, _ in programs_of(roles, load_of(roles.config)):
        traced = [_jaxpr(piece) for piece in program.pieces]
        if program.name == "update":
            (updates[role],) = traced
        total = _flops(program, traced)
        shown = f"{total / 1e15:,.1f} PFLOP" if total > 1e14 else f"{total / 1e9:,.1f} GFLOP"
        # Moving weights and caches has no arithmetic operations.
        if total:
            flops.append((f"{program.title}, traced", f"{shown} a step"))
    return updates, flops


def _jaxpr(piece: Any) -> jax_core.Jaxpr:
    function = functools.partial(piece.function, **piece.keywords)
    return jax.make_jaxpr(function)(*piece.arguments).jaxpr


def _flops(program: Program, traced: list[jax_core.Jaxpr]) -> float:
    return sum(
        piece.calls * piece.used * matmul_flops(jaxpr, open_loops=piece.open_loops)
        for piece, jaxpr in zip(program.pieces, traced, strict=True)
    )


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


def _notes(roles: PlannedRoles, slots_are_chosen: bool) -> Iterator[tuple[str, str]]:
    config = roles.config
    yield from roles.models.assumed
    if slots_are_chosen:
        size = f"{ASSUMED_MEMORY / 1e9:.0f} GB"
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
