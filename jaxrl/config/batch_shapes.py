"""Shapes of a run's batches and of its sampling programs, derived from its config alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from jaxrl.config.schema import Config
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, check_divides, shards_of
from jaxrl.roles.packing import PackedShape, RowLimits
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
    if meshes and config.train.row_tokens == "auto" and config.train.share_prompts:
        # Each answer begins with the last token of the prompt (`roles.batches.pack_completions`).
        group = config.data.max_prompt_tokens - 1
        group += rollout.num_samples * (rollout.max_response_tokens + 1)
        limits = _with_longer_rows(limits, meshes, group)
    # As many further conversations of agents as there are samples: `roles.batches.pack_completions`.
    sequences = rollout.num_prompts * rollout.num_samples * (2 if rollout.agent else 1)
    return limits.shape(sequences, minibatches=config.algorithm.updates_per_step)


def _with_longer_rows(limits: RowLimits, meshes: Sequence[Mesh], group: int) -> RowLimits:
    """Fewer rows with as many tokens of a microbatch, or twice as many if a row then holds a whole group."""
    axes = ("layers", "length")
    if any(shards_of(axis, TRAIN_RULES, mesh) > 1 for mesh in meshes for axis in axes):
        return limits
    of_device = limits.rows // math.lcm(*(shards_of("batch", TRAIN_RULES, mesh) for mesh in meshes))
    most = max(_LONGEST_ROW, limits.tokens)
    merged = max(
        n for n in range(1, of_device + 1) if of_device % n == 0 and n * limits.tokens <= most
    )
    tokens, group = merged * limits.tokens, -(-group // 64) * 64
    if merged == of_device and group <= min(2 * tokens, most):
        tokens = max(tokens, group)
    return dataclasses.replace(limits, rows=limits.rows // merged, tokens=tokens)


def engine_config(
    config: Config, stop_ids: tuple[int, ...], *, dynamic_sampling: bool, replicas: int
) -> EngineConfig:
    """Sizes of the engine that the actor samples with: no more slots than a generation batch has samples.

    Args:
      config: config of the run, with a number of slots.
      stop_ids: token ids that end a response.
      dynamic_sampling: as in `Dataflow`.
      replicas: number of replicas that sample; each has the same number of slots.
    """
    rollout = config.rollout
    assert rollout.slots != "auto", "the planner has chosen the number of slots"
    samples = rollout.prompts_per_batch(dynamic_sampling=dynamic_sampling) * rollout.num_samples
    # Matmuls of one row round otherwise.
    each = max(2 if rollout.deterministic else 1, -(-samples // replicas))
    settings = rollout.engine_settings(slots=min(rollout.slots, each * replicas))
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
        keeps_routes=config.train.replay_routes,
    )


def judge_engine_config(config: Config, stop_ids: tuple[int, ...]) -> EngineConfig:
    """Sizes of the generative judge's engine: its own number of slots, otherwise as for the policy."""
    options, rollout = config.reward.judge, config.rollout
    settings = rollout.engine_settings(
        slots=options.slots,
        prefill_prompts=min(options.slots, rollout.prefill_prompts),
        # The judge's answers are short, and its slots are few.
        cache="contiguous",
        cache_tokens=0,
        speculate=0,
    )
    return EngineConfig(
        **settings,
        max_prompt_tokens=options.max_prompt_tokens,
        max_response_tokens=options.max_verdict_tokens,
        stop_ids=stop_ids,
    )


def check_training_batches(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the mesh of a role does not divide the rows or the tokens of a microbatch."""
    check_divides("train.rows", config.train.rows, "batch", TRAIN_RULES, mesh)
    check_divides("train.row_tokens", config.row_tokens, "length", TRAIN_RULES, mesh)


def check_sampling_batches(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the policy's sampling mesh does not divide slots or prompts per prefill."""
    rollout = config.rollout
    if rollout.slots != "auto":
        check_divides("rollout.slots", rollout.slots, "batch", GENERATE_RULES, mesh)
    check_divides("rollout.prefill_prompts", rollout.prefill_prompts, "batch", GENERATE_RULES, mesh)


def check_judge_batches(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the judge's mesh does not divide its slots or its prompts per prefill."""
    slots, prompts = config.reward.judge.slots, config.rollout.prefill_prompts
    check_divides("reward.judge.slots", slots, "batch", GENERATE_RULES, mesh)
    check_divides("rollout.prefill_prompts", min(slots, prompts), "batch", GENERATE_RULES, mesh)
