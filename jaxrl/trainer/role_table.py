"""The table of roles besides the actor: where the weights of each are, how it is built, its phase or reward.

To add a role: its class and settings in `roles/`, its phase and a dataflow in `dataflows/`, a row here, and
its settings in `config/schema.py`. The builder of roles, the loader of weights, the checks before a run, the
rewards and the planner read this table. The actor has no row: it is built first, and others start from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxrl.config.batch_shapes import (
    check_judge_batches,
    check_training_batches,
    judge_engine_config,
    row_limits,
)
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.dataflows.costs import CostPhase
from jaxrl.dataflows.distill import OwnRows, TeacherPhase
from jaxrl.dataflows.learning import CriticPhase
from jaxrl.dataflows.preparation import ReferencePhase
from jaxrl.dataflows.rewarding import JudgeReward, ModelReward, RewardTerm, SequenceScores
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.errors import UserError
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import check_params, load_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.judge import JudgeTemplate, score_parser
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.roles.teacher import TeacherPrompts
from jaxrl.roles.value import Critic
from jaxrl.rollout.drivers import build_backend


@dataclasses.dataclass(frozen=True)
class BuildParts:
    """Arguments of the function that builds a role.

    Attributes:
      config: config of the run.
      model: model of the role.
      place: keyword arguments of every constructor: mesh, train, state_rules and offload.
      tokenizer: tokenizer of the role's own model; the policy's if it has none.
    """

    config: Config
    model: ModelConfig
    place: Mapping[str, Any]
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class PhaseParts:
    """Arguments of the function that builds a phase, besides its role.

    Attributes:
      config: config of the run.
      actor: actor of the run.
      timer: timer of the step.
      encode: function that turns a text into token ids, by the policy's tokenizer.
    """

    config: Config
    actor: Actor
    timer: StepTimer
    encode: Callable[[str], np.ndarray]


def _load_frozen(role: Any, model: ModelConfig, directory: str) -> None:
    role.load(load_params(directory, model, role.train_shardings))


@dataclasses.dataclass(frozen=True)
class RoleRow:
    """A role besides the actor.

    Attributes:
      build: function that builds the role without weights.
      phase: function of (name, role, parts) that builds the role's member of a step, for `Step.phase`; None
        for a role without a phase. The role is None if the run does not have it.
      reward: function of (role, config) that makes a term of the reward from the role; None for a role that
        rewards nothing.
      setting: name of the setting with the directory of its weights; "" for a role without one.
      weights: function of the config that returns this directory; "" means the policy's weights.
      check: function of (config, setting, directory) that raises UserError if the model cannot have the role.
        It returns the tokenizer if the role has its own.
      check_batches: function of (config, mesh) that raises UserError for batches that the mesh does not
        divide.
      load: function of (role, model, directory) that loads the weights of a frozen role.
      needs_weights: whether the config must name its weights if the run has the role.
      where_used: whether a dataflow that declares the role does without it unless a setting asks for it.
      by_setting: whether every run that sets `setting` has the role, whatever its dataflow declares.
      scores: whether its model has a score head.
      adapters: whether its model has the policy's adapters.
      trains: whether it has an optimiser.
      same_tokens: whether the tokenizer in its directory, if any, must have the policy's tokens.
      own_tokenizer: whether it reads texts with its own tokenizer instead of the policy's tokens.
      compared: whether the actor's loss can have the KL to it over the whole vocabulary.
    """

    build: Callable[[BuildParts], Any]
    phase: Callable[[str, Any, PhaseParts], Any] | None = None
    reward: Callable[[Any, Config], RewardTerm] | None = None
    setting: str = ""
    weights: Callable[[Config], str] = lambda config: ""
    check: Callable[[Config, str, str], Tokenizer | None] = lambda config, setting, directory: None
    check_batches: Callable[[Config, Mesh | AbstractMesh], None] = check_training_batches
    load: Callable[[Any, ModelConfig, str], None] = _load_frozen
    needs_weights: bool = False
    where_used: bool = False
    by_setting: bool = False
    scores: bool = False
    adapters: bool = False
    trains: bool = False
    same_tokens: bool = False
    own_tokenizer: bool = False
    compared: bool = False


# Checks of directories.


def _check_critic(config: Config, setting: str, directory: str) -> None:
    del config, setting
    check_params(directory, read_config(directory))


def _check_score_model(config: Config, setting: str, directory: str) -> None:
    del config
    model = read_config(directory)
    if not model.num_scores:
        raise UserError(
            f"{setting} {directory} is a language model; it must be a ...ForSequenceClassification, "
            "with a head of scores, such as configs/reward_tiny.py trains"
        )
    check_params(directory, model)


def _check_language_model(config: Config, setting: str, directory: str) -> None:
    del config
    model = read_config(directory)
    if model.num_scores:
        raise UserError(
            f"{setting} {directory} is a model of scores, which gives no tokens probabilities; name a "
            "language model"
        )
    check_params(directory, model)


def _check_judge(config: Config, setting: str, directory: str) -> Tokenizer:
    model = read_config(directory)
    if model.num_scores:
        raise UserError(
            f"{setting} {directory} is a model of scores, which says nothing in words; set "
            "reward.model to it, or name a language model"
        )
    check_params(directory, model)
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; put two files of one model there"
        )
    if config.reward.judge.chat and tokenizer.chat_template is None:
        raise UserError(
            f"{directory} has no chat template; set reward.judge.chat to False, or put a "
            "chat_template.jinja there"
        )
    return tokenizer


# Builders, and how weights get in.


def _critic(parts: BuildParts) -> Critic:
    config = parts.config
    optim = config.critic.optim(config.optim)
    return Critic(parts.model, **parts.place, optim=optim, seed=config.seed)


def _score_model(parts: BuildParts) -> RewardModel:
    return RewardModel(parts.model, **parts.place)


def _reference(parts: BuildParts) -> Reference:
    temperature = parts.config.rollout.temperature
    return Reference(parts.model, **parts.place, temperature=temperature)


def _judge(parts: BuildParts) -> GenerativeJudge:
    options, tokenizer = parts.config.reward.judge, parts.tokenizer
    # "offline", whatever `rollout.driver` is: that setting is about the policy.
    backend = build_backend(
        "offline",
        parts.model,
        parts.place["mesh"],
        judge_engine_config(parts.config, tokenizer.stop_ids),
        tokenizer.decode_batch,
    )
    return GenerativeJudge(
        backend, tokenizer, max_prompt_tokens=options.max_prompt_tokens, chat=options.chat
    )


def _load_judge(judge: GenerativeJudge, model: ModelConfig, directory: str) -> None:
    backend = judge.backend
    _, shapes, axes = decoder_graph(model)
    where = shardings(axes, shapes, GENERATE_RULES, backend.mesh)
    backend.load(load_params(directory, model, where, dtype=backend.dtype))


# Phases.


def _critic_phase(name: str, critic: Critic | None, parts: PhaseParts) -> CriticPhase | None:
    if critic is None:
        return None
    options = parts.config.critic
    values = clipped_values(clip=options.clip)
    return CriticPhase(name, critic, values, parts.timer, epochs=options.epochs)


def _reference_phase(name: str, reference: Reference | None, parts: PhaseParts) -> ReferencePhase:
    del name
    asked = parts.config.algorithm.kl.needs_ref_logprobs
    # With adapters the actor is its own reference.
    return ReferencePhase(parts.actor, reference, parts.timer, asked=asked)


def _cost_phase(name: str, cost: RewardModel | None, parts: PhaseParts) -> CostPhase | None:
    del name
    return cost and CostPhase(sequence_scores(parts.config, cost), parts.timer)


def _teacher_phase(name: str, teacher: Reference | None, parts: PhaseParts) -> TeacherPhase | None:
    del name
    if teacher is None:
        return None
    config = parts.config
    own = None
    if config.teacher.changes_prompts:
        if config.algorithm.kl.is_full:
            raise UserError(
                f"teacher.template {config.teacher.template!r} gives the teacher rows of its own, and "
                "algorithm.kl.loss_estimate 'full' compares both models row by row; set "
                "algorithm.kl.loss_coef to 0, or teacher.template to '{prompt}'"
            )
        longest = config.longest_sequence + config.teacher.max_extra_tokens
        sequences = config.rollout.num_prompts * config.rollout.num_samples
        shape = row_limits(config, longest=longest).shape(sequences, minibatches=1)
        own = OwnRows(TeacherPrompts(config.teacher, parts.encode), shape)
    return TeacherPhase(teacher, parts.actor, parts.timer, own)


def sequence_scores(config: Config, model: RewardModel) -> SequenceScores:
    """Scores of sampled sequences by a reward or cost model."""
    rollout = config.rollout
    most = rollout.generation_prompts * rollout.num_samples if rollout.partial else 0
    return SequenceScores(model, row_limits(config), most_sequences=most)


# Terms of the reward.


def _model_reward(model: RewardModel, config: Config) -> RewardTerm:
    return ModelReward("model", config.reward.model_weight, sequence_scores(config, model))


def _judge_reward(judge: GenerativeJudge, config: Config) -> RewardTerm:
    options = config.reward.judge
    low, high = options.score_range
    return JudgeReward(
        "judge",
        options.weight,
        judge,
        JudgeTemplate(options.template, options.max_response_chars, judge.special_texts),
        score_parser(low=low, high=high),
        options.failed_score,
    )


# Critics start from the policy's trunk unless they have weights of their own.
_CRITIC = RoleRow(
    _critic,
    _critic_phase,
    setting="critic.weights",
    weights=lambda config: config.critic.weights,
    check=_check_critic,
    trains=True,
)

ROLES: Mapping[str, RoleRow] = {
    "critic": _CRITIC,
    "cost_critic": _CRITIC,
    "reference": RoleRow(
        _reference, _reference_phase, where_used=True, adapters=True, compared=True
    ),
    "reward": RoleRow(
        _score_model,
        reward=_model_reward,
        setting="reward.model",
        weights=lambda config: config.reward.model,
        check=_check_score_model,
        where_used=True,
        by_setting=True,
        scores=True,
    ),
    "judge": RoleRow(
        _judge,
        reward=_judge_reward,
        setting="reward.judge.model",
        weights=lambda config: config.reward.judge.model,
        check=_check_judge,
        check_batches=check_judge_batches,
        load=_load_judge,
        where_used=True,
        by_setting=True,
        own_tokenizer=True,
    ),
    "cost": RoleRow(
        _score_model,
        _cost_phase,
        setting="cost.model",
        weights=lambda config: config.cost.model,
        check=_check_score_model,
        needs_weights=True,
        scores=True,
    ),
    "teacher": RoleRow(
        _reference,
        _teacher_phase,
        setting="teacher.weights",
        weights=lambda config: config.teacher.weights,
        check=_check_language_model,
        needs_weights=True,
        same_tokens=True,
        compared=True,
    ),
}
