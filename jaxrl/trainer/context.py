"""Builds the run context from a config: tokenizer, problems, devices. Checks everything first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.data.curriculum import CurriculumStream
from jaxrl.data.data_card import data_card
from jaxrl.data.demonstrations import Demonstration, DemonstrationStream, solutions_of
from jaxrl.data.preferences import Preference, PreferenceStream
from jaxrl.data.problems import Problems
from jaxrl.data.prompt_encoding import (
    encode,
    evaluation_prompts,
    stream_inputs,
    tokenizer_from,
)
from jaxrl.data.stream import GeneratedPrompts, PromptStream
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.compilation_cache import keep_programs_of
from jaxrl.mesh.pools import Placement
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.rollout_config import FROZEN_ROLE
from jaxrl.trainer.findings import RunKind, find_everything
from jaxrl.trainer.identity import contents_of
from jaxrl.trainer.resolved import Resolved
from jaxrl.trainer.role_table import ROLES, check_same_tokens
from jaxrl.trainer.roles import RoleBuilder, RoleModels, check_role_batches, role_models
from jaxrl.trainer.run_rewards import truth_faults
from jaxrl.types import Prompts
from jaxrl.user_code import load_function


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The data, models and devices that the training stages of a run share.

    Attributes:
      resolved: config of the run, with its dataflow, pools, estimator and loss.
      models: models and tokenizers of the roles.
      placement: devices of each role.
      problems: training and evaluation problems; no problem is in both sets.
      evaluation_prompts: prompts of the evaluation.
      demonstrations: examples of SFT, from its file or the problems' solutions; empty without SFT.
      pairs: preference pairs of each file.
      train_prompts: training problems as prompts, source by source, or generators of them; empty if the run
        does not sample.
      card: data card: what was read and what was left out. It is shown once.
    """

    resolved: Resolved
    models: RoleModels
    placement: Placement
    problems: Problems
    evaluation_prompts: Prompts
    demonstrations: tuple[Demonstration, ...] = ()
    pairs: Mapping[str, tuple[Preference, ...]] = dataclasses.field(default_factory=dict)
    train_prompts: tuple[Prompts | GeneratedPrompts, ...] = ()
    card: str = ""

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def model(self) -> ModelConfig:
        """The policy's model, with the vocabulary size of its tokenizer."""
        return self.models.actor

    @property
    def tokenizer(self) -> Tokenizer:
        return self.models.tokenizer

    @functools.cached_property
    def meshes(self) -> dict[str, Mesh]:
        return meshes_of(self.placement)

    @functools.cached_property
    def contents(self) -> dict[str, str]:
        """What the settings name, as it is when the first stage begins: a file may change later."""
        return contents_of(self.config)

    @property
    def roles(self) -> RoleBuilder:
        return RoleBuilder(self.resolved, self.meshes, self.models)

    @property
    def sampling(self) -> SamplingOptions:
        config = self.config
        return config.rollout.sampling(config.seed, renormalized=config.truncates_logprobs)


def build_context(
    resolved: Resolved, devices: Sequence[Any] | None = None, *, kind: RunKind
) -> RunContext:
    """Finds the data, models and devices of a run, and checks that they fit together.

    Args:
      resolved: config of the run, with what its names stand for.
      devices: devices to use; None means all.
      kind: kind of run; it determines what the run needs.

    Raises:
      UserError: something is missing, broken, or does not fit. All missing things are named in one message.
    """
    config = resolved.config
    devices = jax.devices() if devices is None else devices
    found = find_everything(resolved, kind, devices)
    keep_programs_of(found.placement.pools)
    choice = (config.reward.grader, config.reward.grader_options)
    # Read with the problems: a ground truth that no grader can read would stop the run later.
    truths = functools.partial(truth_faults, choice) if kind.grades else None
    # A run without training problems may still name evaluation problems.
    named = kind.needs_problems or found.problems.readers
    problems = found.problems.read(truths) if named else Problems()
    # Only now: without a tokenizer one is trained on the problems.
    tokenizer = found.tokenizer
    if tokenizer is None:
        size = config.model.vocab_size
        tokenizer = tokenizer_from(problems, found.demonstrations, config.data, vocab_size=size)
    # Before devices have anything to do: a problem without a solution ends the run.
    from_file = config.sft.path or not config.sft.num_steps
    examples = found.demonstrations if from_file else solutions_of(problems.train_records)
    # A stage without sampling has the policy alone, whatever the dataflow declares.
    models = role_models(resolved, () if kind.rewards else ("actor",))
    _check_tokens(config, tokenizer, models)
    train = encode(problems.train, config.data, tokenizer) if kind.rewards else ()
    evaluation = encode(problems.evaluation, config.data, tokenizer)
    check_role_batches(config, meshes_of(found.placement))
    models = models.with_tokenizers(tokenizer, found.own_tokenizers)
    train_config = config.train.with_shared_prompts(
        platform=devices[0].platform,
        num_samples=config.rollout.num_samples,
        # The state of a delta layer cannot go back to the end of a prompt for the next answer.
        allowed=not models.actor.has_state and config.mesh.context == 1,
    )
    run = RunContext(
        resolved=dataclasses.replace(
            resolved, config=dataclasses.replace(config, train=train_config)
        ),
        models=models,
        placement=found.placement,
        problems=problems,
        evaluation_prompts=evaluation_prompts(evaluation),
        demonstrations=examples,
        pairs=found.pairs,
        train_prompts=stream_inputs(problems.train, train, config.data, tokenizer) if train else (),
        card=data_card(problems, train, evaluation, sampler=config.data.sampler),
    )
    if train and config.data.sampler:
        # The user's class meets its prompts now, and not after hours of supervised training.
        training_prompts(run)
    return run


