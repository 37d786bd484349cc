"""A small model and batches for the roles' tests."""

import functools

import jax
import numpy as np
import pytest

from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import PackedBatch, TrainBatch

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=8
)
ENGINE = EngineConfig(
    slots=4,
    prefill_prompts=4,
    max_prompt_tokens=4,
    max_response_tokens=4,
    tokens_per_dispatch=4,
    stop_ids=(1,),
)


def actor_on(mesh, *, model=MODEL, engine: EngineConfig | None = None, **changes) -> Actor:
    """An actor without weights. It samples, with numbers for texts, if it has the settings of an engine."""
    if engine is not None:
        decode = functools.partial(map, str)
        changes["backend"] = build_backend("offline", model, mesh, engine, decode)
    train = TrainConfig(rows=8, row_tokens=8)
    given = {"train": train, "optim": OptimConfig(), "temperature": 1.0, "seed": 0}
    return Actor(model, mesh, **(given | changes))


def assert_as_planned(actor: Actor) -> None:
    """Every leaf of the state has the shape, type and sharding of `abstract_state`."""
    jax.tree.map(
        lambda leaf, plan: (
            (leaf.shape, leaf.dtype, leaf.sharding) == (plan.shape, plan.dtype, plan.sharding)
            or pytest.fail(f"{leaf.sharding} is not {plan.sharding}")
        ),
        actor.state,
        actor.abstract_state(),
    )


def whole_rows(
    seed: int = 0, *, microbatches: int = 1, rows: int = 8, tokens: int = 8
) -> TrainBatch:
    """Rows of one sequence each, all but the first token trained on."""
    shape = (1, microbatches, rows, tokens)
    token = np.random.default_rng(seed).integers(0, MODEL.vocab_size, shape).astype(np.int32)
    ones = np.ones_like(token)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), shape).copy()
    mask = (positions > 0).astype(np.float32)
    num_micro_U = np.full(1, microbatches, np.int32)
    return TrainBatch.of(PackedBatch(token, positions, ones, ones, mask, num_micro_U=num_micro_U))
