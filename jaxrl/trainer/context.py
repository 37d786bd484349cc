"""From a config to the parts of a run: tokenizer, problems, devices. Checks before it builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxrl.algos.registry import lookup
from jaxrl.config.schema import Config
from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.demonstrations import Demonstration, DemonstrationStream, texts_of
from jaxrl.data.made_pairs import MADE_PAIRS
from jaxrl.data.packing import RowLimits
from jaxrl.data.preferences import PreferenceStream
from jaxrl.data.records import JsonlRecords, ReasoningGymRecords, Record, disjoint
from jaxrl.data.stream import evaluation_prompts
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.pools import Placement, Pool, read_placement, take_devices
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, check_divides
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config
from jaxrl.models.huggingface.weight_loading import check_adapter, check_params
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.planner.requirements import DataFile, Lookup, require
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.trainer.cross_checks import check_algorithm, roles_of
from jaxrl.trainer.needs import Needs, check_fits, demonstrations_of, pairs_of
from jaxrl.trainer.user_environment import environment_of
from jaxrl.types import Prompts

# Enough text for every word of a procedural task.
_TOKENIZER_RECORDS = 2000


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What both stages of a run share.

    Attributes:
      config: of the run.
      tokenizer: of the policy.
      train: problems to train on; none of them is among the evaluation.
      evaluation_prompts: prompts of the evaluation.
      placement: which role has which devices.
      model: the config's model, with the number of ids that the tokenizer has.
      demonstrations: of the warm start's file, if it has one.
    """

    config: Config
    tokenizer: Tokenizer
    train: Sequence[Record]
    evaluation_prompts: Prompts
    placement: Placement
    model: ModelConfig
    demonstrations: tuple[Demonstration, ...] = ()

    def mesh_of(self, role: str) -> Mesh:
        """The mesh a role lives on."""
        return self.placement.pool_of(role).mesh

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
) -> RunContext:
    """Reads data and tokenizer, takes the devices, and checks that everything fits together.

    Args:
      config: of the run.
      devices: which to use; all of them by default.
      needs: what the run will ask for later, looked up now.
      needs_problems: False lets a config have none, neither to train on nor to evaluate with.

    Raises:
      UserError: something is missing (all of it is named at once), broken, or does not fit.
    """
    check_algorithm(config)
    devices = jax.devices() if devices is None else devices
    _check_present(config, devices, needs(config))
    has_problems = any(
        source.path or source.task for source in (config.data.train, config.data.evaluation)
    )
    train, evaluation = _records(config) if needs_problems or has_problems else ((), ())
    demonstrations = _demonstrations(config)
    tokenizer = _tokenizer(config, train, demonstrations)
    _check_stop_ids(config, tokenizer)
    check_fits(config, tokenizer, (*train, *evaluation), needs)
    placement = take_devices(pools_of(config), devices)
    sampler = "rollout" if "rollout" in roles_of(config) else "actor"
    for pool in placement.pools:
        check_batches(config, pool.mesh, samples=pool is placement.pool_of(sampler))
        if "judge" in pool.roles:
            _check_judge_batches(config, pool.mesh)
    return RunContext(
        config=config,
        tokenizer=tokenizer,
        train=train,
        evaluation_prompts=_evaluation_prompts(config, evaluation, tokenizer),
        placement=placement,
        model=model_for(config, tokenizer),
        demonstrations=demonstrations,
    )


def _evaluation_prompts(config: Config, records: Sequence[Record], tokenizer: Tokenizer) -> Prompts:
    if not records:
        return Prompts(np.zeros(0, np.int64), (), (), (), ())
    return evaluation_prompts(records, tokenizer, **prompt_options(config))


