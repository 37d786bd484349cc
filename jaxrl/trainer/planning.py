"""What a recipe would take: from a config to the planner's dry run, and what that leaves out.

A later step completes the dry run. Until then everything a config asks for that is not counted is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl.config.schema import Config
from jaxrl.dataflows.lookup import find_dataflow
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.groupings import state_tables
from jaxrl.mesh.pools import Pool
from jaxrl.models import lora
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.batch_flow import BatchFlow
from jaxrl.planner.dry_run import dry_run
from jaxrl.planner.memory import Companion
from jaxrl.planner.tables import DryRun
from jaxrl.trainer.context import (
    check_batches,
    engine_config,
    pools_of,
    row_limits,
)
from jaxrl.trainer.cross_checks import check_algorithm, policy_objective, roles_of, title_of
from jaxrl.trainer.model_shape import is_here, model_of


def plan(config: Config) -> DryRun:
    """Traces a recipe without its devices and data, and counts what it would hold.

    Raises:
      UserError: settings contradict each other or the checkpoint, or something does not divide.
    """
    check_algorithm(config)
    pools = {role: pool for pool in pools_of(config) for role in pool.roles}
    sampler = "rollout" if "rollout" in pools else "actor"
    for pool in pools_of(config):
        check_batches(config, abstract_mesh(pool.layout), samples=pool is pools[sampler])
    home = pools["actor"]
    model, origin = model_of(config)
    companions, left_out = _companions(config, pools, model)
    hardware = f" ({config.hardware})" if config.hardware else ""
    return dry_run(
        f"{config.name}, {title_of(config)}{hardware}",
        model,
        home.layout,
        train=config.train,
        optim=config.optim,
        # Which ids end a response is the tokenizer's to say, and no shape depends on it.
        engine=engine_config(config, stop_ids=(0,)),
        temperature=config.rollout.temperature,
        objective=policy_objective(config),
        flow=_flow(config),
        tables=state_tables(home.config.sharding),
        offload=home.config.offload_training_state,
        companions=companions,
        notes=(("shape of the model", origin),),
        left_out=(*left_out, *_left_out(config, pools)),
    )


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


def _companions(
    config: Config, pools: dict[str, Pool], actor: ModelConfig
) -> tuple[tuple[Companion, ...], tuple[tuple[str, str], ...]]:
    """Roles whose weights lie beside the actor's and have a known shape; (role, why) of the others."""
    counted, left_out = [], []
    for role in roles_of(config):
        if role in ("actor", "rollout"):
            continue
        if pools[role] is not pools["actor"]:
            left_out.append(
                (role, f"it lives in pool {pools[role].name}, {pools[role].layout.name}")
            )
            continue
        if role == "judge":
            left_out.append((role, f"weights and cache of {config.reward.judge.model}"))
            continue
        directory = _directory_of(role, config)
        if directory and not is_here(directory):
            left_out.append((role, f"{directory} is not here, so its shape is not known"))
            continue
        model = read_config(directory) if directory else lora.base_config(actor)
        learns = config.critic.optim if role in ("critic", "cost_critic") else None
        counted.append(Companion(role, model, learns))
        if learns is not None:
            left_out.append((role, "gradients and activations of its update, which is not traced"))
    return tuple(counted), tuple(left_out)


def _directory_of(role: str, config: Config) -> str:
    """Where a role's weights come from; "" is the actor."""
    directories = {"reward": config.reward.model, "cost": config.cost.model}
    directories |= dict.fromkeys(("critic", "cost_critic"), config.critic.weights)
    return directories.get(role, "")


def _left_out(config: Config, pools: dict[str, Pool]) -> Iterator[tuple[str, str]]:
    """(what, why) of settings that take more, or place it elsewhere."""
    if "rollout" in pools and pools["rollout"] is not pools["actor"]:
        pool = pools["rollout"]
        yield (
            "rollout",
            f"it lives in pool {pool.name}, {pool.layout.name}: generation and its cache are counted as if "
            "the actor sampled on its own devices",
        )
    if config.rollout.partial:
        yield "rollout.partial", "unfinished samples, kept from one step to the next"
    if config.cost.pretrain_coef and "cost" in pools:
        yield "cost.pretrain_coef", "the batch of written solutions in every update"
    if config.warm_start.num_steps:
        yield "warm start", "the stage before: the same weights, batches of its own"
