"""The roles of a config as shapes: built where the placement puts them, without weights.

What a dry run and a plan have in common. A role whose checkpoint is not here counts as large as the actor,
and that is said: a total has all of its terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.data.packing import PackedShape
from jaxrl.mesh.pools import Pool
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.heads import score_config
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.compiled.trace import sampler_shapes
from jaxrl.planner.memory import (
    Holding,
    engine_memory,
    role_memory,
    sampling_memory,
    training_memory,
)
from jaxrl.roles.frozen import Frozen
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.roles.value import Critic
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.trainer.context import engine_config, judge_engine_config, pools_of, row_limits
from jaxrl.trainer.cross_checks import roles_of
from jaxrl.trainer.model_shape import is_here, model_of


@dataclasses.dataclass(frozen=True)
class AbstractRoles:
    """The roles of a run, none of which has weights.

    Attributes:
      config: of the run.
      model: of the actor.
      origin: where its shape is from, for people.
      pools: by name, which roles live where.
      meshes: by role.
      actor, engine: what learns and what it samples with.
      critics, frozen: the others, by role.
      judge: the generative judge's engine.
      assumed: (what, why) of shapes that are not known.
    """

    config: Config
    model: ModelConfig
    origin: str
    pools: dict[str, Pool]
    meshes: dict[str, Mesh]
    actor: Actor
    engine: Engine
    critics: dict[str, Critic]
    frozen: dict[str, Frozen]
    judge: Engine | None
    assumed: tuple[tuple[str, str], ...]

    @property
    def shape(self) -> PackedShape:
        """[U, M, R, T] of what a step learns from."""
        rollout = self.config.rollout
        return row_limits(self.config).shape(
            rollout.num_prompts * rollout.num_samples,
            minibatches=self.config.algorithm.updates_per_step,
        )

    @property
    def sampler(self) -> str:
        """The role whose devices and layout the actor samples with."""
        return "rollout" if "rollout" in self.meshes else "actor"

    def pool_of(self, role: str) -> Pool:
        """Where a role lives; "rollout" is with the actor unless it has a place of its own."""
        homes = {role: pool for pool in self.pools.values() for role in pool.roles}
        return homes.get(role, homes["actor"])

    def holdings(self, pool: Pool) -> list[Holding]:
        """What lies on the devices of a pool from one program to the next."""
        found: list[Holding] = []
        offload = {role: pool.config_of(role).offload_training_state for role in pool.roles}
        if "actor" in pool.roles:
            state, layout = self.actor.abstract_state(), pool.layout_of("actor")
            found += training_memory(self.actor, layout, state, offload=offload["actor"])
        found += self.sampler_holdings(pool)
        for name, role in (self.critics | self.frozen).items():
            if name in pool.roles:
                found += role_memory(name, role, pool.layout_of(name), offload=offload[name])
        return found + self.judge_holdings(pool)

    def sampler_holdings(self, pool: Pool) -> list[Holding]:
        """The actor's weights and cache in generation, if it samples there."""
        if pool != self.pool_of("rollout"):
            return []
        sampler = sampler_shapes(self.engine, self.actor.shapes, self.actor.axes)
        state = self.actor.abstract_state()
        layout, dtype = pool.layout_of(self.sampler), self.engine.config.dtype
        if "actor" in pool.roles:
            return sampling_memory(layout, state, sampler, dtype)
        return engine_memory("rollout", layout, sampler, dtype)

    def judge_holdings(self, pool: Pool) -> list[Holding]:
        """The generative judge's weights and cache, if it lives there."""
        if self.judge is None or "judge" not in pool.roles:
            return []
        _, shapes, axes = decoder_graph(self.judge.model)
        sampler = sampler_shapes(self.judge, shapes, axes)
        return engine_memory("judge", pool.layout_of("judge"), sampler, self.judge.config.dtype)


# The mesh of a role in a pool, of devices that need not be here, or of none.
MeshOf = Callable[[Pool, str], Any]


def abstract_roles(config: Config, mesh_of: MeshOf) -> AbstractRoles:
    """Builds the roles of a config.

    Args:
      config: of the run.
      mesh_of: where a role would be.

    Raises:
      UserError: settings contradict each other or a checkpoint, or something does not divide.
    """
    pools = {pool.name: pool for pool in pools_of(config)}
    homes = {role: pool for pool in pools.values() for role in pool.roles}
    meshes = {role: mesh_of(pool, role) for role, pool in homes.items()}
    model, origin = model_of(config)
    models = models_of(config)
    assumed = [(role, why) for role, (_, why) in models.items() if why]

    def common(role: str) -> dict[str, Any]:
        tables = state_rules(homes[role].config_of(role).sharding)
        return {"mesh": meshes[role], "train": config.train, "state_rules": tables}

    # Which ids end a response is the tokenizer's to say, and no shape depends on it.
    engine = _engine(
        model, meshes.get("rollout", meshes["actor"]), engine_config(config, stop_ids=(0,))
    )
    actor = Actor(
        model,
        **common("actor"),
        optim=config.optim,
        temperature=config.rollout.temperature,
        seed=0,
        backend=OfflineBackend(engine, _no_text),
    )
    critics = {
        role: Critic(models[role][0], **common(role), optim=config.critic.optim, seed=0)
        for role in ("critic", "cost_critic")
        if role in models
    }
    frozen: dict[str, Frozen] = {
        role: RewardModel(score_config(models[role][0]), **common(role))
        for role in ("reward", "cost")
        if role in models
    }
    if "reference" in models:
        temperature = config.rollout.temperature
        frozen["reference"] = Reference(model, **common("reference"), temperature=temperature)
    judge = None
    if "judge" in models:
        judge = _engine(
            models["judge"][0], meshes["judge"], judge_engine_config(config, stop_ids=(0,))
        )
    return AbstractRoles(
        *(config, model, origin, pools, meshes, actor, engine, critics, frozen, judge),
        assumed=tuple(assumed),
    )


def models_of(config: Config) -> dict[str, tuple[ModelConfig, str]]:
    """role -> its model, and what is assumed of it; "" if that is known."""
    actor, _ = model_of(config)
    found = {}
    for role in roles_of(config):
        if role == "rollout":
            continue
        directory, model, why = _directory_of(role, config), lora.base_config(actor), ""
        if role in ("actor", "reference"):
            model = actor
        elif directory and is_here(directory):
            model = read_config(directory)
        elif directory:
            why = (
                f"counted as large as the actor: {directory} is not here, so its shape is not known"
            )
        found[role] = (model, why)
    return found


def _engine(model: ModelConfig, mesh: Mesh, config: EngineConfig) -> Engine:
    return Engine(model, decoder_graph(model)[0], mesh, config)


def _directory_of(role: str, config: Config) -> str:
    """Where a role's weights come from; "" is the actor."""
    directories = {"reward": config.reward.model, "cost": config.cost.model}
    directories |= dict.fromkeys(("critic", "cost_critic"), config.critic.weights)
    directories["judge"] = config.reward.judge.model
    return directories.get(role, "")


def _no_text(tokens: np.ndarray) -> str:
    raise AssertionError(f"shapes are not spelled, and {len(tokens)} tokens are")
