"""The roles of a run, built where the placement puts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.mesh.groupings import state_tables
from jaxrl.mesh.hosts import put
from jaxrl.models import lora
from jaxrl.models.decoder import Params
from jaxrl.models.huggingface_config import read_config
from jaxrl.models.huggingface_weights import load_adapter, load_params
from jaxrl.roles.actor import Actor
from jaxrl.roles.critic import Critic
from jaxrl.roles.frozen import Judge, Reference
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner
from jaxrl.roles.packed_model import PackedModel
from jaxrl.rollout import driver as offline
from jaxrl.rollout.engine import EngineConfig
from jaxrl.trainer.needs import critic_model, judge_model, score_model
from jaxrl.trainer.recipe import roles_of
from jaxrl.trainer.setup import Parts, engine_config
from jaxrl.types import Completions


@dataclasses.dataclass(frozen=True)
class Team:
    """The roles of a run; None for those that its recipe does without."""

    actor: Actor
    critic: Critic | None = None
    cost_critic: Critic | None = None
    reference: Reference | None = None
    reward: Judge | None = None
    cost: Judge | None = None
    judge: GenerativeJudge | None = None

    @property
    def learners(self) -> dict[str, Learner]:
        """Roles whose state changes: what a checkpoint holds."""
        roles = {"actor": self.actor, "critic": self.critic, "cost_critic": self.cost_critic}
        return {name: role for name, role in roles.items() if role is not None}


def build_actor(parts: Parts, *, optim) -> Actor:
    """The actor with the programs of one stage; it has no weights yet."""
    config = parts.config
    return Actor(
        parts.model,
        parts.mesh_of("actor"),
        **_shared(parts, "actor"),
        optim=optim,
        engine=engine_config(config, parts.stop_ids),
        temperature=config.rollout.temperature,
        seed=config.seed,
        rollout_mesh=_rollout_mesh(parts),
        sampler=_sampler(config.rollout.driver),
    )


def _sampler(driver: str) -> Callable[..., Completions]:
    if driver == "offline":
        return offline.sample
    from jaxrl.rollout import jetstream

    return jetstream.sample


def _rollout_mesh(parts: Parts):
    """Where the actor samples, if not where it learns."""
    if "rollout" not in roles_of(parts.config):
        return None
    mesh = parts.mesh_of("rollout")
    return None if mesh is parts.mesh_of("actor") else mesh


def build_team(parts: Parts) -> Team:
    """All roles of the config's recipe. The judges have their weights, the others have none yet."""
    config = parts.config
    roles = roles_of(config)
    reference = None
    if "reference" in roles:
        reference = Reference(
            parts.model,
            parts.mesh_of("reference"),
            **_shared(parts, "reference"),
            temperature=config.rollout.temperature,
        )
    return Team(
        actor=build_actor(parts, optim=config.optim),
        critic=_critic(parts, "critic") if "critic" in roles else None,
        cost_critic=_critic(parts, "cost_critic") if "cost_critic" in roles else None,
        reference=reference,
        reward=_judge(parts, "reward", config.reward.model) if "reward" in roles else None,
        cost=_judge(parts, "cost", config.cost.model) if "cost" in roles else None,
        judge=_generative_judge(parts) if "judge" in roles else None,
    )


def first_weights(actor: Actor, parts: Parts) -> None:
    """Weights from the checkpoint that the config names, or random ones."""
    config = parts.config
    if not config.weights:
        actor.init()
        return
    params = load_params(config.weights, parts.model, actor.train_shardings)
    if config.adapter:
        adapters = load_adapter(config.adapter, parts.model, actor.train_shardings)
        params = lora.join(adapters, params)
    actor.start_from(params)


def start_from(team: Team, params: Params, parts: Parts) -> None:
    """Gives every learner and the reference their first weights: `params`, which the actor takes over."""
    keep_reference(team, params)
    for critic in (team.critic, team.cost_critic):
        if critic is not None:
            critic.start_from(_first_of_critic(critic, params, parts))
    team.actor.start_from(params)


def keep_reference(team: Team, params: Params) -> None:
    """Gives the reference, if there is one, a copy of the weights that training starts from."""
    if team.reference is not None:
        team.reference.params = _copy(params, team.reference.train_shardings)


def _first_of_critic(critic: Critic, params: Params, parts: Parts) -> Params:
    directory = parts.config.critic.weights
    if directory:
        stored = dataclasses.replace(read_config(directory), num_tokens=parts.model.num_tokens)
        loaded = PackedModel(stored, critic.mesh, train=critic.train, tables=critic.tables)
        return load_params(directory, stored, loaded.train_shardings)
    # Adapters are the policy's own way to learn: a critic starts from what is below them.
    trunk = lora.split(params)[1] if parts.model.lora.rank else params
    trunk = {name: leaf for name, leaf in trunk.items() if name != "unembedding"}
    where = {name: critic.train_shardings[name] for name in trunk}
    return _copy(trunk, where)


def _copy(params: Params, shardings: Any) -> Params:
    """The same values in buffers of their own, on another mesh or on the same one."""
    return jax.tree.map(lambda x, where: put(jnp.copy(x), where), params, shardings)


def _critic(parts: Parts, role: str) -> Critic:
    model = lora.base_config(parts.model)
    directory = parts.config.critic.weights
    if directory:
        model = dataclasses.replace(critic_model(directory), num_tokens=parts.model.num_tokens)
    return Critic(
        model,
        parts.mesh_of(role),
        **_shared(parts, role),
        optim=parts.config.critic.optim,
        seed=parts.config.seed,
    )


def _judge(parts: Parts, role: str, directory: str) -> Judge:
    model = score_model(f"{role}.model", directory)
    judge = Judge(model, parts.mesh_of(role), **_shared(parts, role))
    judge.params = load_params(directory, model, judge.train_shardings)
    return judge


def _generative_judge(parts: Parts) -> GenerativeJudge:
    options = parts.config.reward.judge
    model, tokenizer = judge_model(parts.config)
    rollout = parts.config.rollout
    judge = GenerativeJudge(
        model,
        parts.mesh_of("judge"),
        tokenizer=tokenizer,
        engine=EngineConfig(
            slots=options.slots,
            prefill_prompts=min(options.slots, rollout.prefill_prompts),
            max_prompt_tokens=options.max_prompt_tokens,
            max_response_tokens=options.max_verdict_tokens,
            tokens_per_dispatch=rollout.tokens_per_dispatch,
            stop_ids=tokenizer.stop_ids,
            dtype=jnp.dtype(rollout.dtype),
        ),
        chat=options.chat,
    )
    judge.params = load_params(options.model, model, judge.generate_shardings, dtype=rollout.dtype)
    return judge


def _shared(parts: Parts, role: str) -> dict[str, Any]:
    """What every role's constructor takes, as its pool has it."""
    layout = parts.placement.pool_of(role).config
    return {
        "train": parts.config.train,
        "tables": state_tables(layout.sharding),
        "park": layout.park_training_state,
    }
