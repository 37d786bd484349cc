"""From a config and a topology to a plan: the programs of every role, compiled for what is not here."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.pools import Pool, take_devices, takes_all
from jaxrl.models.decoder import decoder_graph
from jaxrl.planner.abstract_roles import AbstractRoles, abstract_roles
from jaxrl.planner.compiled.ahead import CompiledProgram, compile_program
from jaxrl.planner.compiled.programs import (
    Program,
    StepLoad,
    critic_programs,
    engine_programs,
    frozen_programs,
    policy_programs,
    sampling_programs,
)
from jaxrl.planner.hardware.topologies import Topology, shapes_of_at_least
from jaxrl.planner.memory import Holding, generate_name, train_name
from jaxrl.planner.pod_plan import PlannedPool, PodPlan
from jaxrl.planner.slot_choice import with_compiled_slots
from jaxrl.planner.step_load import load_of
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.policy import Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.trainer.context import check_role_batches, pools_of
from jaxrl.trainer.cross_checks import (
    check_algorithm,
    policy_objective,
    shares_forward,
    title_of,
)

Watch = Callable[[CompiledProgram], None]


def plan_for(
    config: Config,
    topology: Topology,
    *,
    response_tokens: float = 0.0,
    save: pathlib.Path | None = None,
    watch: Watch = lambda _: None,
) -> PodPlan:
    """Compiles every program of a run's roles, and says what they take.

    Args:
      config: of the run.
      topology: what to compile for.
      response_tokens: of an answer on average; 0 takes a fifth of the limit.
      save: folder for the executables.
      watch: called with each program when it is compiled.

    Raises:
      UserError: settings contradict each other, do not divide, or want more memory than there is.
    """
    check_algorithm(config)
    roles = roles_on(config, topology, watch=watch)
    for pool in roles.pools.values():
        _check_holdings(pool, roles.holdings(pool), topology)
    load = load_of(config, response_tokens)
    pools = tuple(
        _planned(roles, pool, topology, load, save=save, watch=watch)
        for pool in roles.pools.values()
    )
    return PodPlan(
        title=f"{config.name}, {title_of(config)}",
        topology=topology,
        dtype=config.train.dtype,
        pools=pools,
        load=load,
        num_steps=config.run.num_steps,
        notes=(("shape of the model", roles.origin), *roles.assumed, *_notes(config, roles)),
    )


def roles_on(config: Config, topology: Topology, *, watch: Watch = lambda _: None) -> AbstractRoles:
    """The roles of a config on the devices of a topology.

    Args:
      config: of the run.
      topology: what to compile for.
      watch: called with each program that choosing the number of slots compiles.
    """
    pools = pools_of(config)
    wanted = sum(pool.num_devices for pool in pools)
    if wanted != len(topology.devices) and takes_all(pools):
        raise UserError(
            f"{topology.name} has {len(topology.devices)} devices, layout {pools[0].layout.name} needs "
            f"{wanted} (p*t*d); choose a topology of {wanted} devices, or change mesh.train"
        )
    placement = take_devices(pools, topology.devices)

    def mesh_of(_: Pool, role: str) -> Mesh:
        return placement.pool_of(role).mesh_of(role)

    def compile_and_watch(program: Program, mesh: Mesh, holdings: Sequence[Holding]) -> int:
        found = compile_program(program, topology, holdings, mesh=mesh)
        watch(found)
        return found.total

    config = with_compiled_slots(config, mesh_of, topology.memory_bytes, compile_and_watch)
    roles = abstract_roles(config, mesh_of)
    check_role_batches(config, roles.meshes)
    return roles


def programs_of(roles: AbstractRoles, load: StepLoad) -> Iterator[tuple[str, Program, Mesh]]:
    """(role, program, its mesh) of every program of a step."""
    config, shape = roles.config, roles.shape
    sampler = roles.meshes[roles.sampler]
    for program in sampling_programs(roles.actor, roles.engine, load):
        yield "rollout", program, sampler
    if roles.judge is not None:
        _, shapes, axes = decoder_graph(roles.judge.model)
        verdicts = dataclasses.replace(
            load, response_tokens=float(config.reward.judge.max_verdict_tokens)
        )
        mesh = roles.meshes["judge"]
        for program in engine_programs(
            roles.judge, verdicts, role="judge", shapes=shapes, axes=axes
        ):
            yield "judge", program, mesh
    objective = policy_objective(config)
    with_weights = objective.needs_reference and not roles.model.lora.rank
    reference = roles.frozen["reference"].abstract_params() if with_weights else None
    mesh = roles.meshes["actor"]
    for name, role in roles.frozen.items():
        assert isinstance(role, Reference | RewardModel)
        if name != "reference" or config.algorithm.kl.needs_ref_logprobs:
            for program in frozen_programs(name, role, shape, load):
                yield name, program, role.mesh
    for program in policy_programs(
        *(roles.actor, objective, shape, load),
        reference=reference,
        first_minibatch=int(shares_forward(config)),
        epochs=config.algorithm.epochs,
    ):
        yield "actor", program, mesh
    values = clipped_values(clip=config.critic.clip)
    for name, critic in roles.critics.items():
        epochs = config.critic.epochs
        for program in critic_programs(name, critic, values, shape, load, epochs=epochs):
            yield name, program, critic.mesh


def _planned(
    roles: AbstractRoles,
    pool: Pool,
    topology: Topology,
    load: StepLoad,
    *,
    save: pathlib.Path | None,
    watch: Watch,
) -> PlannedPool:
    holdings = roles.holdings(pool)
    compiled = []
    for role, program, mesh in programs_of(roles, load):
        if roles.pool_of(role) == pool:
            compiled.append(compile_program(program, topology, holdings, mesh=mesh, save=save))
            watch(compiled[-1])
            # Traced programs of large models are large, and are not wanted again.
            jax.clear_caches()
    return PlannedPool(
        *(pool.name, _layouts(pool), pool.num_devices, tuple(holdings), tuple(compiled))
    )


def _layouts(pool: Pool) -> str:
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


def _check_holdings(pool: Pool, holdings: Sequence[Holding], topology: Topology) -> None:
    """Raises UserError where weights, optimiser and cache alone want more than there is."""
    for phase in ("sampling", "learning"):
        present = [held for held in holdings if getattr(held, phase)]
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


def _notes(config: Config, roles: AbstractRoles) -> Iterator[tuple[str, Any]]:
    engine = roles.engine
    yield (
        "slots",
        f"{engine.config.slots:,} over {engine.shards} replicas, {engine.config.slots // engine.shards} on "
        f"each, room for {engine.cache_sizes[-1]:,} tokens in each",
    )
    if roles.pool_of("rollout") != roles.pool_of("actor"):
        yield (
            "weights",
            "sent from the actor's pool to the sampler's by transfer, which is not compiled",
        )
    if config.rollout.partial:
        yield (
            "rollout.partial",
            "unfinished samples are prefilled again, which is not in the seconds",
        )
    if config.cost.pretrain_coef and "cost" in roles.frozen:
        yield "cost.pretrain_coef", "the loss of written solutions is not in the compiled update"
    if config.warm_start.num_steps:
        yield "warm start", "not planned: the same weights, batches of its own"
