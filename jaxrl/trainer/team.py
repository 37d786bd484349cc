"""The roles of a run, built where the placement puts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.mesh.groupings import state_tables
from jaxrl.mesh.hosts import put
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface_config import read_config
from jaxrl.models.huggingface_weights import load_adapter, load_params
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.roles.value import Critic
from jaxrl.rollout.backend import RolloutBackend
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig
from jaxrl.trainer.needs import critic_model, judge_model, score_model
from jaxrl.trainer.recipe import roles_of
from jaxrl.trainer.setup import Parts, engine_config


@dataclasses.dataclass(frozen=True)
class Team:
    """The roles of a run; None for those that its recipe does without."""

    actor: Actor
    critic: Critic | None = None
    cost_critic: Critic | None = None
    reference: Reference | None = None
    reward: RewardModel | None = None
    cost: RewardModel | None = None
    judge: GenerativeJudge | None = None

    @property
    def learners(self) -> dict[str, Learner]:
        """Roles whose state changes: what a checkpoint holds."""
        roles = {"actor": self.actor, "critic": self.critic, "cost_critic": self.cost_critic}
        return {name: role for name, role in roles.items() if role is not None}


def build_actor(parts: Parts, *, optim, samples: bool = True) -> Actor:
    """The actor with the programs of one stage; it has no weights yet. Without `samples` it only learns."""
    config = parts.config
    return Actor(
        parts.model,
        parts.mesh_of("actor"),
        **_shared(parts, "actor"),
        optim=optim,
        temperature=config.rollout.temperature,
        seed=config.seed,
        backend=_rollout_backend(parts) if samples else None,
    )


def _rollout_backend(parts: Parts) -> RolloutBackend:
    """What the actor samples with: where it learns, or where the role "rollout" is."""
    config = parts.config
    role = "rollout" if "rollout" in roles_of(config) else "actor"
    return build_backend(
        config.rollout.driver,
        parts.model,
        parts.mesh_of(role),
        engine_config(config, parts.stop_ids),
        parts.tokenizer.decode,
    )


def build_team(parts: Parts) -> Team:
    """All roles of the config's recipe. What scores and judges has its weights, the others have none yet."""
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
        reward=_reward_model(parts, "reward", config.reward.model) if "reward" in roles else None,
        cost=_reward_model(parts, "cost", config.cost.model) if "cost" in roles else None,
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
        team.reference.load(_copy(params, team.reference.train_shardings))


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


def _reward_model(parts: Parts, role: str, directory: str) -> RewardModel:
    model = score_model(f"{role}.model", directory)
    scorer = RewardModel(model, parts.mesh_of(role), **_shared(parts, role))
    scorer.load(load_params(directory, model, scorer.train_shardings))
    return scorer


def _generative_judge(parts: Parts) -> GenerativeJudge:
    options = parts.config.reward.judge
    model, tokenizer = judge_model(parts.config)
    mesh = parts.mesh_of("judge")
    rollout = parts.config.rollout
    # It samples as the policy does, with as many slots as it has verdicts at a time.
    settings = rollout.engine_settings(
        slots=options.slots, prefill_prompts=min(options.slots, rollout.prefill_prompts)
    )
    engine = EngineConfig(
        **settings,
        max_prompt_tokens=options.max_prompt_tokens,
        max_response_tokens=options.max_verdict_tokens,
        stop_ids=tokenizer.stop_ids,
    )
    # Not `rollout.driver`, which is the policy's.
    backend = build_backend("offline", model, mesh, engine, tokenizer.decode)
    _, shapes, axes = decoder_graph(model)
    where = shardings(axes, shapes, GENERATE_RULES, mesh)
    backend.load(load_params(options.model, model, where, dtype=backend.dtype))
    return GenerativeJudge(
        backend, tokenizer, max_prompt_tokens=options.max_prompt_tokens, chat=options.chat
    )


def _shared(parts: Parts, role: str) -> dict[str, Any]:
    """What every role's constructor takes, as its pool has it."""
    layout = parts.placement.pool_of(role).config
    return {
        "train": parts.config.train,
        "tables": state_tables(layout.sharding),
        "offload": layout.offload_training_state,
    }
