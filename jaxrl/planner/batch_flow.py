"""Describes in words how many samples a step draws, keeps and trains on.

G answers per prompt   U updates   M microbatches of an update   R rows of a microbatch   T tokens of a row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxrl.config.batch_shapes import step_shape
from jaxrl.mesh.pipeline import bubble, microbatches_of
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shards_of
from jaxrl.planner.planned_roles import PlannedRoles


def describe_flow(roles: PlannedRoles) -> Iterator[tuple[str, str]]:
    """(stage, numbers) pairs of a step, in order."""
    rollout, engine = roles.config.rollout, roles.engine.config
    dataflow, replicas = roles.algorithm.dataflow, roles.engine.shards
    dynamic = dataflow.dynamic_sampling
    prompts = rollout.prompts_per_batch(dynamic_sampling=dynamic)
    sampled = prompts * rollout.num_samples
    greedy = f", and {prompts:,} greedy ones" if dataflow.greedy_baseline else ""
    limit = rollout.max_generation_batches
    batches = f"; at most {limit} batches a step" if limit else "; as many batches as a step takes"
    batches = batches if dynamic else ""
    yield (
        "generation batch",
        f"{prompts:,} prompts x {rollout.num_samples} samples = {sampled:,} responses of "
        f"at most {engine.max_response_tokens:,} tokens{greedy}{batches}",
    )
    idle = rollout.slots != "auto" and rollout.slots > engine.slots
    yield (
        "decoding",
        f"{engine.slots:,} slots over {replicas} replicas, {engine.slots // replicas} on each; every slot "
        f"is filled {sampled / engine.slots:.1f} times a batch"
        + (f"; rollout.slots {rollout.slots:,} are more than its samples" if idle else ""),
    )
    yield (
        "prefill",
        f"{engine.prefill_prompts} prompts x {engine.max_prompt_tokens:,} tokens, "
        f"{engine.prefill_prompts // replicas} on each replica",
    )
    config, train, actor = roles.config, roles.config.train, roles.roles.actor
    U, M, R, T = dataclasses.astuple(step_shape(config))
    sequences = rollout.num_prompts * rollout.num_samples
    which = "with right and wrong answers" if dynamic else "all of them"
    yield "groups kept", f"{rollout.num_prompts:,}, {which} = {sequences:,} sequences"
    yield (
        "learning",
        f"{U} updates x {sequences // U:,} sequences, each in at most {M} microbatches of {R} rows x "
        f"{T:,} tokens",
    )
    for program, rules, mesh, rows, requested in (
        ("prefill", GENERATE_RULES, roles.engine.mesh, engine.prefill_prompts, 0),
        ("decoding", GENERATE_RULES, roles.engine.mesh, engine.slots, 0),
        ("learning", TRAIN_RULES, actor.mesh, train.rows, train.pipeline_microbatches),
    ):
        stages = shards_of("layers", rules, mesh)
        if stages > 1:
            micro = microbatches_of(rows, rules, mesh, requested)
            yield (
                f"pipeline, {program}",
                f"{stages} stages x {micro} microbatches of {rows // micro} rows: "
                f"idle for {bubble(stages, micro):.0%} of the time",
            )
