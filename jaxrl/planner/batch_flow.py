"""How many a step samples, keeps and learns from, and the words for it.

G answers per prompt   U updates   M microbatches of an update   R rows of a microbatch   T tokens of a row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax.sharding import Mesh

from jaxrl.data.packing import PackedShape
from jaxrl.mesh.pipeline import bubble, microbatches_of
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shards_of
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.settings import EngineConfig


@dataclasses.dataclass(frozen=True)
class BatchFlow:
    """How many of what a step samples, keeps and learns from.

    Attributes:
      generation_prompts: prompts of one generation batch.
      max_generation_batches: how many of these a step may take; 0 as many as it takes.
      num_prompts: groups a step learns from.
      num_samples: G, samples of each prompt.
      shape: [U, M, R, T] of the packed sequences.
      keeps_mixed_groups: only groups with right and wrong answers count (dynamic sampling).
      greedy_answers: every prompt gets a greedy answer besides.
    """

    generation_prompts: int
    max_generation_batches: int
    num_prompts: int
    num_samples: int
    shape: PackedShape
    keeps_mixed_groups: bool = False
    greedy_answers: bool = False


def describe_flow(
    flow: BatchFlow, mesh: Mesh, engine: EngineConfig, train: TrainConfig
) -> tuple[tuple[str, str], ...]:
    """(what, how many) of a step, in the order in which they happen."""
    return (
        *_describe_sampling(flow, engine, replicas=shards_of("batch", GENERATE_RULES, mesh)),
        *_describe_learning(flow),
        *_describe_pipelines(flow, mesh, engine, train),
        (
            "programs of the actor",
            "to_generate, prefill, insert, generate, logprobs, update: all traced",
        ),
    )


def _describe_sampling(
    flow: BatchFlow, engine: EngineConfig, *, replicas: int
) -> Iterator[tuple[str, str]]:
    sampled = flow.generation_prompts * flow.num_samples
    limit = flow.max_generation_batches
    batches = f"; at most {limit} batches a step" if limit else "; as many batches as a step takes"
    greedy = f", and {flow.generation_prompts:,} greedy ones"
    yield (
        "generation batch",
        f"{flow.generation_prompts:,} prompts x {flow.num_samples} samples = {sampled:,} responses of "
        f"at most {engine.max_response_tokens:,} tokens"
        f"{greedy if flow.greedy_answers else ''}{batches if flow.keeps_mixed_groups else ''}",
    )
    yield (
        "decoding",
        f"{engine.slots:,} slots over {replicas} replicas, {engine.slots // replicas} on each; every slot "
        f"is filled {sampled / engine.slots:.1f} times a batch",
    )
    yield (
        "prefill",
        f"{engine.prefill_prompts} prompts x {engine.max_prompt_tokens:,} tokens, "
        f"{engine.prefill_prompts // replicas} on each replica",
    )


def _describe_learning(flow: BatchFlow) -> Iterator[tuple[str, str]]:
    U, M, R, T = dataclasses.astuple(flow.shape)
    sequences = flow.num_prompts * flow.num_samples
    which = "with right and wrong answers" if flow.keeps_mixed_groups else "all of them"
    yield "groups kept", f"{flow.num_prompts:,}, {which} = {sequences:,} sequences"
    yield (
        "learning",
        f"{U} updates x {sequences // U:,} sequences, each in at most {M} microbatches of {R} rows x "
        f"{T:,} tokens",
    )


def _describe_pipelines(
    flow: BatchFlow, mesh: Mesh, engine: EngineConfig, train: TrainConfig
) -> Iterator[tuple[str, str]]:
    """A line for each program that has stages."""
    for program, rules, rows, requested in (
        ("prefill", GENERATE_RULES, engine.prefill_prompts, 0),
        ("decoding", GENERATE_RULES, engine.slots, 0),
        ("learning", TRAIN_RULES, flow.shape.rows, train.pipeline_microbatches),
    ):
        stages = shards_of("layers", rules, mesh)
        if stages > 1:
            micro = microbatches_of(rows, rules, mesh, requested)
            yield (
                f"pipeline, {program}",
                f"{stages} stages x {micro} microbatches of {rows // micro} rows: "
                f"idle for {bubble(stages, micro):.0%} of the time",
            )
