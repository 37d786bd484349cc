"""A policy and a value function on one trunk: equal to two models with the same weights, in one pass."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from packed import SHAPES, packed, sequences
from small import ENGINE, actor_on
from small import MODEL as TIED

from jaxrl.algos.aggregation import count
from jaxrl.models.decoder import init_params
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.gradient import MicrobatchLoss
from jaxrl.roles.losses import PolicyOutputs, clipped_values, policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.scores import ActorCritic, Critic
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.drivers import build_backend
from jaxrl.types import PackedBatch, TrainBatch, ValueBatch

MODEL = dataclasses.replace(TIED, tie_embeddings=False)
BOTH = dataclasses.replace(MODEL, value_head=True)
ONE = mesh_of()
LAYOUTS = {"fsdp": mesh_of("1-4-2", fsdp=2), "pipeline": mesh_of("2-2-2", fsdp=1)}
COEF, CLIP = 0.3, 0.5
LOSS: dict[str, Any] = {
    "options": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    # Not the mean over tokens, which is that of values.
    "aggregation": "seq-mean-token-mean",
    "entropy_coef": 0.01,
}
POLICY = policy("clipped", **LOSS)
JOINT = policy("clipped", **LOSS, value_coef=COEF, value_clip=CLIP)
VALUES = clipped_values(clip=CLIP)


def options(**changes: Any) -> dict[str, Any]:
    optim = OptimConfig(lr=1e-2, lr_warmup_steps=0, weight_decay=0.0)
    return {"train": TrainConfig(), "optim": optim, "seed": 0} | changes


@functools.cache
def weights() -> dict[str, Any]:
    head = 0.3 * jax.random.normal(jax.random.key(4), (MODEL.d_model, 1))
    params = jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(3))
    return jax.device_get(params | {"score_head": head})


def both_on(mesh: Any = ONE) -> ActorCritic:
    role = ActorCritic(BOTH, mesh, temperature=0.9, **options())
    role.start_from(jax.device_put(weights(), role.train_shardings))
    return role


def two_models() -> tuple[Actor, Critic]:
    actor = Actor(MODEL, ONE, temperature=0.9, **options())
    critic = Critic(MODEL, ONE, **options())
    for role, other in ((actor, "score_head"), (critic, "unembedding")):
        own = {name: x for name, x in weights().items() if name != other}
        role.start_from(jax.device_put(own, role.train_shardings))
    return actor, critic


def batch_of(shape: str) -> tuple[TrainBatch, ValueBatch]:
    rows = sequences()
    rng = np.random.default_rng(1)
    for row in rows:
        row["advantage"] = row["loss_mask"] * rng.normal(size=len(row["tokens"])).astype(np.float32)
        row["weight"] = rng.uniform(0.5, 2, len(row["tokens"])).astype(np.float32)
    packing, batch = packed(rows, SHAPES[shape])
    fields = {
        "old_value": packing.pack([row["value"] for row in rows], np.float32),
        "target": packing.pack([row["loss_mask"] * 0.7 for row in rows], np.float32),
    }
    return batch.replace(**fields), ValueBatch(**batch.packing(), **fields)


def test_the_two_losses_are_summed_each_by_its_own_mean():
    """Sequences of two and one trained tokens. The policy's loss is a mean over sequences: (1 + 2 + 6) / 2.

    Values 1, 2, 0 were 1, 1, 0 and have the returns 2, 2, 1. The second has moved by more than .5: its loss
    is (1.5 - 2)^2 / 2 and has no gradient. The mean is (.5 + .125 + .5) / 3, and .4 of it is .15.
    """
    objective = policy(
        "policy_gradient", {}, aggregation="seq-mean-token-sum", value_coef=0.4, value_clip=0.5
    )
    array = lambda *x: jnp.array([x], jnp.float32)  # noqa: E731
    segments, mask = jnp.array([[1, 1, 1, 2, 2]]), array(0, 1, 1, 0, 1)
    base = PackedBatch(segments, segments, segments, segments, mask, num_micro_U=jnp.array([1]))
    advantage, zeros = array(0, 1, 1, 0, 2), array(0, 0, 0, 0, 0)
    micro = TrainBatch(
        **base.packing(),
        **dict.fromkeys(("rollout_logprob", "old_logprob", "ref_logprob"), zeros),
        advantage=advantage,
        weight=zeros + 1,
        old_value=array(9, 1, 1, 9, 0),
        target=array(9, 2, 2, 9, 1),
    )
    loss = MicrobatchLoss(
        lambda params, _: (PolicyOutputs(params["p"], zeros, zeros, params["v"]), None),
        lambda outputs: {},
        objective,
        0.0,
        jnp.int32(0),
        counts=count(mask, segments),
        num_tokens=jnp.float32(5),
    )
    params = {"p": array(7, -1, -2, 7, -3), "v": array(7, 1, 2, 7, 0)}
    (total, (sums, _)), grads = jax.value_and_grad(loss, has_aux=True)(params, micro)
    assert float(total) == pytest.approx(4.5 + 0.15)
    expected = {"loss": 4.5, "critic/vf_loss": 0.375, "critic/vf_clipfrac": 1 / 3}
    expected |= {"critic/vpred_mean": 1.0, "critic/vf_error": -2 / 3}
    assert {name: float(sums.means[name]) for name in expected} == pytest.approx(expected)
    assert_close(grads["p"], array(0, -0.5, -0.5, 0, -1))
    assert_close(grads["v"], array(0, -0.4 / 3, 0, 0, -0.4 / 3))


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_and_values_are_those_of_two_models(shape):
    batch, _ = batch_of(shape)
    actor, critic = two_models()
    logprob, value = both_on().logprobs_and_values(batch)
    np.testing.assert_allclose(logprob, actor.logprobs(batch), rtol=0, atol=1e-6)
    np.testing.assert_allclose(value, critic.values(batch), rtol=0, atol=1e-6)
    assert np.asarray(logprob).min() < -1 and np.abs(value).max() > 0.3


def gradient(role: Any, batch: Any, objective: Any) -> Any:
    """The gradient of the first minibatch."""

    @jax.jit
    def of(params):
        trained, frozen = role._split(params)
        return role._gradient(trained, frozen, None, batch, jnp.int32(0), objective).grads

    return jax.device_get(of(role.state.params))


def test_the_gradient_of_the_trunk_is_the_sum_of_two_models():
    batch, values = jax.device_put(batch_of("two updates"))
    actor, critic = two_models()
    found = gradient(both_on(), batch, JOINT)
    of_policy, of_values = gradient(actor, batch, POLICY), gradient(critic, values, VALUES)
    of_values = jax.tree.map(lambda g: COEF * g, of_values)
    heads = {name: of[name] for of, name in ((of_policy, "unembedding"), (of_values, "score_head"))}
    trunk = [
        {name: g for name, g in of.items() if name not in heads} for of in (of_policy, of_values)
    ]
    expected = jax.tree.map(np.add, *trunk) | heads
    assert_close(found, expected, rtol=1e-6, scale=1)
    # Each of the two has a part in it.
    for one in trunk:
        assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(one["layers"]["mlp"])) > 1e-4


@functools.cache
def updated(layout: str, shape: str) -> Any:
    role = both_on(LAYOUTS.get(layout, ONE))
    metrics = role.update(role.place(batch_of(shape)[0]), JOINT, epochs=2)
    return jax.device_get((role.state.params, metrics))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_devices_learn_what_one_does(layout):
    params, metrics = updated("one", "one each")
    assert metrics["critic/vf_loss"] > 0 and metrics["grad_norm"] > 0
    assert_close(updated(layout, "packed"), (params, metrics), rtol=1e-4, scale=1)
    before = weights()
    for head in ("score_head", "unembedding"):
        assert np.abs(params[head] - before[head]).max() > 1e-3


def test_weights_of_a_language_model_get_a_value_head_of_zeros():
    role = ActorCritic(BOTH, ONE, temperature=0.9, **options())
    role.start_from(jax.device_put({n: x for n, x in weights().items() if n != "score_head"}))
    batch, _ = batch_of("packed")
    assert not np.asarray(role.logprobs_and_values(batch)[1]).any()
    unclipped = policy("clipped", **LOSS, value_coef=COEF)
    losses = [float(role.update(batch, unclipped)["critic/vf_loss"]) for _ in range(40)]
    assert losses[0] == pytest.approx(0.5 * 0.7**2, rel=1e-4) and losses[-1] < 0.2 * losses[0]


def test_adapters_and_the_value_head_are_trained_and_nothing_else():
    model = dataclasses.replace(BOTH, lora=LoraConfig(rank=2))
    role = ActorCritic(model, ONE, temperature=0.9, **options(train=TrainConfig(dtype="bfloat16")))
    role.init()
    batch, _ = batch_of("one each")
    of_the_base = np.asarray(role.reference_logprobs(batch))
    before = jax.device_get(role._split(role.state.params))
    for _ in range(2):
        role.update(batch, JOINT)
    trained, frozen = jax.device_get(role._split(role.state.params))
    assert trained["score_head"].dtype == np.float32 and "score_head" not in frozen
    assert np.abs(trained["score_head"]).min() > 1e-3
    assert not np.array_equal(*(t["layers"]["mlp"]["up"]["lora_b"] for t in (trained, before[0])))
    jax.tree.map(np.testing.assert_array_equal, frozen, before[1])
    np.testing.assert_array_equal(role.reference_logprobs(batch), of_the_base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", ["1-1-1", "1-2-2"])
def test_the_head_comes_back_from_the_sampler_to_the_bit(train, dtype):
    mesh = mesh_of(train)
    engine = dataclasses.replace(ENGINE, dtype=dtype)
    backend = build_backend("offline", BOTH, mesh, engine, functools.partial(map, str))
    role = ActorCritic(BOTH, mesh, temperature=1.0, backend=backend, **options())
    role.start_from(jax.device_put(weights(), role.train_shardings))
    role.for_sampling()
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(role.for_training().params), weights()
    )


WIDE = ModelConfig(
    vocab_size=512, num_layers=4, d_model=256, d_ff=1024, num_heads=4, num_kv_heads=2, head_dim=64
)


def operations(role: Any, forward: Any, batch: Any, objective: Any) -> float:
    """Operations of the compiled pass before the update, and of the update. On CPU no loop hides layers."""
    state = role.abstract_state()
    programs = (
        forward.lower(state.params, batch),
        role.update_program((objective,)).lower(state, (batch,), None, role.schedule),
    )
    return sum(program.compile().cost_analysis()["flops"] for program in programs)


@pytest.mark.long
def test_one_trunk_takes_less_than_two_thirds_of_the_operations_of_two_models():
    batch, values = batch_of("one each")
    actor = actor_on(ONE, model=WIDE)
    critic = Critic(WIDE, ONE, **options())
    role = ActorCritic(
        dataclasses.replace(WIDE, value_head=True), ONE, temperature=1.0, **options()
    )
    alone = batch.replace(old_value=None, target=None)
    apart = operations(actor, actor.logprobs_program, alone, POLICY)
    apart += operations(critic, critic.by_token_program, values, VALUES)
    share = operations(role, role.logprobs_program, batch, JOINT) / apart
    assert 0.5 < share <= 0.65
