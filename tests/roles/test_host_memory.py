"""Moments and activations in pinned host memory change where they lie, and no number."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
from closeness import assert_close
from packed import TWO_UPDATES, packed, sequences
from slow_values import mostly_slow

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optim_config import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.tracking.checkpoints import Checkpoints

MODEL = ModelConfig(
    vocab_size=128, num_layers=2, d_model=64, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8
)
ADAPTERS = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, alpha=4.0))
SHAPE = dataclasses.replace(TWO_UPDATES, microbatches=1, rows=4)


@functools.cache
def actor_of(
    model: ModelConfig = MODEL,
    *,
    remat: str = "none",
    fsdp: int = 1,
    moments_on_host: bool = False,
    **optim,
) -> Actor:
    """One actor for each setting, whose programs all tests share."""
    sizes = ParallelLayout.from_config(LayoutConfig(train=f"1-1-{fsdp}", fsdp=fsdp))
    return Actor(
        model,
        build_mesh(sizes, jax.devices()[: sizes.num_devices]),
        train=TrainConfig(rows=SHAPE.rows, row_tokens=SHAPE.tokens, remat=remat),
        optim=OptimConfig(lr=1e-2, lr_warmup_steps=0, moments_on_host=moments_on_host, **optim),
        temperature=1.0,
        seed=0,
        offload=moments_on_host,
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
def on_device(model: ModelConfig = MODEL, **options):
    """What training with all of it on the device comes to."""
    actor = actor_of(model, **options)
    state = after_two_steps(actor)
    assert memories(actor.state) == ({"device"}, {"device"})
    return state


def memories(state) -> tuple[set[str], set[str]]:
    """(kinds of memory of weights, of moments)."""
    kind = lambda leaf: leaf.sharding.memory_kind  # noqa: E731
    moments = (leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    return set(map(kind, jax.tree.leaves(state.params))), set(map(kind, moments))


CASES = {
    "adamw": (MODEL, {}),
    "adamw in 8 bits": (MODEL, {"moments": "int8"}),
    "muon on adapters": (ADAPTERS, {"kind": "muon"}),
    "fsdp": (MODEL, {"fsdp": 4}),
}


@pytest.mark.parametrize("case", mostly_slow(CASES.keys(), fast=("adamw in 8 bits",)))
def test_moments_on_the_host_train_to_the_same_weights(case):
    model, options = CASES[case]
    actor = actor_of(model, moments_on_host=True, **options)
    found = after_two_steps(actor)
    # Only the order of sums may differ: 8 bits may then round a moment to its neighbour.
    assert_close(found.params, on_device(model, **options).params, scale=1)
    assert memories(actor.state) == ({"device"}, {"pinned_host"})


def test_a_state_on_the_host_is_offloaded_and_comes_back():
    actor = actor_of(moments_on_host=True)
    before = after_two_steps(actor)
    actor.offload()
    state = actor.for_training()
    assert memories(state) == ({"device"}, {"pinned_host"})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    actor.update(actor.place(batch()), SUPERVISED)


def test_a_run_with_moments_on_the_host_resumes_from_one_without(tmp_path):
    first, second = actor_of(), actor_of(moments_on_host=True)
    state = after_two_steps(first)
    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        checkpoints.save(2, {"actor": first.state}, {})
        checkpoints.wait()
        checkpoints.commit()
    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        second.state = checkpoints.restore(2, {"actor": second.abstract_state()})["actor"]
    assert memories(second.state) == ({"device"}, {"pinned_host"})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(second.state), state)
    for actor in (first, second):
        actor.update(actor.place(batch()), SUPERVISED)
    assert_close(jax.device_get(second.state.params), jax.device_get(first.state.params), scale=1)


@pytest.mark.parametrize("fsdp", mostly_slow([1, 4], fast=(1,)))
def test_activations_on_the_host_have_the_same_gradients(fsdp):
    """As those that are kept where they are, of which "full" and "projections" compute some again."""
    options = {} if fsdp == 1 else {"fsdp": fsdp}
    found = after_two_steps(actor_of(remat="offload", **options))
    assert_close(found.params, on_device(**options).params, scale=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments_on_host": True}, "optim.moments_on_host True keeps .* only; use False"),
        ({"remat": "offload"}, "train.remat 'offload' keeps .* only; use 'projections' or 'full'"),
    ],
)
def test_devices_without_pinned_host_memory_are_refused(monkeypatch, options, message):
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "addressable_memories", lambda self: [self.default_memory()])
    with pytest.raises(UserError, match=message):
        actor_of.__wrapped__(**options)
    actor_of.__wrapped__()
