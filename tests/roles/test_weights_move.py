"""Between sampling and learning: which copies of the weights exist, and where the rest waits."""

import jax
import numpy as np
import pytest

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.config import ModelConfig
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.roles.policy import Actor
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=4, num_kv_heads=4, head_dim=8
)
LAYOUT = {"train": "1-4-2", "generate": "1-2-2-2", "fsdp": 2}


def engine_of(dtype) -> EngineConfig:
    return EngineConfig(
        slots=8,
        prefill_prompts=8,
        max_prompt_tokens=4,
        max_response_tokens=4,
        tokens_per_dispatch=4,
        stop_ids=(1,),
        dtype=dtype,
    )


def actor_of(dtype, *, offload=False, **layout) -> Actor:
    sizes = ParallelLayout.from_config(LayoutConfig(**layout or LAYOUT))
    mesh = build_mesh(sizes, jax.devices()[: sizes.num_devices])
    actor = Actor(
        MODEL,
        mesh,
        train=TrainConfig(rows=8, row_tokens=8),
        optim=OptimConfig(),
        temperature=1.0,
        seed=0,
        backend=build_backend("offline", MODEL, mesh, engine_of(dtype), str),
        offload=offload,
    )
    actor.init()
    return actor


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def gone(old, new) -> list[bool]:
    """For each leaf of `old`: it is deleted, or `new` uses it itself."""
    leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return [a is b or a.is_deleted() for a, b in leaves]


def test_weights_of_one_type_are_never_held_twice():
    actor = actor_of("float32")
    before, trained = jax.device_get(actor.state), actor.state.params
    actor.for_sampling()
    sampled = actor.backend.params
    assert all(gone(trained, sampled))
    assert_same(sampled, before.params)
    assert_same(actor.for_training(), before)
    assert all(gone(sampled, actor.state.params))
    assert not actor.can_sample


def test_wider_master_weights_stay():
    actor = actor_of("bfloat16")
    before, trained = jax.device_get(actor.state), actor.state.params
    actor.for_sampling()
    assert not any(gone(trained, actor.backend.params))
    assert_same(actor.state, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_training_state_waits_in_host_memory(dtype):
    actor = actor_of(dtype, offload=True)
    before = jax.device_get(actor.state)
    actor.for_sampling()
    waiting = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor._state)}
    assert waiting == {"pinned_host"}
    actor.for_sampling()
    with pytest.raises(AssertionError, match="call for_training"):
        actor.state  # noqa: B018
    assert_same(actor.for_training(), before)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor.state)}
    assert "pinned_host" not in kinds


def test_one_device_shares_what_needs_no_move():
    actor = actor_of("float32", train="1-1-1")
    leaf = actor.state.params["embedding"]
    actor.for_sampling()
    assert actor.for_training().params["embedding"] is leaf
