"""Makes a traced plan: traces every program on meshes without devices, in seconds.

    config --> the run's own roles on abstract meshes
                 |
                 +-- every program of a step is traced: a wrong shape or sharding is an error
                 +-- memory.py: bytes per device of resident buffers and of the largest temporaries
                 +-- plan.py: numbers of samples that a step draws, keeps and trains on
                 |
                 v
               Plan

The totals cover every term that follows from shapes, for every role and pool. Only compiling the programs
shows their other temporaries: `compile_plan` compiles them for a topology, whose devices need not be present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import peak_memory
from jaxrl.mesh.pools import Pool
from jaxrl.trainer.resolved import resolve
from jaxrl_planner.compiled.ahead import CompiledProgram, compile_program, roofline
from jaxrl_planner.compiled.programs import Program
from jaxrl_planner.hardware.cluster import (
    Cluster,
    MixedCluster,
    Topology,
    group_of,
    shapes_of_at_least,
)
from jaxrl_planner.memory import ResidentBuffers
from jaxrl_planner.plan import PHASES, Plan, check_positions, describe_flow, planned_pool
from jaxrl_planner.planned_roles import (
    PlannedRoles,
    abstract_meshes,
    check_num_devices,
    meshes_on,
    planned_roles,
)
from jaxrl_planner.remat_choice import buffers_in_updates, chosen_remat, with_remat
from jaxrl_planner.simulation.workload import LengthDistribution
from jaxrl_planner.slot_choice import with_slots
from jaxrl_planner.step_load import load_of
from jaxrl_planner.step_times import step_times

# Assumed memory of a device if a config chooses its slots by memory and no device is known.
ASSUMED_MEMORY = 80 * 10**9


def trace_plan(
    config: Config,
    cluster: Cluster | MixedCluster | None = None,
    *,
    responses: LengthDistribution | None = None,
) -> Plan:
    """Traces a recipe without its devices and data, and counts the memory that it needs.

    Args:
      config: config of the run.
      cluster: devices to predict seconds for; None predicts none.
      responses: lengths of answers; None assumes them.

    Raises:
      UserError: settings contradict each other or the checkpoint, or something does not divide.
    """
    # Without devices there is nothing to search for.
    if config.mesh.searched:
        raise UserError(
            'mesh.layout "auto" searches when it sees the devices, and --dry_run has none; run `jaxrl plan '
            "--config RECIPE --search --topology h100:16x8` (or others), or set mesh.layout to as_given"
        )
    found = resolve(config)
    meshes = abstract_meshes(found.pools)
    slots_are_chosen = config.rollout.slots == "auto"
    remat_is_chosen = config.train.remat == "auto"
    kinds = [group.accelerator for group in cluster.groups] if cluster else []
    memory = min((int(kind.memory_gb * 1e9) for kind in kinds), default=ASSUMED_MEMORY)
    # The roles below have as many slots as were chosen.
    found = with_remat(with_slots(found, meshes, memory), meshes, memory)
    roles = planned_roles(found, meshes)
    config = roles.config
    if cluster is not None:
        pools = roles.pools
        if isinstance(cluster, Cluster):
            check_num_devices(pools, cluster.name, cluster.accelerator, cluster.num_devices)
        check_positions(pools, cluster)
    load = load_of(config, responses)
    updates, seconds, operations = {}, [], []
    for role, program, mesh in roles.programs(load):
        flops = 0.0
        for piece in program.pieces:
            # Not `make_jaxpr`, inside of which no function may have compiler options.
            jaxpr = piece.function.trace(*piece.arguments, **piece.keywords).jaxpr.jaxpr
            flops += piece.flops(jaxpr)
            if program.name == "update":
                updates[program.role] = jaxpr
        # Moving weights and caches has no arithmetic operations.
        if flops:
            shown = f"{flops / 1e15:,.1f} PFLOP" if flops > 1e14 else f"{flops / 1e9:,.1f} GFLOP"
            operations.append((f"{program.title}, traced", f"{shown} a step"))
        if cluster is not None:
            # Only compiling shows the traffic.
            floor = roofline(
                *(group_of(roles.pool_of(role), cluster).accelerator, flops, program.reads),
                num_devices=mesh.size,
                dtype=config.train.dtype,
            )
            seconds.append((program.role, program.name, program.phase, floor))
    pools = []
    for pool in roles.pools:
        buffers = *roles.resident_buffers(pool), *buffers_in_updates(roles, pool, updates)
        where = f"{group_of(pool, cluster).name}, " if isinstance(cluster, MixedCluster) else ""
        pools.append(planned_pool(pool, buffers, where=where))
    chosen = []
    if remat_is_chosen:
        chosen.append(("train.remat", chosen_remat(config, memory)))
    if slots_are_chosen:
        size = f"{memory / 1e9:.0f} GB"
        slots = f"{config.rollout.slots:,}, as many as fit a device of {size} by their shapes"
        chosen.append(("rollout.slots", slots))
    return Plan(
        title=f"{config.name}, {roles.resolved.dataflow.title}",
        pools=tuple(pools),
        notes=(*chosen, *_notes(roles), *operations),
        times=None if cluster is None else step_times(roles, cluster, load, seconds),
    )


Watch = Callable[[CompiledProgram], None]


def compile_plan(
    config: Config,
    topology: Topology,
    *,
    responses: LengthDistribution | None = None,
    watch: Watch = lambda _: None,
) -> Plan:
    """Compiles every program of a run's roles.

    Args:
      config: config of the run.
      topology: devices to compile for.
      responses: lengths of answers; None assumes them.
      watch: function called with each program after its compilation.

    Raises:
      UserError: settings contradict each other, do not divide, or need more memory than there is.
    """
    roles = roles_on(config, topology, watch=watch)
    cluster, pools = Cluster.parse(topology.name), roles.pools
    check_positions(pools, cluster)
    buffers = {pool.name: roles.resident_buffers(pool) for pool in pools}
    # Seconds, before minutes of compiling.
    for pool in pools:
        _check_buffers(pool, buffers[pool.name], topology)
    load, compiled = load_of(config, responses), {pool.name: [] for pool in pools}
    for role, program, mesh in roles.programs(load):
        name = roles.pool_of(role).name
        found = compile_program(
            *(program, topology, buffers[name]), mesh=mesh, dtype=config.train.dtype
        )
        compiled[name].append(found)
        watch(found)
        # Frees the traced program, which is large for large models and not needed again.
        jax.clear_caches()
    planned = tuple(planned_pool(p, buffers[p.name], compiled[p.name]) for p in pools)
    seconds = [(p.role, p.name, p.phase, p.seconds) for pool in planned for p in pool.programs]
    token = next((p.token for pool in planned for p in pool.programs if p.token), None)
    return Plan(
        title=f"{config.name}, {roles.resolved.dataflow.title}",
        pools=planned,
        notes=tuple(_notes(roles)),
        target=topology,
        times=step_times(roles, cluster, load, seconds, token),
    )


def roles_on(config: Config, topology: Topology, *, watch: Watch = lambda _: None) -> PlannedRoles:
    """Builds the roles of a config on the devices of a topology.

    Args:
      config: config of the run.
      topology: devices to compile for.
      watch: function called with each program that is compiled to choose the number of slots.
    """
    found = resolve(config)
    pools = found.pools
    check_num_devices(pools, topology.name, topology.accelerator, len(topology.devices))
    meshes = meshes_on(pools, topology.devices)

    def compile_and_watch(program: Program, mesh: Mesh, buffers: Sequence[ResidentBuffers]) -> int:
        compiled = compile_program(
            *(program, topology, buffers), mesh=mesh, dtype=config.train.dtype
        )
        watch(compiled)
        return compiled.total

    memory = topology.memory_bytes
    found = with_slots(found, meshes, memory, compile_and_watch)
    return planned_roles(with_remat(found, meshes, memory), meshes)


def _check_buffers(pool: Pool, buffers: Sequence[ResidentBuffers], topology: Topology) -> None:
    # Raises UserError if weights, optimiser state and cache alone exceed the memory of a device.
    for phase in PHASES:
        present = [held for held in buffers if getattr(held, phase)]
        needed, there = sum(h.bytes_per_device for h in present), topology.memory_bytes
        if needed <= there:
            continue
        largest = max(present, key=lambda held: held.bytes_per_device)
        most = largest.bytes_per_device / 1e9
        # A larger topology must have the other pools, too.
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
    config = roles.config
    yield "shape of the model", roles.models.origin
    yield from roles.models.assumed
    if config.rollout.partial:
        yield (
            "rollout.max_staleness",
            "unfinished samples wait on the host between steps; that they are prefilled again is not in the "
            "lower bound",
        )
    if config.sft.num_steps:
        yield "SFT", "not planned: the stage before has the same weights, and batches of its own"
    yield from describe_flow(roles)
    if config.cost.pretrain_coef and "cost" in roles.roles.others:
        yield "not counted: cost.pretrain_coef", "the batch of written solutions in every update"


def peak_memory_line(config: Config) -> str:
    """Describes the peak memory of this process, or on accelerators of its fullest device.

    Args:
      config: config of the run, without open settings.
    """
    measured, on_device = peak_memory()
    where = (
        "on the fullest device" if on_device else "in this process, programs and libraries included"
    )
    told = f"memory: at most {measured / 1e9:.2f} GB {where}"
    try:
        planned = planned_bytes(trace_plan(config), per_device=on_device)
    # A run that has succeeded must not fail here.
    except UserError as error:
        return f"{told} (no plan to compare with: {error})"
    return f"{told}; --dry_run counts {planned / 1e9:.2f} GB of arrays"


def planned_bytes(plan: Plan, *, per_device: bool) -> int:
    """Bytes that a traced plan needs in its larger phase.

    Args:
      plan: the plan.
      per_device: of the fullest device; otherwise of all devices of one process.
    """
    pools = [(pool, max(pool.bytes_in(phase) for phase in PHASES)) for pool in plan.pools]
    if per_device:
        return max(nbytes for _, nbytes in pools)
    return sum(pool.num_devices * nbytes for pool, nbytes in pools) // jax.process_count()