def prompt_options(config: Config) -> dict[str, Any]:
    """How a problem becomes a prompt, as keywords of the streams."""
    data = config.data
    return {
        "max_prompt_tokens": data.max_prompt_tokens,
        "template": data.template,
        "chat": data.chat,
        "overlong": data.overlong,
    }


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
        template=config.data.template,
        chat=config.data.chat,
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
        records = _read(config.data.evaluation, "data.evaluation") if evaluation else run.train
        preferences = lookup(MADE_PAIRS, options.made, "preference.made")(records)
    return PreferenceStream(
        preferences,
        run.tokenizer,
        pairs_per_batch=pairs_per_batch,
        seed=config.seed,
        max_tokens=config.train.row_tokens // 2,
        template=config.data.template,
        chat=config.data.chat,
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


def _check_present(config: Config, devices: Sequence[Any], lookups: Sequence[Lookup]) -> None:
    data = [
        DataFile(s.path, s.prompt_field, s.answer_field, s.solution_field)
        for s in (config.data.train, config.data.evaluation)
        if s.path
    ]
    require(
        layouts=[pool.layout for pool in pools_of(config)],
        num_devices=len(devices),
        device_kind=devices[0].device_kind,
        weights=config.weights,
        tokenizer=config.tokenizer.path,
        needs_chat_template=config.data.chat,
        data=data,
        lookups=lookups,
    )


def _records(config: Config) -> tuple[Sequence[Record], Sequence[Record]]:
    evaluation = _read(config.data.evaluation, "data.evaluation")
    train = _read(config.data.train, "data.train")
    return disjoint(train, evaluation), evaluation


def _read(source: SourceConfig, setting: str) -> Sequence[Record]:
    if bool(source.path) == bool(source.task):
        raise UserError(
            f"{setting} names {'both a file and a task' if source.path else 'neither a file nor a task'}; "
            f"set {setting}.path to a JSONL file or {setting}.task to a reasoning-gym data set"
        )
    if source.path:
        records: Sequence[Record] = JsonlRecords(
            source.path,
            prompt_field=source.prompt_field,
            answer_field=source.answer_field,
            solution_field=source.solution_field,
            source=source.source,
        )
    else:
        records = ReasoningGymRecords(
            source.task, size=source.size, seed=source.seed, **source.options
        )
    return records[: source.limit] if source.limit else records


def _demonstrations(config: Config) -> tuple[Demonstration, ...]:
    if not (config.warm_start.num_steps and config.warm_start.path):
        return ()
    return demonstrations_of(config)


def _tokenizer(
    config: Config, train: Sequence[Record], demonstrations: Sequence[Demonstration]
) -> Tokenizer:
    if config.tokenizer.path:
        return load_tokenizer(config.tokenizer.path)
    texts = [
        config.data.template.replace("{prompt}", record.prompt) + (record.solution or record.answer)
        for record in train[:_TOKENIZER_RECORDS]
    ]
    texts += texts_of(demonstrations[:_TOKENIZER_RECORDS])
    tokenizer = train_tokenizer(texts, vocab_size=config.tokenizer.vocab_size)
    if all(isinstance(demonstration.context, str) for demonstration in demonstrations):
        return tokenizer
    template = ChatTemplate(
        PLAIN_TEMPLATE, origin="a trained tokenizer", special_tokens=tokenizer.special_tokens
    )
    return dataclasses.replace(tokenizer, chat_template=template)


def model_for(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    """The config's model, checked against its checkpoint, with the number of ids that the tokenizer has."""
    model = config.model
    check_checkpoint(config)
    if config.weights:
        check_params(config.weights, model)
    if config.adapter:
        check_adapter(config.adapter, model)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; set model.vocab_size to at least "
            f"{tokenizer.vocab_size}, or use the model's own tokenizer"
        )
    return dataclasses.replace(model, num_tokens=tokenizer.vocab_size)


def check_checkpoint(config: Config) -> None:
    """Raises UserError where the config's model is not that of its weights or of its adapter."""
    if config.weights:
        _check_same_shape(config.model, read_config(config.weights), config.weights)
    if config.adapter:
        _check_same_adapters(config.model.lora, read_adapter_config(config.adapter), config.adapter)


def _check_same_shape(model: ModelConfig, stored: ModelConfig, directory: str) -> None:
    """The recipe's shape is what was planned with; the checkpoint's is what there is."""
    different = [
        f"model.{f.name} = {getattr(model, f.name)}, but {getattr(stored, f.name)} in the checkpoint"
        for f in dataclasses.fields(model)
        if f.name not in ("num_tokens", "lora")
        and getattr(model, f.name) != getattr(stored, f.name)
    ]
    if different:
        raise UserError(
            f"the config does not describe the model in {directory}: {'; '.join(different)}. "
            "Change these settings, or `weights`"
        )


def _check_same_adapters(ours: LoraConfig, stored: LoraConfig, directory: str) -> None:
    if dataclasses.replace(ours, targets=tuple(sorted(ours.targets))) != stored:
        raise UserError(
            f"model.lora is rank {ours.rank}, alpha {ours.alpha}, targets {', '.join(ours.targets)}, but the "
            f"adapter in {directory} has {stored.rank}, {stored.alpha}, {', '.join(stored.targets)}; "
            "set model.lora to these, or change `adapter`"
        )


def check_batches(config: Config, mesh: Mesh | AbstractMesh, *, samples: bool) -> None:
    """Raises UserError for a batch size that does not divide over a mesh.

    Args:
      config: of the run.
      mesh: of a pool.
      samples: it is where the actor samples.
    """
    check_divides("train.rows", config.train.rows, "batch", TRAIN_RULES, mesh)
    check_divides("train.row_tokens", config.train.row_tokens, "length", TRAIN_RULES, mesh)
    if samples:
        slots, prompts = config.rollout.slots, config.rollout.prefill_prompts
        check_divides("rollout.slots", slots, "batch", GENERATE_RULES, mesh)
        check_divides("rollout.prefill_prompts", prompts, "batch", GENERATE_RULES, mesh)


def _check_judge_batches(config: Config, mesh: Mesh) -> None:
    """The judge samples with slots of its own, on the mesh of its pool."""
    slots, prompts = config.reward.judge.slots, config.rollout.prefill_prompts
    check_divides("reward.judge.slots", slots, "batch", GENERATE_RULES, mesh)
    check_divides("rollout.prefill_prompts", min(slots, prompts), "batch", GENERATE_RULES, mesh)
