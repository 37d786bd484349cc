"""ZeRO and FSDP share weights, gradients and moments out differently, and compute the same."""

import jax
import numpy as np
import pytest
from closeness import assert_close

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.sharding_strategies import ZERO, state_rules
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import PackedBatch, TrainBatch

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=16, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=8
)
R, T = 8, 8


def actor_of(name: str, **layout) -> Actor:
    sizes = ParallelLayout.from_config(LayoutConfig(**layout))
    return Actor(
        MODEL,
        build_mesh(sizes, jax.devices()[: sizes.num_devices]),
        train=TrainConfig(rows=R, row_tokens=T),
        # With an epsilon as large as this a step of Adam has the scale of the gradient.
        optim=OptimConfig(
            lr=1.0, epsilon=1.0, lr_warmup_steps=0, weight_decay=0.0, grad_clip=np.inf
        ),
        temperature=1.0,
        seed=0,
        state_rules=state_rules(name),
    )


def batch() -> TrainBatch:
    """Two microbatches of whole rows."""
    tokens = np.random.default_rng(0).integers(0, 16, (1, 2, R, T)).astype(np.int32)
    ones = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape).copy()
    mask = (positions > 0).astype(np.float32)
    packed = PackedBatch(
        tokens, positions, ones, sequence=ones, loss_mask=mask, num_micro_U=np.full(1, 2, np.int32)
    )
    return TrainBatch.of(packed)


def stepped(actor: Actor, start) -> tuple:
    if start is None:
        actor.init()
    else:
        actor.state = jax.device_put(start, actor.state_shardings())
    before = jax.device_get(actor.state)
    loss = actor.update(actor.place(batch()), SUPERVISED)["loss"]
    return before, jax.device_get(actor.state.params), float(loss), actor.state


@pytest.fixture(scope="module")
def one_device():
    return stepped(actor_of("FSDP", train="1-1-1"), None)


def shares(state: TrainState) -> tuple[float, float]:
    """Of weights and moments, the part that one device holds."""

    def share(tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 1]
        held = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
        return held / sum(leaf.size for leaf in leaves)

    return share(state.params), share(state.opt_state)


@pytest.mark.parametrize(
    ("name", "weights", "moments"),
    [
        pytest.param("replicated", 1, 1, marks=pytest.mark.slow),
        pytest.param("ZeRO-1", 1, 1 / 8, marks=pytest.mark.slow),
        ("ZeRO-2", 1, 1 / 8),
        ("ZeRO-3", 1 / 8, 1 / 8),
        ("FSDP", 1 / 2, 1 / 2),
    ],
)
def test_the_same_step_with_another_share(one_device, name, weights, moments):
    start, expected, expected_loss, _ = one_device
    _, params, loss, state = stepped(actor_of(name, train="1-1-8", fsdp=2), start)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(params, expected, scale=1)
    # Biases are whole everywhere: they have no width to split.
    assert shares(state) == (
        pytest.approx(weights, abs=0.03),
        pytest.approx(moments, abs=0.03),
    )


def test_an_unknown_share_lists_the_known():
    with pytest.raises(UserError, match=f"'ZeRO' is not one of {', '.join(ZERO)}"):
        state_rules("ZeRO")
