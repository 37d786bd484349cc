"""What a recipe would take: from a config to the planner's dry run, of every role and every pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.pools import Pool
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.planner.abstract_roles import AbstractRoles, abstract_roles
from jaxrl.planner.batch_flow import BatchFlow
from jaxrl.planner.dry_run import companion_memory, dry_run
from jaxrl.planner.memory import Holding
from jaxrl.planner.slot_choice import with_counted_slots
from jaxrl.planner.tables import DryRun, PoolHoldings
from jaxrl.roles.losses import clipped_values
from jaxrl.trainer.context import check_role_batches, engine_config, pools_of, row_limits
from jaxrl.trainer.cross_checks import check_algorithm, policy_objective, title_of

# Of a device, where a config lets its slots be chosen by it and there is none.
ASSUMED_MEMORY = 80 * 10**9


def plan(config: Config) -> DryRun:
    """Traces a recipe without its devices and data, and counts what it would hold.

    Raises:
      UserError: settings contradict each other or the checkpoint, or something does not divide.
    """
    if config.mesh.layout == "auto":
        raise UserError(
            'mesh.layout "auto" searches when it sees the devices, and --dry_run has none; run '
            "`jaxrl plan --search --topology h100:16x8` (or what you have), or set mesh.layout to as_given"
        )
    check_algorithm(config)
    chosen = config.rollout.slots == "auto"
    config = with_counted_slots(config, _mesh_of, ASSUMED_MEMORY)
    meshes = {role: _mesh_of(pool, role) for pool in pools_of(config) for role in pool.roles}
    check_role_batches(config, meshes)
    roles = abstract_roles(config, _mesh_of)
    home = roles.pool_of("actor")
    own = home.config_of("actor")
    hardware = f" ({config.hardware})" if config.hardware else ""
    return dry_run(
        f"{config.name}, {title_of(config)}{hardware}",
        roles.model,
        home.layout_of("actor"),
        train=config.train,
        optim=config.optim,
        # Which ids end a response is the tokenizer's to say, and no shape depends on it.
        engine=engine_config(config, stop_ids=(0,)),
        temperature=config.rollout.temperature,
        objective=policy_objective(config),
        flow=_flow(config),
        tables=state_rules(own.sharding),
        offload=own.offload_training_state,
        samples_here=roles.pool_of("rollout") == home,
        companions=_companions(roles, home),
        elsewhere=[
            PoolHoldings(pool.name, pool.layout, tuple(_of_pool(roles, pool)))
            for pool in roles.pools.values()
            if pool != home
        ],
        notes=(("shape of the model", roles.origin), *_notes(config, roles, chosen)),
        left_out=tuple(_left_out(config)),
    )


def _mesh_of(pool: Pool, role: str) -> Any:
    """Stands in for a Mesh: it has axes and sizes, which is all that tracing asks for, and no devices."""
    return abstract_mesh(pool.layout_of(role))


def _companions(roles: AbstractRoles, pool: Pool) -> list[Holding]:
    """What critics, and models that do not learn, hold on the devices of a pool, at their turn too."""
    found: list[Holding] = []
    objective = clipped_values(clip=roles.config.critic.clip)
    for name, role in (roles.critics | roles.frozen).items():
        if name in pool.roles:
            offload = pool.config_of(name).offload_training_state
            found += companion_memory(
                *(name, role, pool.layout_of(name), roles.shape),
                objective=objective,
                offload=offload,
            )
    return found + roles.judge_holdings(pool)


def _of_pool(roles: AbstractRoles, pool: Pool) -> list[Holding]:
    """What lies on the devices of a pool without the actor."""
    return roles.sampler_holdings(pool) + _companions(roles, pool)


def _notes(config: Config, roles: AbstractRoles, chosen: bool) -> Iterator[tuple[str, str]]:
    yield from roles.assumed
    if chosen:
        size = f"{ASSUMED_MEMORY / 1e9:.0f} GB"
        yield (
            "rollout.slots",
            f"{config.rollout.slots:,}, as many as fit a device of {size} by their shapes",
        )
    if config.rollout.partial:
        yield "rollout.partial", "unfinished samples wait on the host from one step to the next"
    if config.warm_start.num_steps:
        yield "warm start", "the stage before: the same weights, batches of its own"


def _left_out(config: Config) -> Iterator[tuple[str, str]]:
    """(what, why) of what takes memory and is not counted."""
    if config.cost.pretrain_coef and find_dataflow(config.algorithm.dataflow).roles.count("cost"):
        yield "cost.pretrain_coef", "the batch of written solutions in every update"


def _flow(config: Config) -> BatchFlow:
    rollout, dataflow = config.rollout, find_dataflow(config.algorithm.dataflow)
    dynamic = dataflow.dynamic_sampling
    return BatchFlow(
        rollout.generation_prompts if dynamic else rollout.num_prompts,
        rollout.max_generation_batches if dynamic else 1,
        rollout.num_prompts,
        rollout.num_samples,
        row_limits(config).shape(
            rollout.num_prompts * rollout.num_samples,
            minibatches=config.algorithm.updates_per_step,
        ),
        keeps_mixed_groups=dynamic,
        greedy_answers=dataflow.greedy_baseline,
    )
