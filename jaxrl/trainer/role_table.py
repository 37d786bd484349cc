"""The table of roles besides the actor: where the weights of each are, how it is built, its phase or reward.

To add a role: its class and settings in `roles/`, its phase and a dataflow in `dataflows/`, a `RoleKind`
here, and its settings in `config/schema.py`. The builder of roles, the loader of weights, the checks before a
run, the rewards and the planner read this table. The actor has no kind: every run has it, and others start
from its weights.
"""

from __future__ import annotations

import dataclasses
import operator
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.config.shapes import row_limits
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.dataflows.distill import TeacherPhase
from jaxrl.dataflows.learning import CriticPhase
from jaxrl.dataflows.preparation import ReferencePhase
from jaxrl.dataflows.rewarding import (
    CostPhase,
    JudgeReward,
    ModelReward,
    RewardTerm,
    SequenceScores,
)
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.errors import UserError
from jaxrl.mesh.rules import GENERATE_RULES, generation_shardings, shards_of
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph, score_config
from jaxrl.models.huggingface.weight_loading import load_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.judge import JudgeTemplate
from jaxrl.roles.generative_judge import GenerativeJudge
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.policy import Actor, Reference
from jaxrl.roles.scores import Critic, RewardModel
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig

# Verdicts that are decoded at once. All slots have room for the longest prompt, and a judge has long ones.
_JUDGE_SLOTS = 64


@dataclasses.dataclass(frozen=True)
class BuildParts:
    """Arguments of `RoleKind.build`.

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
    """Arguments of `RoleKind.phase`, besides the role.

    Attributes:
      config: config of the run.
      actor: actor of the run.
      timer: timer of the step.
    """

    config: Config
    actor: Actor
    timer: StepTimer


class RoleKind:
    """A role besides the actor. The methods here are those of a frozen language model without a phase.

    Attributes:
      setting: name of the setting with the directory of its weights; "" for a role without one.
      needs_weights: whether a run that has the role must set `setting`.
      optional: whether `is_used` decides if a run has the role, not its dataflow alone; that of others may
        only take it away.
      trains: whether it has an optimiser.
      compared: whether the actor's loss can have the KL to it over the whole vocabulary.
      packs: whether it runs on packed rows, which must divide over its mesh.
    """

    setting = ""
    needs_weights = False
    optional = False
    trains = False
    compared = False
    packs = True

    def weights(self, config: Config) -> str:
        """The directory of its weights; "" means the policy's weights."""
        return operator.attrgetter(self.setting)(config) if self.setting else ""

    def is_used(self, config: Config, *, declared: bool) -> bool:
        """Whether a run has the role; `declared` is whether its dataflow names it."""
        return declared

    def shape(self, actor: ModelConfig, stored: ModelConfig | None) -> ModelConfig:
        """Its model, from that of its checkpoint; without one, from the actor's."""
        return lora.base_config(actor) if stored is None else stored

    def check(self, model: ModelConfig, directory: str) -> Tokenizer | None:
        """Raises UserError if it cannot have the model in a directory; returns a tokenizer of its own."""
        if model.num_scores:
            raise UserError(
                f"{self.setting} {directory} is a model of scores, which gives no tokens probabilities; name "
                "a language model"
            )
        return None

    def check_tokens(self, model: ModelConfig, policy: Tokenizer, directory: str) -> None:
        """Raises UserError unless its model can read the policy's tokens."""
        check_vocabulary(model, policy, directory)

    def build(self, parts: BuildParts) -> Any:
        """Builds the role without weights."""
        temperature = parts.config.rollout.temperature
        return Reference(parts.model, **parts.place, temperature=temperature)

    def load(self, role: Any, model: ModelConfig, directory: str) -> None:
        """Loads the weights of a frozen role."""
        role.load(load_params(directory, model, role.train_shardings))

    def phase(self, name: str, role: Any, parts: PhaseParts) -> Any:
        """The phase object for `Step.phase`, or None. `role` is None if this run has no such role."""

    def reward(self, role: Any, config: Config) -> RewardTerm | None:
        """The term of the reward that it computes; None if it rewards nothing."""


