"""From a config to the parts of a run: tokenizer, problems, devices. Checks before it builds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxrl.algos.registry import lookup
from jaxrl.config.schema import Config
from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.data.demonstrations import Demonstration, DemonstrationStream, texts_of
from jaxrl.data.made_pairs import MADE_PAIRS
from jaxrl.data.packing import RowLimits
from jaxrl.data.preferences import PreferenceStream
from jaxrl.data.records import text_of_context
from jaxrl.data.stream import EncodedPrompts, MadePrompts, evaluation_prompts
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Placement, Pool, read_placement, take_devices
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, check_divides
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.user_environment import environment_of
from jaxrl.trainer.cross_checks import check_algorithm, roles_of
from jaxrl.trainer.memory_check import check_memory_here
from jaxrl.trainer.model_shape import model_for, tokenizer_directory
from jaxrl.trainer.needs import Needs, check_fits, demonstrations_of, pairs_of, truth_faults
from jaxrl.trainer.problems import ProblemReader, Problems, card_of, encode, prompts_of
from jaxrl.trainer.requirements import Lookup, require
from jaxrl.trainer.run_graders import needs_truths
from jaxrl.types import Prompts

# Enough text for every word of a procedural task.
_TOKENIZER_RECORDS = 2000


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What both stages of a run share.

    Attributes:
      config: of the run.
      tokenizer: of the policy.
      problems: to train on and to evaluate with; none is in both.
      evaluation_prompts: prompts of the evaluation.
      placement: which role has which devices.
      model: the config's model, with the number of ids that the tokenizer has.
      demonstrations: of the warm start's file, if it has one.
      train_prompts: the problems to train on as prompts, source by source, or what makes them; where the run
        asks for them.
      card: what was read and what was left out, to be shown once.
    """

    config: Config
    tokenizer: Tokenizer
    problems: Problems
    evaluation_prompts: Prompts
    placement: Placement
    model: ModelConfig
    demonstrations: tuple[Demonstration, ...] = ()
    train_prompts: tuple[Prompts | MadePrompts, ...] = ()
    card: str = ""

    def mesh_of(self, role: str) -> Mesh:
        """The mesh a role lives on."""
        return self.placement.pool_of(role).mesh_of(role)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: the tokenizer's, and those of the config."""
        return (*self.tokenizer.stop_ids, *self.config.rollout.stop_ids)


def build_context(
    config: Config,
    devices: Sequence[Any] | None = None,
    *,
    needs: Needs,
    needs_problems: bool = True,
    needs_prompts: bool = False,
) -> RunContext:
    """Reads data and tokenizer, takes the devices, and checks that everything fits together.

    Args:
      config: of the run.
      devices: which to use; all of them by default.
      needs: what the run will ask for later, looked up now.
      needs_problems: False lets a config have none, neither to train on nor to evaluate with.
      needs_prompts: the run samples answers to the problems that it trains on.

    Raises:
      UserError: something is missing (all of it is named at once), broken, or does not fit.
    """
    check_algorithm(config)
    devices = jax.devices() if devices is None else devices
    reader = ProblemReader(config.data, needs_truths=not needs_prompts or needs_truths(config))
    lookups = needs(config)
    check_present(config, devices, [*reader.lookups, *lookups])
    graded = any(lookup.setting == "reward.grader" for lookup in lookups)
    truths = None
    if graded:
        choice = (config.reward.grader, config.reward.grader_options)
        truths = functools.partial(truth_faults, choice)
    problems = reader.read(truths) if needs_problems or reader.is_named else Problems()
    demonstrations = _demonstrations(config)
    tokenizer = tokenizer_of(config, problems, demonstrations)
    _check_stop_ids(config, tokenizer)
    check_fits(config, tokenizer, needs)
    train = encode(problems.train, config.data, tokenizer) if needs_prompts else ()
    evaluation = encode(problems.evaluation, config.data, tokenizer)
    placement = take_devices(pools_of(config), devices)
    model = model_for(config, tokenizer)
    check_memory_here(config, model, devices, sum(len(e.prompts.ids_N) for e in evaluation))
    roles = roles_of(config)
    check_role_batches(config, {role: placement.pool_of(role).mesh_of(role) for role in roles})
    train_config = config.train.with_shared_prompts(
        platform=devices[0].platform,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        num_samples=config.rollout.num_samples,
        allowed=not model.sliding_window and config.mesh.context == 1,
    )
    return RunContext(
        config=dataclasses.replace(config, train=train_config),
        tokenizer=tokenizer,
        problems=problems,
        evaluation_prompts=_evaluation_prompts(evaluation),
        placement=placement,
        model=model,
        demonstrations=demonstrations,
        train_prompts=prompts_of(problems.train, train, config.data, tokenizer) if train else (),
        card=card_of(problems, train, evaluation),
    )


