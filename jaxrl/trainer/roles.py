"""The roles of a run, built where the placement puts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.groupings import state_tables
from jaxrl.models import lora
from jaxrl.models.huggingface_config import read_config
from jaxrl.models.huggingface_weights import load_params
from jaxrl.roles.actor import Actor
from jaxrl.roles.critic import Critic
from jaxrl.roles.frozen import Judge, Reference
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.learner import Learner
from jaxrl.rollout import driver as offline
from jaxrl.rollout.engine import EngineConfig
from jaxrl.trainer.context import RunContext, engine_config
from jaxrl.trainer.cross_checks import roles_of
from jaxrl.types import Completions


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a run; None for those that its dataflow does without."""

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


def build_actor(run: RunContext, *, optim) -> Actor:
    """The actor with the programs of one stage; it has no weights yet."""
    config = run.config
    return Actor(
        run.model,
        run.mesh_of("actor"),
        **_shared(run, "actor"),
        optim=optim,
        engine=engine_config(config, run.stop_ids),
        temperature=config.rollout.temperature,
        seed=config.seed,
        rollout_mesh=_rollout_mesh(run),
        sampler=_sampler(config.rollout.driver),
    )


def _sampler(driver: str) -> Callable[..., Completions]:
    if driver == "offline":
        return offline.sample
    from jaxrl.rollout import jetstream

    return jetstream.sample


def _rollout_mesh(run: RunContext):
    """Where the actor samples, if not where it learns."""
    if "rollout" not in roles_of(run.config):
        return None
    mesh = run.mesh_of("rollout")
    return None if mesh is run.mesh_of("actor") else mesh


def build_roles(run: RunContext) -> Roles:
    """All roles of the config's dataflow. Models that do not learn have their weights, the others none yet."""
    config = run.config
    roles = roles_of(config)
    reference = None
    if "reference" in roles:
        reference = Reference(
            run.model,
            run.mesh_of("reference"),
            **_shared(run, "reference"),
            temperature=config.rollout.temperature,
        )
    return Roles(
        actor=build_actor(run, optim=config.optim),
        critic=_critic(run, "critic") if "critic" in roles else None,
        cost_critic=_critic(run, "cost_critic") if "cost_critic" in roles else None,
        reference=reference,
        reward=_judge(run, "reward", config.reward.model) if "reward" in roles else None,
        cost=_judge(run, "cost", config.cost.model) if "cost" in roles else None,
        judge=_generative_judge(run) if "judge" in roles else None,
    )


def _critic(run: RunContext, role: str) -> Critic:
    model = lora.base_config(run.model)
    directory = run.config.critic.weights
    if directory:
        model = dataclasses.replace(read_config(directory), num_tokens=run.model.num_tokens)
        _check_vocabulary(model, run, directory)
    return Critic(
        model,
        run.mesh_of(role),
        **_shared(run, role),
        optim=run.config.critic.optim,
        seed=run.config.seed,
    )


def _judge(run: RunContext, role: str, directory: str) -> Judge:
    model = read_config(directory)
    if not model.num_scores:
        raise UserError(
            f"{role}.model {directory} is a language model; it must be a ...ForSequenceClassification, "
            "with a head of scores, such as launch/reward_model.py trains"
        )
    _check_vocabulary(model, run, directory)
    judge = Judge(model, run.mesh_of(role), **_shared(run, role))
    judge.params = load_params(directory, model, judge.train_shardings)
    return judge


def _generative_judge(run: RunContext) -> GenerativeJudge:
    options = run.config.reward.judge
    model = read_config(options.model)
    if model.num_scores:
        raise UserError(
            f"reward.judge.model {options.model} is a model of scores, which says nothing in words; set "
            "reward.model to it, or name a language model"
        )
    tokenizer = load_tokenizer(options.model)
    model = dataclasses.replace(model, num_tokens=tokenizer.vocab_size)
    rollout = run.config.rollout
    judge = GenerativeJudge(
        model,
        run.mesh_of("judge"),
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


def _check_vocabulary(model, run: RunContext, directory: str) -> None:
    if model.vocab_size < run.tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer has {run.tokenizer.vocab_size} tokens, the model in {directory} "
            f"{model.vocab_size}; it reads the policy's tokens as they are, so use one with the same "
            "tokenizer"
        )


def _shared(run: RunContext, role: str) -> dict[str, Any]:
    """What every role's constructor takes, as its pool has it."""
    layout = run.placement.pool_of(role).config
    return {
        "train": run.config.train,
        "tables": state_tables(layout.sharding),
        "park": layout.park_training_state,
    }
