"""Shapes that follow from a run's config: of its batches, of its sampling programs, and of its model.

    config.weights = DIR                          DIR/config.json has the model's shape
    config.model = model_shapes("qwen2.5-32b")    a shape by name, for planning without the files

Model settings that differ from their defaults must agree with the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh, Mesh

from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh.pools import places
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, check_divides, shards_of
from jaxrl.models.huggingface.config_json import read_adapter_config, read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import SHAPES
from jaxrl.roles.packing import PackedShape, RowLimits
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.settings import EngineConfig

# Tokens that rows are made longer up to: more answers to a prompt in a row save little.
_LONGEST_ROW = 4096


def row_limits(config: Config, *, longest: int | None = None) -> RowLimits:
    """Limits of packed batches. `longest` is the longest sequence; by default a prompt and a response."""
    return RowLimits(
        config.train.rows,
        config.row_tokens,
        config.longest_sequence if longest is None else longest,
    )


def step_shape(config: Config, meshes: Sequence[Mesh] = ()) -> PackedShape:
    """The shape [U, M, R, T] of the batch that a step of reinforcement learning trains on.

    With the meshes of its roles, "auto" rows are as long as prompts with several answers need.
    """
    rollout, limits = config.rollout, row_limits(config)
    # Pipeline stages share out rows, so fewer might not divide; rows that are split over devices share no
    # prompts.
    split = any(
        shards_of(axis, TRAIN_RULES, mesh) > 1 for mesh in meshes for axis in ("layers", "length")
    )
    if meshes and not split and config.train.row_tokens == "auto" and config.train.share_prompts:
        # Fewer rows with as many tokens of a microbatch, or twice as many if a row then holds a whole group.
        # Each answer begins with the last token of the prompt (`roles.batches.pack_completions`).
        group = config.data.max_prompt_tokens - 1
        group += rollout.num_samples * (rollout.max_response_tokens + 1)
        # Roles may split the batch into other numbers, and the rows have to divide for each of them.
        parts = math.lcm(*(shards_of("batch", TRAIN_RULES, mesh) for mesh in meshes))
        of_device, most = limits.rows // parts, max(_LONGEST_ROW, limits.tokens)
        merged = max(
            n for n in range(1, of_device + 1) if of_device % n == 0 and n * limits.tokens <= most
        )
        # In multiples of 64, as `Config.row_tokens`.
        tokens, group = merged * limits.tokens, -(-group // 64) * 64
        if merged == of_device and group <= min(2 * tokens, most):
            tokens = max(tokens, group)
        limits = dataclasses.replace(limits, rows=limits.rows // merged, tokens=tokens)
    # As many further conversations of agents as there are samples: `roles.batches.pack_completions`.
    sequences = rollout.num_prompts * rollout.num_samples * (2 if rollout.agent else 1)
    return limits.shape(sequences, minibatches=config.algorithm.updates_per_step)


def stop_ids_of(rollout: RolloutConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """All token ids that end a response: the tokenizer's, the settings', those that stop strings name."""
    named = tokenizer.ids_named_by(rollout.stop_strings)
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *rollout.stop_ids, *named)))


def engine_config(
    config: Config, stop_ids: tuple[int, ...], *, prompts_per_batch: int, replicas: int
) -> EngineConfig:
    """Sizes of the engine that the actor samples with: no more slots than a generation batch has samples.

    Args:
      config: config of the run, with a number of slots.
      stop_ids: token ids that end a response.
      prompts_per_batch: number of prompts of a generation batch.
      replicas: number of replicas that sample; each has the same number of slots.
    """
    rollout = config.rollout
    assert rollout.slots != "auto", "the planner has chosen the number of slots"
    samples = prompts_per_batch * rollout.num_samples
    # Matmuls of one row round otherwise.
    each = max(2 if rollout.deterministic else 1, -(-samples // replicas))
    settings = rollout.engine_settings(
        slots=min(rollout.slots, each * replicas),
        prefill_prompts=-(-rollout.prefill_prompts // replicas) * replicas,
    )
    prompt = config.data.max_prompt_tokens
    if rollout.agent:
        # A turn goes on after the whole conversation, whose pages are known.
        settings["cache"], prompt = "paged", config.longest_sequence - 1
    return EngineConfig(
        **settings,
        max_prompt_tokens=prompt,
        max_response_tokens=rollout.max_response_tokens,
        stop_ids=stop_ids,
        context_tokens=config.longest_sequence if rollout.agent else 0,
        # Partial rollout beside a learner stops all slots at the same dispatch; evaluations then use its
        # programs.
        replicas_apart=not rollout.partial or places(config.placement, "rollout"),
        keeps_routes=config.train.replay_routes,
    )


def check_sampling_batches(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the policy's sampling mesh does not divide the slots."""
    rollout = config.rollout
    if rollout.slots != "auto":
        check_divides("rollout.slots", rollout.slots, "batch", GENERATE_RULES, mesh)