def _evaluation_prompts(sources: Sequence[EncodedPrompts]) -> Prompts:
    if not sources:
        return Prompts(np.zeros(0, np.int64), (), (), (), ())
    return evaluation_prompts(sources)


def pools_of(config: Config) -> tuple[Pool, ...]:
    """The pools of the config's placement, checked; no devices yet."""
    return read_placement(config.placement, config.mesh, roles_of(config))


def supervised_stream(
    run: RunContext,
    demonstrations: Sequence[Demonstration],
    *,
    examples_per_batch: int,
    max_tokens: int,
) -> DemonstrationStream:
    """Answers to imitate, without end; examples longer than `max_tokens` are dropped."""
    config = run.config
    return DemonstrationStream(
        demonstrations,
        run.tokenizer,
        examples_per_batch=examples_per_batch,
        seed=config.seed,
        max_tokens=max_tokens,
        prompt_format=config.data.format_of(config.data.train),
        formats=run.problems.formats(config.data),
    )


def preference_stream(
    run: RunContext, *, evaluation: bool, pairs_per_batch: int
) -> PreferenceStream:
    """Pairs of answers, without end.

    Raises:
      UserError: a file is missing or broken, or a way to make pairs is not known.
    """
    config = run.config
    options = config.preference
    path = options.evaluation_path if evaluation else options.path
    if path:
        preferences = pairs_of(config, path)
    else:
        problems = run.problems
        records = problems.evaluation_records if evaluation else problems.train_records
        preferences = lookup(MADE_PAIRS, options.made, "preference.made")(records)
    return PreferenceStream(
        preferences,
        run.tokenizer,
        pairs_per_batch=pairs_per_batch,
        seed=config.seed,
        max_tokens=config.train.row_tokens // 2,
        prompt_format=config.data.format_of(config.data.train),
        formats=run.problems.formats(config.data),
    )


def engine_config(config: Config, stop_ids: tuple[int, ...]) -> EngineConfig:
    """Shapes of the rollout programs."""
    return EngineConfig(
        **config.rollout.engine_settings(),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_ids=stop_ids,
        attention=config.train.attention,
    )


def judge_engine_config(config: Config, stop_ids: tuple[int, ...]) -> EngineConfig:
    """Shapes of the generative judge's programs: it samples as the policy does, in slots of its own."""
    options, rollout = config.reward.judge, config.rollout
    settings = rollout.engine_settings(
        slots=options.slots, prefill_prompts=min(options.slots, rollout.prefill_prompts)
    )
    return EngineConfig(
        **settings,
        max_prompt_tokens=options.max_prompt_tokens,
        max_response_tokens=options.max_verdict_tokens,
        stop_ids=stop_ids,
    )


def row_limits(config: Config, *, longest: int | None = None) -> RowLimits:
    """What batches are packed into; `longest` tokens of a sequence, by default a prompt and a response."""
    return RowLimits(
        config.train.rows,
        config.train.row_tokens,
        config.longest_sequence if longest is None else longest,
    )


def training_sampling(run: RunContext) -> SamplingOptions:
    """How training data is sampled; the step is set for each call.

    Raises:
      UserError: the environment cannot be loaded.
    """
    rollout = run.config.rollout
    return SamplingOptions(
        num_samples=rollout.num_samples,
        seed=run.config.seed,
        step=0,
        temperature=rollout.temperature,
        truncation=truncation_of(
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            min_tokens=rollout.min_response_tokens,
            repetition_penalty=rollout.repetition_penalty,
        ),
        stop_strings=tuple(rollout.stop_strings),
        environment=environment_of(rollout.environment, run.tokenizer),
    )


