"""Between sampling and learning: which copies of the weights exist, and where the rest waits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.actor import Actor
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.rollout.engine import EngineConfig

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=4, num_kv_heads=4, head_dim=8
)
LAYOUT = {"train": "1-4-2", "generate": "1-2-2-2", "fsdp": 2}


def actor_of(dtype, *, park=False, **layout) -> Actor:
    sizes = ParallelLayout.from_config(LayoutConfig(**layout or LAYOUT))
    actor = Actor(
        MODEL,
        build_mesh(sizes, jax.devices()[: sizes.num_devices]),
        train=TrainConfig(rows=8, row_tokens=8),
        optim=OptimConfig(),
        engine=EngineConfig(8, 8, 4, 4, 4, (1,), dtype=dtype),
        temperature=1.0,
        seed=0,
        park=park,
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
    actor = actor_of(jnp.float32)
    before, trained = jax.device_get(actor.state), actor.state.params
    actor.load_rollout()
    sampled = actor._rollout_params
    assert all(gone(trained, sampled))
    assert_same(sampled, before.params)
    assert_same(actor.state, before)
    assert all(gone(sampled, actor.state.params))


def test_wider_master_weights_stay():
    actor = actor_of(jnp.bfloat16)
    before, trained = jax.device_get(actor.state), actor.state.params
    actor.load_rollout()
    assert not any(gone(trained, actor._rollout_params))
    assert_same(actor.state, before)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_training_state_waits_in_host_memory(dtype):
    actor = actor_of(dtype, park=True)
    before = jax.device_get(actor.state)
    actor.load_rollout()
    waiting = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor._state)}
    assert waiting == {"pinned_host"}
    actor.load_rollout()
    assert_same(actor.state, before)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actor.state)}
    assert "pinned_host" not in kinds


def test_one_device_shares_what_needs_no_move():
    actor = actor_of(jnp.float32, train="1-1-1")
    leaf = actor.state.params["embedding"]
    actor.load_rollout()
    assert actor.state.params["embedding"] is leaf
