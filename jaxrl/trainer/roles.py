"""The roles of a run, built where the placement puts them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.roles.value import Critic
from jaxrl.rollout.backend import RolloutBackend
from jaxrl.rollout.drivers import build_backend
from jaxrl.trainer.context import RunContext, engine_config, judge_engine_config
from jaxrl.trainer.cross_checks import roles_of
from jaxrl.trainer.needs import critic_model, judge_model, score_model


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a run; None for those that its dataflow does without."""

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


def build_actor(run: RunContext, *, optim, samples: bool = True) -> Actor:
    """The actor with the programs of one stage; it has no weights yet. Without `samples` it only learns."""
    config = run.config
    return Actor(
        run.model,
        run.mesh_of("actor"),
        **_shared(run, "actor"),
        optim=optim,
        temperature=config.rollout.temperature,
        seed=config.seed,
        backend=_rollout_backend(run) if samples else None,
    )


def _rollout_backend(run: RunContext) -> RolloutBackend:
    """What the actor samples with: where it learns, or where the role "rollout" is."""
    config = run.config
    role = "rollout" if "rollout" in roles_of(config) else "actor"
    return build_backend(
        config.rollout.driver,
        run.model,
        run.mesh_of(role),
        engine_config(config, run.stop_ids),
        run.tokenizer.decode,
    )


def build_roles(run: RunContext) -> Roles:
    """All roles of the config's dataflow. Models that do not learn have their weights, others none yet."""
    config = run.config
    roles = roles_of(config)
    return Roles(
        actor=build_actor(run, optim=config.optim),
        critic=_critic(run, "critic") if "critic" in roles else None,
        cost_critic=_critic(run, "cost_critic") if "cost_critic" in roles else None,
        reference=build_reference(run, "reference") if "reference" in roles else None,
        reward=_reward_model(run, "reward", config.reward.model) if "reward" in roles else None,
        cost=_reward_model(run, "cost", config.cost.model) if "cost" in roles else None,
        judge=_generative_judge(run) if "judge" in roles else None,
    )


def build_reference(run: RunContext, pool_of: str) -> Reference:
    """A reference policy on the devices of a role; it has no weights yet."""
    return Reference(
        run.model,
        run.mesh_of(pool_of),
        **_shared(run, pool_of),
        temperature=run.config.rollout.temperature,
    )


def _critic(run: RunContext, role: str) -> Critic:
    model = lora.base_config(run.model)
    directory = run.config.critic.weights
    if directory:
        model = dataclasses.replace(critic_model(directory), num_tokens=run.model.num_tokens)
    return Critic(
        model,
        run.mesh_of(role),
        **_shared(run, role),
        optim=run.config.critic.optim,
        seed=run.config.seed,
    )


def _reward_model(run: RunContext, role: str, directory: str) -> RewardModel:
    model = score_model(f"{role}.model", directory)
    reward_model = RewardModel(model, run.mesh_of(role), **_shared(run, role))
    reward_model.load(load_params(directory, model, reward_model.train_shardings))
    return reward_model


def _generative_judge(run: RunContext) -> GenerativeJudge:
    options = run.config.reward.judge
    model, tokenizer = judge_model(run.config)
    mesh = run.mesh_of("judge")
    engine = judge_engine_config(run.config, tokenizer.stop_ids)
    # Not `rollout.driver`, which is the policy's.
    backend = build_backend("offline", model, mesh, engine, tokenizer.decode)
    _, shapes, axes = decoder_graph(model)
    where = shardings(axes, shapes, GENERATE_RULES, mesh)
    backend.load(load_params(options.model, model, where, dtype=backend.dtype))
    return GenerativeJudge(
        backend, tokenizer, max_prompt_tokens=options.max_prompt_tokens, chat=options.chat
    )


def _shared(run: RunContext, role: str) -> dict[str, Any]:
    """What every role's constructor takes, as its placement has it."""
    layout = run.placement.pool_of(role).pool.config_of(role)
    return {
        "train": run.config.train,
        "state_rules": state_rules(layout.sharding),
        "offload": layout.offload_training_state,
    }