class CriticKind(RoleKind):
    """A critic starts from the policy's trunk unless it has weights of its own, or is a head of the actor."""

    setting = "critic.weights"
    trains = True

    def is_used(self, config: Config, *, declared: bool) -> bool:
        return declared and not config.critic.trunk_coef

    def check(self, model: ModelConfig, directory: str) -> None:
        """Its head is new, so a model with or without scores will do."""

    def build(self, parts: BuildParts) -> Critic:
        config = parts.config
        optim = dataclasses.replace(config.optim, lr=config.critic.lr)
        return Critic(parts.model, **parts.place, optim=optim, seed=config.seed)

    def load(self, role: Critic, model: ModelConfig, directory: str) -> None:
        """`supervised.start_from` gives a learner its weights."""

    def phase(self, name: str, role: Critic | None, parts: PhaseParts) -> CriticPhase | None:
        options = parts.config.critic
        if role is None and not options.trunk_coef:
            return None
        loss = clipped_values(clip=options.clip)
        return CriticPhase(name, role, loss, parts.timer, epochs=options.epochs)


class ReferenceKind(RoleKind):
    """The policy that training started from."""

    optional = True
    compared = True

    def is_used(self, config: Config, *, declared: bool) -> bool:
        # With adapters the actor is its own reference: the same weights without them.
        return declared and config.algorithm.kl.needs_reference and not config.model.lora.rank

    def shape(self, actor: ModelConfig, stored: ModelConfig | None) -> ModelConfig:
        """The actor's model, adapters included."""
        return actor

    def phase(self, name: str, role: Reference | None, parts: PhaseParts) -> ReferencePhase:
        """Log-probabilities of the role, or of the actor without its adapters."""
        asked = parts.config.algorithm.kl.needs_ref_logprobs
        return ReferencePhase(parts.actor, role, parts.timer, asked=asked)


class ScoreKind(RoleKind):
    """A model with a head of scores."""

    def shape(self, actor: ModelConfig, stored: ModelConfig | None) -> ModelConfig:
        """A model without a head of scores gets one."""
        model = super().shape(actor, stored)
        return model if model.num_scores else score_config(model)

    def check(self, model: ModelConfig, directory: str) -> None:
        """The checkpoint must have the head."""
        if not model.num_scores:
            raise UserError(
                f"{self.setting} {directory} is a language model; it must be a "
                "...ForSequenceClassification, with a head of scores, such as configs/reward_tiny.py trains"
            )

    def build(self, parts: BuildParts) -> RewardModel:
        return RewardModel(parts.model, **parts.place)

    def scores(self, config: Config, role: RewardModel) -> SequenceScores:
        # A partial rollout finishes a varying number of groups; the largest bounds the one shape of all.
        rollout = config.rollout
        most = rollout.generation_prompts * rollout.num_samples if rollout.partial else 0
        return SequenceScores(role, row_limits(config), most_sequences=most)


class RewardKind(ScoreKind):
    """The reward model, which every run has that names one."""

    setting = "reward.model"
    optional = True

    def is_used(self, config: Config, *, declared: bool) -> bool:
        # Whatever the dataflow declares: every dataflow has rewards.
        return bool(self.weights(config))

    def reward(self, role: RewardModel, config: Config) -> RewardTerm:
        return ModelReward("model", config.reward.model_weight, self.scores(config, role))


class CostKind(ScoreKind):
    """The cost model of Safe RLHF."""

    setting = "cost.model"
    needs_weights = True

    def phase(self, name: str, role: RewardModel | None, parts: PhaseParts) -> CostPhase | None:
        return role and CostPhase(self.scores(parts.config, role), parts.timer)