def meshes_of(placement: Placement) -> dict[str, Mesh]:
    """The mesh of each role of a placement."""
    return {role: pool.mesh_of(role) for pool in placement.pools for role in pool.roles}


def training_prompts(run: RunContext) -> PromptStream | CurriculumStream:
    """The training prompts of a run in an endless order; UserError if `data.sampler` cannot choose them."""
    config = run.config
    # Partial rollout draws prompts one at a time, as slots fall free.
    of_batch = 1 if config.rollout.partial else config.problems_per_batch
    batches: Any = {"prompts_per_batch": of_batch, "seed": config.seed}
    if config.data.sampler:
        rows = [source for source in run.train_prompts if isinstance(source, Prompts)]
        return CurriculumStream(rows, path=config.data.sampler, **batches)
    weights = [source.settings.weight for source in run.problems.train]
    return PromptStream(run.train_prompts, weights=weights, **batches)


def supervised_stream(
    run: RunContext,
    demonstrations: Sequence[Demonstration],
    *,
    examples_per_batch: int,
    max_tokens: int,
) -> DemonstrationStream:
    """An endless stream of supervised examples; examples longer than `max_tokens` are dropped."""
    config = run.config
    return DemonstrationStream(
        demonstrations,
        run.tokenizer,
        examples_per_batch=examples_per_batch,
        seed=config.seed,
        max_tokens=max_tokens,
        prompt_format=config.data.format_of(),
        formats=run.problems.formats(config.data),
    )


def preference_stream(
    run: RunContext, *, evaluation: bool, pairs_per_batch: int
) -> PreferenceStream:
    """An endless stream of preference pairs."""
    config = run.config
    options = config.preference
    file = options.evaluation_path if evaluation else options.path
    if file in run.pairs:
        preferences = run.pairs[file]
    else:
        problems = run.problems
        records = problems.evaluation_records if evaluation else problems.train_records
        preferences = load_function(options.path, "preference.path")(records)
    return PreferenceStream(
        preferences,
        run.tokenizer,
        pairs_per_batch=pairs_per_batch,
        seed=config.seed,
        # Both answers of a pair share a row (`roles.pairs`).
        max_tokens=config.row_tokens // 2,
        prompt_format=config.data.format_of(),
        formats=run.problems.formats(config.data),
    )


def _check_tokens(config: Config, tokenizer: Tokenizer, models: RoleModels) -> None:
    """Raises UserError for wrong stop ids and strings, and for scalar models with another tokenizer."""
    unknown = [i for i in config.rollout.stop_ids if not 0 <= i < tokenizer.vocab_size]
    if unknown:
        raise UserError(
            f"rollout.stop_ids {', '.join(map(str, unknown))}: the tokenizer has no such tokens, its ids go "
            f"from 0 to {tokenizer.vocab_size - 1}; name one of these, or a text in rollout.stop_strings"
        )
    # Refuses what no search could find.
    tokenizer.ids_named_by(config.rollout.stop_strings)
    # More rows than tokens are padding, and stay (`RoleModels.with_tokenizers`).
    if tokenizer.vocab_size > models.actor.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{models.actor.vocab_size} rows; set model.vocab_size to at least "
            f"{tokenizer.vocab_size}, or use the model's own tokenizer"
        )
    for role, kind in ROLES.items():
        directory = kind.weights(config)
        if directory and role in models.by_role:
            kind.check_tokens(models.by_role[role], tokenizer, directory)
    for role, name in config.rollout.frozen_roles.items():
        check_same_tokens(FROZEN_ROLE + role, tokenizer, name)