# Settings that a run adds to the model of a checkpoint.
_OF_THE_RUN = ("num_tokens", "lora")


def model_of(
    config: Config, read: Callable[[str], ModelConfig] = read_config
) -> tuple[ModelConfig, str]:
    """The run's model, and a description of where its shape comes from.

    Args:
      config: config of the run.
      read: reads the model of a folder; `Resolved.model_in` reads it once.

    Raises:
      UserError: the settings contradict the checkpoint or its adapter, or there is neither a checkpoint nor a
        shape.
    """
    if config.adapter and is_here(config.adapter, "adapter_config.json"):
        ours, stored = config.model.lora, read_adapter_config(config.adapter)
        if dataclasses.replace(ours, targets=tuple(sorted(ours.targets))) != stored:
            raise UserError(
                f"model.lora is rank {ours.rank}, alpha {ours.alpha}, targets {', '.join(ours.targets)}, but "
                f"the adapter in {config.adapter} has {stored.rank}, {stored.alpha}, "
                f"{', '.join(stored.targets)}; set model.lora to these, or change `adapter`"
            )
    if not config.weights:
        return _for_run(config.model, config), "config.model, random weights"
    if is_here(config.weights):
        model, stored = config.model, read(config.weights)
        # Scores instead of logits make it a scalar model, which the user must ask for explicitly.
        names = [
            name
            for name in dict.fromkeys((*_stated(model), "num_scores"))
            if getattr(model, name) != getattr(stored, name)
        ]
        if names:
            different = "; ".join(
                f"model.{name} = {getattr(model, name)}, but {getattr(stored, name)} in the checkpoint"
                for name in names
            )
            overrides = " ".join(f"--config.model.{n}={getattr(stored, n)}" for n in names)
            raise UserError(
                f"the config does not describe the model in {config.weights}: {different}. Leave these "
                f"settings out, which takes them from the checkpoint, or say {overrides}, or change `weights`"
            )
        of_the_run = {name: getattr(config.model, name) for name in _OF_THE_RUN}
        stored = _for_run(stored, config)
        return dataclasses.replace(stored, **of_the_run), config.weights
    if not _stated(config.model):
        # The longest name that the weights' name has in it: qwen2.5-0.5b in Qwen/Qwen2.5-0.5B-Instruct.
        named = [name for name in SHAPES if name in config.weights.lower()]
        shape = max(named, key=len, default="qwen2.5-32b")
        raise UserError(
            f"weights {config.weights} is not here, so the shape of the model is not known; put its "
            "config.json there (a run fetches it from the hub, a dry run does not), or name it in the "
            f'recipe: config.model = model_shapes("{shape}")'
        )
    model = _for_run(config.model, config)
    return model, f"config.model; {config.weights} is not here to compare it with"


def _for_run(model: ModelConfig, config: Config) -> ModelConfig:
    """The model for texts as long as those of a run: some rotate by other factors, or refuse them."""
    if config.sft.num_steps:
        # Its examples may fill a whole row.
        model.check_texts_of(config.row_tokens)
    return model.for_texts_of(config.longest_sequence)


def is_here(directory: str, file: str = "config.json") -> bool:
    """Whether a Hugging Face directory exists and has `file`."""
    return (pathlib.Path(directory) / file).is_file()


def tokenizer_directory(config: Config) -> str:
    """Directory of the tokenizer: the configured one, else that of the weights; "" to train a tokenizer."""
    with_weights = config.weights and is_here(config.weights, "tokenizer.json")
    return config.tokenizer.path or (config.weights if with_weights else "")


def _stated(model: ModelConfig) -> list[str]:
    """Model settings that differ from their defaults."""
    default = ModelConfig()
    return [
        field.name
        for field in dataclasses.fields(model)
        if field.name not in _OF_THE_RUN
        and getattr(model, field.name) != getattr(default, field.name)
    ]