def evaluation_sampling(run: RunContext, *, step: int) -> SamplingOptions:
    """How answers to the evaluation prompts are sampled, with the keys of `step`.

    What ends a turn, and who answers it, belongs to the task: as in training.
    """
    options = run.config.evaluation
    return dataclasses.replace(
        training_sampling(run),
        num_samples=options.num_samples,
        step=step,
        temperature=options.temperature,
        truncation=truncation_of(top_k=options.top_k, top_p=options.top_p, min_p=options.min_p),
    )


def _check_stop_ids(config: Config, tokenizer: Tokenizer) -> None:
    unknown = [i for i in config.rollout.stop_ids if not 0 <= i < tokenizer.vocab_size]
    if unknown:
        raise UserError(
            f"rollout.stop_ids {', '.join(map(str, unknown))}: the tokenizer has no such tokens, its ids go "
            f"from 0 to {tokenizer.vocab_size - 1}; name one of these, or a text in rollout.stop_strings"
        )


def check_present(config: Config, devices: Sequence[Any], lookups: Sequence[Lookup]) -> None:
    """Raises one UserError that names all devices and files that a run lacks; `lookups` name the others."""
    require(
        pools=pools_of(config),
        num_devices=len(devices),
        device_kind=devices[0].device_kind,
        weights=config.weights,
        tokenizer=tokenizer_directory(config),
        needs_chat_template=any(
            config.data.format_of(source).chat
            for source in (
                *config.data.training_sources.values(),
                *config.data.evaluation_sources.values(),
            )
        ),
        lookups=lookups,
    )


def _demonstrations(config: Config) -> tuple[Demonstration, ...]:
    if not (config.warm_start.num_steps and config.warm_start.path):
        return ()
    return demonstrations_of(config)


def tokenizer_of(
    config: Config, problems: Problems, demonstrations: Sequence[Demonstration]
) -> Tokenizer:
    """The tokenizer that a config names, or one that is trained on its problems and demonstrations."""
    directory = tokenizer_directory(config)
    if directory:
        return load_tokenizer(directory)
    texts = [
        config.data.format_of(source.settings, source.own_template).around(
            text_of_context(record.prompt)
        )
        + (record.solution or record.answer)
        for source in problems.train
        for record in source.records[:_TOKENIZER_RECORDS]
    ]
    texts += texts_of(demonstrations[:_TOKENIZER_RECORDS])
    tokenizer = train_tokenizer(texts, vocab_size=config.tokenizer.vocab_size)
    contexts = [
        *(demonstration.context for demonstration in demonstrations),
        *(
            record.prompt
            for source in (*problems.train, *problems.evaluation)
            for record in source.records
        ),
    ]
    if all(isinstance(context, str) for context in contexts):
        return tokenizer
    template = ChatTemplate(
        PLAIN_TEMPLATE, origin="a trained tokenizer", special_tokens=tokenizer.special_tokens
    )
    return dataclasses.replace(tokenizer, chat_template=template)


def check_role_batches(config: Config, meshes: Mapping[str, Mesh | AbstractMesh]) -> None:
    """Raises UserError for a batch size that does not divide over the mesh of a role.

    Args:
      config: of the run.
      meshes: by role.
    """
    for role, mesh in meshes.items():
        if role == "judge":
            _check_judge_batches(config, mesh)
        else:
            sampler = "rollout" if "rollout" in meshes else "actor"
            _check_batches(config, mesh, samples=role == sampler)


def _check_batches(config: Config, mesh: Mesh | AbstractMesh, *, samples: bool) -> None:
    check_divides("train.rows", config.train.rows, "batch", TRAIN_RULES, mesh)
    check_divides("train.row_tokens", config.train.row_tokens, "length", TRAIN_RULES, mesh)
    if samples:
        slots, prompts = config.rollout.slots, config.rollout.prefill_prompts
        if slots != "auto":
            check_divides("rollout.slots", slots, "batch", GENERATE_RULES, mesh)
        check_divides("rollout.prefill_prompts", prompts, "batch", GENERATE_RULES, mesh)


def _check_judge_batches(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """The judge samples with slots of its own, on the mesh of its pool."""
    slots, prompts = config.reward.judge.slots, config.rollout.prefill_prompts
    check_divides("reward.judge.slots", slots, "batch", GENERATE_RULES, mesh)
    check_divides("rollout.prefill_prompts", min(slots, prompts), "batch", GENERATE_RULES, mesh)
