"""Shapes of a run's batches and of its sampling programs, derived from its config alone."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from jaxrl.config.schema import Config
from jaxrl.data.packing import PackedShape, RowLimits
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, check_divides
from jaxrl.rollout.settings import EngineConfig


def row_limits(config: Config, *, longest: int | None = None) -> RowLimits:
    """Limits of packed batches. `longest` is the longest sequence; by default a prompt and a response."""
    return RowLimits(
        config.train.rows,
        config.train.row_tokens,
        config.longest_sequence if longest is None else longest,
    )


def step_shape(config: Config) -> PackedShape:
    """The shape [U, M, R, T] of the batch that a step of reinforcement learning trains on."""
    rollout = config.rollout
    return row_limits(config).shape(
        rollout.num_prompts * rollout.num_samples, minibatches=config.algorithm.updates_per_step
    )


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
    return EngineConfig(
        **rollout.engine_settings(slots=min(rollout.slots, each * replicas)),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        stop_ids=stop_ids,
        attention=config.train.attention,
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
    check_divides("train.row_tokens", config.train.row_tokens, "length", TRAIN_RULES, mesh)


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
