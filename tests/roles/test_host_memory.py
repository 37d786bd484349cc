"""Activations in pinned host memory change where they lie, and no number."""

import dataclasses
import functools

import jax
import pytest
import small
from closeness import assert_close
from meshes import mesh_of
from packed import TWO_UPDATES, packed, sequences
from small import actor_on

from jaxrl.errors import UserError
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig

MODEL = dataclasses.replace(small.MODEL, vocab_size=128, d_model=64, d_ff=32)
SHAPE = dataclasses.replace(TWO_UPDATES, microbatches=1, rows=4)


@functools.cache
def actor_of(*, remat: str = "none", fsdp: int = 1) -> Actor:
    """One actor for each setting, whose programs all tests share."""
    return actor_on(
        mesh_of(f"1-1-{fsdp}", fsdp=fsdp),
        model=MODEL,
        train=TrainConfig(rows=SHAPE.rows, row_tokens=SHAPE.tokens, remat=remat),
        optim=OptimConfig(lr=1e-2, lr_warmup_steps=0),
    )


@functools.cache
def batch():
    return packed(sequences(), SHAPE)[1]


def after_two_steps(actor: Actor):
    """The state, on the host."""
    actor.init()
    for _ in range(2):
        actor.update(actor.place(batch()), SUPERVISED)
    return jax.device_get(actor.state)


@functools.cache
def on_device(**options):
    """What training with all of it on the device comes to."""
    actor = actor_of(**options)
    state = after_two_steps(actor)
    assert memories(actor.state) == ({"device"}, {"device"})
    return state


def memories(state) -> tuple[set[str], set[str]]:
    """(kinds of memory of weights, of moments)."""
    kind = lambda leaf: leaf.sharding.memory_kind  # noqa: E731
    moments = (leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    return set(map(kind, jax.tree.leaves(state.params))), set(map(kind, moments))


@pytest.mark.parametrize(
    ("remat", "fsdp"),
    [("offload", 1), ("offload_inputs", 1), pytest.param("offload", 4, marks=pytest.mark.long)],
)
def test_activations_on_the_host_have_the_same_gradients(remat, fsdp):
    """As those that are kept where they are, of which "full" and "projections" compute some again."""
    options = {} if fsdp == 1 else {"fsdp": fsdp}
    found = after_two_steps(actor_of(remat=remat, **options))
    assert_close(found.params, on_device(**options).params, scale=1)


def test_devices_without_pinned_host_memory_are_refused(monkeypatch):
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "addressable_memories", lambda self: [self.default_memory()])
    message = "train.remat 'offload' keeps .* only; use 'projections' or 'full'"
    with pytest.raises(UserError, match=message):
        actor_of.__wrapped__(remat="offload")
    actor_of.__wrapped__()