class JudgeKind(RoleKind):
    """The generative judge, which reads texts with its own tokenizer, in every run that names one."""

    setting = "reward.judge.model"
    optional = True
    packs = False

    def is_used(self, config: Config, *, declared: bool) -> bool:
        # Whatever the dataflow declares, like the reward model.
        return bool(self.weights(config))

    def check(self, model: ModelConfig, directory: str) -> Tokenizer:
        """The judge needs a language model with a tokenizer that fits, and perhaps a chat template."""
        if model.num_scores:
            raise UserError(
                f"{self.setting} {directory} is a model of scores, which says nothing in words; set "
                "reward.model to it, or name a language model"
            )
        tokenizer = load_tokenizer(directory)
        check_vocabulary(model, tokenizer, directory)
        return tokenizer

    def check_tokens(self, model: ModelConfig, policy: Tokenizer, directory: str) -> None:
        """The policy's tokens do not matter."""

    def build(self, parts: BuildParts) -> GenerativeJudge:
        options, rollout = parts.config.reward.judge, parts.config.rollout
        tokenizer, mesh = parts.tokenizer, parts.place["mesh"]
        replicas = shards_of("batch", GENERATE_RULES, mesh)
        sizes = EngineConfig(
            **rollout.engine_settings(
                slots=-(-_JUDGE_SLOTS // replicas) * replicas,
                prefill_prompts=-(-min(_JUDGE_SLOTS, rollout.prefill_prompts) // replicas)
                * replicas,
                # The judge's answers are short, and its slots are few.
                cache="contiguous",
                cache_tokens=0,
                speculate=0,
            ),
            max_prompt_tokens=options.max_prompt_tokens,
            max_response_tokens=options.max_verdict_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        # "offline" whatever `rollout.driver` says, which is about the policy.
        backend = build_backend("offline", parts.model, mesh, sizes, tokenizer.decode_batch)
        return GenerativeJudge(
            backend,
            tokenizer,
            max_prompt_tokens=options.max_prompt_tokens,
            chat=tokenizer.chat_template is not None,
        )

    def load(self, role: GenerativeJudge, model: ModelConfig, directory: str) -> None:
        # It only samples, so its weights have the generation layout from the beginning.
        backend = role.backend
        _, shapes, axes = decoder_graph(model)
        where = generation_shardings(axes, shapes, backend.mesh)
        backend.load(load_params(directory, model, where, dtype=backend.dtype))

    def reward(self, role: GenerativeJudge, config: Config) -> RewardTerm:
        """The score at the end of its verdict."""
        options = config.reward.judge
        # In a response they could end the judge's prompt, and write the verdict themselves.
        forbidden = role.tokenizer.added_tokens
        template = JudgeTemplate(options.template, options.max_response_chars, forbidden)
        return JudgeReward("judge", options.weight, role, template)


class TeacherKind(RoleKind):
    """The teacher of a distillation."""

    setting = "teacher.weights"
    needs_weights = True
    compared = True

    def check_tokens(self, model: ModelConfig, policy: Tokenizer, directory: str) -> None:
        # The teacher gives probabilities of token ids, so these have to mean the same. It may have more.
        super().check_tokens(model, policy, directory)
        check_same_tokens(self.setting, policy, directory)

    def phase(self, name: str, role: Reference | None, parts: PhaseParts) -> TeacherPhase | None:
        return role and TeacherPhase(role, parts.actor, parts.timer)


ROLES: Mapping[str, RoleKind] = {
    "critic": CriticKind(),
    "cost_critic": CriticKind(),
    "reference": ReferenceKind(),
    "reward": RewardKind(),
    "judge": JudgeKind(),
    "cost": CostKind(),
    "teacher": TeacherKind(),
}


def check_same_tokens(setting: str, policy: Tokenizer, directory: str) -> None:
    """Raises UserError if the tokenizer in a directory has other ids than the policy's."""
    if not (pathlib.Path(directory) / "tokenizer.json").exists():
        return
    theirs = load_tokenizer(directory).backend.get_vocab(with_added_tokens=True)
    ours = policy.backend.get_vocab(with_added_tokens=True)
    differing = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if differing:
        token = differing[0]
        raise UserError(
            f"{setting} {directory} has another tokenizer: {len(differing):,} of the policy's "
            f"{len(ours):,} tokens have another id there, such as {token!r}, {ours[token]} here and "
            f"{theirs.get(token, 'none')} there; name a model with the same tokenizer"
        )


def check_vocabulary(model: ModelConfig, tokenizer: Tokenizer, directory: str) -> None:
    """Raises UserError if a tokenizer has more tokens than a model."""
    if model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {directory} "
            f"{model.vocab_size}; it reads the tokens as they are, so use one with the same tokenizer"
        )
