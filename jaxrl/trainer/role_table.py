"""Every role that a dataflow may declare, a row each: where its weights are, how it is built, its phase.

To add a role: its class and settings in `roles/`, its phase and a dataflow in `dataflows/`, a row here, and
its settings in `config/schema.py`. The builder of roles, the loader of weights, the checks before a run and
the planner read this table.

The actor is not among them: it is built first, and others start from it. Nor is the generative judge, which
scores responses and is declared by no dataflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl.config.schema import Config
from jaxrl.dataflows.costs import CostPhase
from jaxrl.dataflows.distill import OwnRows, TeacherPhase
from jaxrl.dataflows.learning import CriticPhase
from jaxrl.dataflows.preparation import ReferencePhase
from jaxrl.dataflows.rewarding import SequenceScores
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.errors import UserError
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import check_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.reward_model import RewardModel
from jaxrl.roles.teacher import TeacherPrompts
from jaxrl.roles.value import Critic
from jaxrl.trainer.batch_shapes import row_limits

Place = Mapping[str, Any]
"""What every constructor takes of a role's place: mesh, train, tables and offload."""


@dataclasses.dataclass(frozen=True)
class PhaseParts:
    """What a phase is built from, besides its role.

    Attributes:
      config: of the run.
      actor: of the run.
      timer: of the step.
      encode: a text to ids, by the policy's tokenizer.
    """

    config: Config
    actor: Actor
    timer: StepTimer
    encode: Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RoleRow:
    """A role that a dataflow may declare.

    Attributes:
      build: (model, place, config) -> the role without weights.
      phase: (name, role, parts) -> its member of a step, for `Step.phase`; None for a role that has none. The
        role is None where the run has no use for it.
      setting: that names the directory of its weights; "" for a role without one.
      weights: (config) -> that directory; "" starts from the policy's weights.
      check: (setting, directory) -> None; raises UserError for a model that cannot have the role.
      needs_weights: a run that has the role names its weights.
      where_used: declared by dataflows that go without it where the config has no use for it.
      scores: its model has a head of scores.
      adapters: its model has the policy's adapters.
      trains: it has an optimiser.
      compared: the actor's loss may have the KL to it over the whole vocabulary.
      same_tokens: the tokenizer of its directory, if there is one, has the policy's tokens.
    """

    build: Callable[[ModelConfig, Place, Config], Any]
    phase: Callable[[str, Any, PhaseParts], Any] | None = None
    setting: str = ""
    weights: Callable[[Config], str] = lambda config: ""
    check: Callable[[str, str], None] = lambda setting, directory: None
    needs_weights: bool = False
    where_used: bool = False
    scores: bool = False
    adapters: bool = False
    trains: bool = False
    same_tokens: bool = False
    compared: bool = False


# Checks of directories.


def _check_critic(setting: str, directory: str) -> None:
    del setting
    check_params(directory, read_config(directory))


def _check_score_model(setting: str, directory: str) -> None:
    model = read_config(directory)
    if not model.num_scores:
        raise UserError(
            f"{setting} {directory} is a language model; it must be a ...ForSequenceClassification, "
            "with a head of scores, such as launch/reward_model.py trains"
        )
    check_params(directory, model)


def _check_language_model(setting: str, directory: str) -> None:
    model = read_config(directory)
    if model.num_scores:
        raise UserError(
            f"{setting} {directory} is a model of scores, which gives no tokens probabilities; name a "
            "language model"
        )
    check_params(directory, model)


# Builders.


def _critic(model: ModelConfig, place: Place, config: Config) -> Critic:
    return Critic(model, **place, optim=config.critic.optim(config.optim), seed=config.seed)


def _score_model(model: ModelConfig, place: Place, config: Config) -> RewardModel:
    del config
    return RewardModel(model, **place)


def _reference(model: ModelConfig, place: Place, config: Config) -> Reference:
    return Reference(model, **place, temperature=config.rollout.temperature)


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
        setting="reward.model",
        weights=lambda config: config.reward.model,
        check=_check_score_model,
        where_used=True,
        scores=True,
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
