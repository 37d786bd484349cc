"""Shapes of a run's batches and of its sampling programs, derived from its config alone."""

from __future__ import annotations

from collections.abc import Mapping

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


def engine_config(config: Config, stop_ids: tuple[int, ...]) -> EngineConfig:
    """Sizes of the engine that the actor samples with."""
    return EngineConfig(
        **config.rollout.engine_settings(),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_ids=stop_ids,
        attention=config.train.attention,
    )


def judge_engine_config(config: Config, stop_ids: tuple[int, ...]) -> EngineConfig:
    """Sizes of the generative judge's engine: its own number of slots, otherwise as for the policy."""
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


def check_role_batches(config: Config, meshes: Mapping[str, Mesh | AbstractMesh]) -> None:
    """Raises UserError for a batch size that the mesh of a role does not divide.

    Args:
      config: config of the run.
      meshes: mesh of each role.
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
    """Checks the judge's number of slots against the mesh of its pool."""
    slots, prompts = config.reward.judge.slots, config.rollout.prefill_prompts
    check_divides("reward.judge.slots", slots, "batch", GENERATE_RULES, mesh)
    check_divides("rollout.prefill_prompts", min(slots, prompts), "batch", GENERATE_RULES, mesh)
