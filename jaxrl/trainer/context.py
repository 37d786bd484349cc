"""Builds the run context from a config: tokenizer, problems, devices. Checks everything first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config.schema import Config
from jaxrl.data.data_card import data_card
from jaxrl.data.demonstrations import Demonstration, DemonstrationStream
from jaxrl.data.preferences import Preference, PreferenceStream
from jaxrl.data.problems import Problems
from jaxrl.data.prompt_encoding import (
    encode,
    evaluation_prompts,
    stream_inputs,
    tokenizer_from,
)
from jaxrl.data.stream import GeneratedPrompts
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.compilation_cache import keep_programs_of
from jaxrl.mesh.pools import Placement
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.trainer.algorithm import Algorithm, algorithm_of, pools_of
from jaxrl.trainer.findings import RunKind, find_everything
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.roles import RoleBuilder, RoleModels, check_role_batches, role_models
from jaxrl.trainer.run_rewards import truth_faults
from jaxrl.types import Prompts
from jaxrl.user_code import load_function


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The data, models and devices that the training stages of a run share.

    Attributes:
      config: config of the run.
      algorithm: dataflow, estimator and loss.
      models: models and tokenizers of the roles.
      placement: devices of each role.
      problems: training and evaluation problems; no problem is in both sets.
      evaluation_prompts: prompts of the evaluation.
      demonstrations: examples from the warm-up's file; empty without a file.
      pairs: preference pairs of each file.
      train_prompts: training problems as prompts, source by source, or generators of them; empty if the run
        does not sample.
      card: data card: what was read and what was left out. It is shown once.
    """

    config: Config
    algorithm: Algorithm
    models: RoleModels
    placement: Placement
    problems: Problems
    evaluation_prompts: Prompts
    demonstrations: tuple[Demonstration, ...] = ()
    pairs: Mapping[str, tuple[Preference, ...]] = dataclasses.field(default_factory=dict)
    train_prompts: tuple[Prompts | GeneratedPrompts, ...] = ()
    card: str = ""

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

    @property
    def roles(self) -> RoleBuilder:
        return RoleBuilder(self.config, self.meshes, self.models)

    @property
    def sampling(self) -> SamplingOptions:
        config = self.config
        return config.rollout.sampling(config.seed, renormalized=config.truncates_logprobs)


def build_context(
    config: Config, devices: Sequence[Any] | None = None, *, kind: RunKind
) -> RunContext:
    """Finds the data, models and devices of a run, and checks that they fit together.

    Args:
      config: config of the run.
      devices: devices to use; None means all.
      kind: kind of run; it determines what the run needs.

    Raises:
      UserError: something is missing, broken, or does not fit. All missing things are named in one message.
    """
    algorithm = algorithm_of(config)
    devices = jax.devices() if devices is None else devices
    pools = pools_of(config, algorithm.roles)
    found = find_everything(config, kind, pools, devices)
    keep_programs_of(found.placement.pools)
    choice = (config.reward.grader, config.reward.grader_options)
    # Read with the problems: a ground truth that no grader can read would stop the run later.
    truths = functools.partial(truth_faults, choice) if kind.grades else None
    # A run that needs none may still have some to evaluate with.
    named = kind.needs_problems or found.problems.readers
    problems = found.problems.read(truths) if named else Problems()
    # Only now: without a tokenizer one is trained on the problems.
    tokenizer = found.tokenizer
    if tokenizer is None:
        size = config.model.vocab_size
        tokenizer = tokenizer_from(problems, found.demonstrations, config.data, vocab_size=size)
    # A stage without sampling has the policy alone, whatever the dataflow declares.
    models = role_models(config, algorithm.roles if kind.rewards else ("actor",))
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
    return RunContext(
        config=dataclasses.replace(config, train=train_config),
        algorithm=algorithm,
        models=models,
        placement=found.placement,
        problems=problems,
        evaluation_prompts=evaluation_prompts(evaluation),
        demonstrations=found.demonstrations,
        pairs=found.pairs,
        train_prompts=stream_inputs(problems.train, train, config.data, tokenizer) if train else (),
        card=data_card(problems, train, evaluation),
    )


def meshes_of(placement: Placement) -> dict[str, Mesh]:
    """The mesh of each role of a placement."""
    return {role: pool.mesh_of(role) for pool in placement.pools for role in pool.roles}


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
    """Raises UserError for unknown stop ids, and for scalar models with another tokenizer than the policy."""
    unknown = [i for i in config.rollout.stop_ids if not 0 <= i < tokenizer.vocab_size]
    if unknown:
        raise UserError(
            f"rollout.stop_ids {', '.join(map(str, unknown))}: the tokenizer has no such tokens, its ids go "
            f"from 0 to {tokenizer.vocab_size - 1}; name one of these, or a text in rollout.stop_strings"
        )
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
