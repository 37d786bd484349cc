"""ZeRO and FSDP share weights, gradients and moments out differently, and compute the same."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from small import actor_on, whole_rows

from jaxrl.errors import UserError
from jaxrl.mesh.sharding_strategies import ZERO, state_rules
from jaxrl.roles.learner import TrainState
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor


def actor_of(name: str, **layout) -> Actor:
    return actor_on(
        mesh_of(**layout),
        # With an epsilon as large as this a step of Adam has the scale of the gradient.
        optim=OptimConfig(
            lr=1.0, epsilon=1.0, lr_warmup_steps=0, weight_decay=0.0, grad_clip=np.inf
        ),
        state_rules=state_rules(name),
    )


def stepped(actor: Actor, start) -> tuple:
    if start is None:
        actor.init()
    else:
        actor.state = jax.device_put(start, actor.state_shardings())
    before = jax.device_get(actor.state)
    loss = actor.update(actor.place(whole_rows(microbatches=2)), SUPERVISED)["loss"]
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
        pytest.param("replicated", 1, 1, marks=pytest.mark.long),
        pytest.param("ZeRO-1", 1, 1 / 8, marks=pytest.mark.long),
        ("ZeRO-2", 1, 1 / 8),
        pytest.param("ZeRO-3", 1 / 8, 1 / 8, marks=pytest.mark.long),
        ("FSDP", 1 / 2, 1 / 2),
    ],
)
def test_the_same_step_with_another_share(one_device, name, weights, moments):
    start, expected, expected_loss, _ = one_device
    _, params, loss, state = stepped(actor_of(name, train="1-1-8", fsdp=2), start)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(params, expected, scale=1)
    # Biases are whole everywhere: they have no width to split.
    assert shares(state) == (pytest.approx(weights, abs=0.03), pytest.approx(moments, abs=0.03))


def test_an_unknown_share_lists_the_known():
    with pytest.raises(UserError, match=f"'ZeRO' is not one of {', '.join(ZERO)}"):
        state_rules("ZeRO")
