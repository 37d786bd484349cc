"""Compiles the programs of every role for a topology; its devices need not be present."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Pool
from jaxrl.planner.compiled.ahead import CompiledProgram, compile_program
from jaxrl.planner.compiled.programs import Program
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import Topology, shapes_of_at_least
from jaxrl.planner.memory import ResidentBuffers
from jaxrl.planner.plan import Plan, Target, planned_pools, positions_on, settings_of
from jaxrl.planner.planned_roles import (
    PlannedRoles,
    check_num_devices,
    meshes_on,
    planned_roles,
)
from jaxrl.planner.simulation.systems import OURS, System
from jaxrl.planner.slot_choice import with_compiled_slots
from jaxrl.planner.step_load import StepLengths, StepLoad, load_of
from jaxrl.planner.step_programs import programs_of
from jaxrl.planner.step_times import step_times
from jaxrl.trainer.algorithm import algorithm_of, pools_of
from jaxrl.trainer.roles import check_role_batches

Watch = Callable[[CompiledProgram], None]


def compile_plan(
    config: Config,
    topology: Topology,
    *,
    lengths: StepLengths | None = None,
    system: System = OURS,
    save: pathlib.Path | None = None,
    watch: Watch = lambda _: None,
) -> Plan:
    """Compiles every program of a run's roles.

    Args:
      config: config of the run.
      topology: devices to compile for.
      lengths: lengths of texts; None assumes them.
      system: the system whose fixed costs a step has.
      save: folder for the executables; None does not save them.
      watch: function called with each program after its compilation.

    Raises:
      UserError: settings contradict each other, do not divide, or need more memory than there is.
    """
    roles = roles_on(config, topology, watch=watch)
    buffers = {name: roles.resident_buffers(pool) for name, pool in roles.pools.items()}
    for name, pool in roles.pools.items():
        _check_buffers(pool, buffers[name], topology)
    load = load_of(config, lengths, system)
    programs = {
        name: _compiled(roles, pool, buffers[name], topology, load, save=save, watch=watch)
        for name, pool in roles.pools.items()
    }
    cluster, pools = Cluster.parse(topology.name), tuple(roles.pools.values())
    plan = Plan(
        title=f"{config.name}, {roles.algorithm.dataflow.title}",
        pools=planned_pools(pools, positions_on(pools, cluster), buffers, programs),
        notes=(("shape of the model", roles.models.origin), *roles.models.assumed, *_notes(roles)),
        target=Target(topology, config.train.dtype),
        settings=settings_of(roles.config),
    )
    seconds = [(p.role, p.name, p.phase, plan.seconds(p)) for p in plan.programs]
    times = step_times(roles, cluster, load, seconds)
    return dataclasses.replace(plan, times=times)


def roles_on(config: Config, topology: Topology, *, watch: Watch = lambda _: None) -> PlannedRoles:
    """Builds the roles of a config on the devices of a topology.

    Args:
      config: config of the run.
      topology: devices to compile for.
      watch: function called with each program that is compiled to choose the number of slots.
    """
    algorithm = algorithm_of(config)
    pools = pools_of(config, algorithm.roles)
    check_num_devices(pools, topology.name, topology.accelerator, len(topology.devices))
    meshes = meshes_on(config, topology.devices)

    def compile_and_watch(program: Program, mesh: Mesh, buffers: Sequence[ResidentBuffers]) -> int:
        found = compile_program(program, topology, buffers, mesh=mesh)
        watch(found)
        return found.total

    memory = topology.memory_bytes
    config = with_compiled_slots(config, algorithm, meshes, memory, compile_and_watch)
    roles = planned_roles(config, algorithm, meshes)
    check_role_batches(config, meshes)
    return roles


def _compiled(
    roles: PlannedRoles,
    pool: Pool,
    buffers: Sequence[ResidentBuffers],
    topology: Topology,
    load: StepLoad,
    *,
    save: pathlib.Path | None,
    watch: Watch,
) -> list[CompiledProgram]:
    compiled = []
    for role, program, mesh in programs_of(roles, load):
        if roles.pool_of(role) == pool:
            compiled.append(compile_program(program, topology, buffers, mesh=mesh, save=save))
            watch(compiled[-1])
            # Frees the traced program, which is large for large models and not needed again.
            jax.clear_caches()
    return compiled


def _check_buffers(pool: Pool, buffers: Sequence[ResidentBuffers], topology: Topology) -> None:
    """Raises UserError if weights, optimiser state and cache alone exceed the memory of a device."""
    for phase in ("sampling", "learning"):
        present = [held for held in buffers if getattr(held, phase)]
        needed, there = sum(h.bytes_per_device for h in present), topology.memory_bytes
        if needed <= there:
            continue
        largest = max(present, key=lambda held: held.bytes_per_device)
        most = largest.bytes_per_device / 1e9
        others = len(topology.devices) - pool.num_devices
        enough = others + -(-needed * pool.num_devices // there)
        remedy = (
            "fewer rollout.slots"
            if "cache" in largest.name and needed - largest.bytes_per_device < there
            else f"{shapes_of_at_least(topology.accelerator, enough)}, "
            "mesh.offload_training_state=True, or a smaller model"
        )
        raise UserError(
            f"{topology.name} is too small: while {phase} a device would hold {needed / 1e9:.1f} GB before "
            f"any program runs ({largest.name}: {most:.1f} GB), and has {there / 1e9:.1f}; use {remedy}"
        )


def _notes(roles: PlannedRoles) -> Iterator[tuple[str, Any]]:
    config, engine = roles.config, roles.engine
    yield (
        "slots",
        f"{engine.config.slots:,} over {engine.shards} replicas, {engine.config.slots // engine.shards} on "
        f"each, room for {engine.cache_sizes[-1]:,} tokens in each",
    )
    if (pages := engine.pages) is not None:
        yield (
            "pages",
            f"{pages.num_pages - 1:,} of {pages.page_tokens} tokens on each replica, for all its slots",
        )
    if roles.pool_of("rollout") != roles.pool_of("actor"):
        yield (
            "weights",
            "sent from the actor's pool to the sampler's by transfer, which is not compiled",
        )
    if config.rollout.partial:
        yield (
            "rollout.partial",
            "unfinished samples are prefilled again, which is not in the lower bound",
        )
    if config.cost.pretrain_coef and "cost" in roles.roles.others:
        yield "cost.pretrain_coef", "the loss of written solutions is not in the compiled update"
    if config.sft.num_steps:
        yield "SFT", "not planned: the same weights, batches of its own"
