"""Critics, references and reward models: what they compute, and that the mesh does not change it."""

import functools

import jax
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from packed import SHAPES, packed, sequences
from small import MODEL

from jaxrl.models.decoder import init_params, score_config
from jaxrl.roles.losses import clipped_values
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Reference
from jaxrl.roles.scores import Critic, RewardModel
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import ValueBatch

ONE, EIGHT = mesh_of(), mesh_of("1-4-2", fsdp=2)
ROWS = sequences()
OBJECTIVE = clipped_values(clip=0.5)


@functools.cache
def critic_of(mesh) -> Critic:
    optim = OptimConfig(lr=1e-2, lr_warmup_steps=0, weight_decay=0.0)
    return Critic(MODEL, mesh, train=TrainConfig(), optim=optim, seed=0)


@functools.cache
def score_weights():
    return jax.device_get(init_params(score_config(MODEL), jax.random.key(3)))


def started(mesh) -> Critic:
    critic = critic_of(mesh)
    critic.start_from(jax.device_put(score_weights(), critic.train_shardings))
    return critic


def test_a_value_is_that_of_the_state_before_its_token():
    critic = started(ONE)
    packing, batch = packed(ROWS, SHAPES["packed"])
    values = packing.unpack(np.asarray(critic.values(batch)))
    changed = [{**row, "tokens": row["tokens"].copy()} for row in ROWS]
    for row in changed:
        row["tokens"][2] = (row["tokens"][2] + 1) % 16
    after = packing.unpack(np.asarray(critic.values(packed(changed, SHAPES["packed"])[1])))
    for old, new in zip(values, after, strict=True):
        assert old[0] == 0
        assert_close(new[:3], old[:3])
        if len(old) > 3:
            assert abs(new[3] - old[3]) > 1e-5


def value_batch(shape: str) -> ValueBatch:
    packing, batch = packed(ROWS, SHAPES[shape])
    fields = {
        "old_value": packing.pack([row["value"] for row in ROWS], np.float32),
        "target": packing.pack([row["loss_mask"] * 0.7 for row in ROWS], np.float32),
    }
    return ValueBatch(**batch.packing(), **fields)


def test_neither_packing_nor_the_mesh_change_an_update():
    def stepped(mesh, shape):
        critic = started(mesh)
        metrics = critic.update(value_batch(shape), OBJECTIVE)
        return jax.device_get((critic.state.params, metrics))

    params, metrics = stepped(ONE, "one each")
    assert metrics["grad_norm"] > 0 and metrics["loss"] > 0
    assert_close(stepped(EIGHT, "packed"), (params, metrics), rtol=1e-4, scale=1)


def test_a_critic_starts_from_a_language_model_at_0_and_learns():
    critic = critic_of(ONE)
    critic.start_from(init_params(MODEL, jax.random.key(1)))
    batch = value_batch("one each")
    assert not np.asarray(critic.values(batch)).any()
    before = None
    for _ in range(60):
        batch = batch.replace(old_value=critic.values(batch))
        loss = float(critic.update(batch, OBJECTIVE)["loss"])
        before = loss if before is None else before
    assert before == pytest.approx(0.5 * 0.7**2, rel=1e-4)
    assert loss < 0.02 * before


@pytest.mark.parametrize("offload", [False, True])
def test_a_reward_model_scores_each_sequence_on_its_last_token(offload):
    model = RewardModel(score_config(MODEL), ONE, train=TrainConfig(), offload=offload)
    model.load(jax.device_put(score_weights(), model.train_shardings))
    packing, batch = packed(ROWS, SHAPES["packed"])
    alone_packing, alone = packed(ROWS, SHAPES["one each"])
    scores = packing.unpack(np.asarray(model.scores_of(batch)))
    expected = alone_packing.unpack(np.asarray(model.scores_of(alone)))
    for ours, theirs in zip(scores, expected, strict=True):
        assert not ours[:-1].any() and ours[-1] != 0
        assert_close(ours, theirs)


def test_a_reference_on_other_devices_is_the_same():
    params = jax.device_get(init_params(MODEL, jax.random.key(2)))
    _, batch = packed(ROWS, SHAPES["one each"])
    found = []
    for mesh in (ONE, EIGHT):
        reference = Reference(MODEL, mesh, train=TrainConfig(), temperature=0.9)
        reference.load(jax.device_put(params, reference.train_shardings))
        found.append(np.asarray(reference.logprobs(batch)))
    assert found[0].min() < -1
    assert_close(found[1], found[0], scale=1)
