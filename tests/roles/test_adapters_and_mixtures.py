"""An actor with adapters, and an actor with a mixture of experts, behave like a plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of
from small import MODEL as DENSE
from small import actor_on
from tokens import prompts_of

from jaxrl.models import lora
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.losses import SUPERVISED, policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import PackedBatch, TrainBatch

ADAPTERS = dataclasses.replace(DENSE, lora=LoraConfig(rank=2, alpha=4.0))
MIXTURE = dataclasses.replace(
    DENSE, qkv_bias=False, qk_norm=True, num_experts=4, experts_per_token=2
)
ENGINE = EngineConfig(
    slots=4,
    prefill_prompts=4,
    max_prompt_tokens=4,
    max_response_tokens=8,
    tokens_per_dispatch=4,
    stop_ids=(1,),
)
R, T = 4, 12


@functools.cache
def actor_of(
    model: ModelConfig, load_balancing_coef: float = 0.0, dtype: str = "float32", layout=()
) -> Actor:
    return actor_on(
        mesh_of(**dict(layout)),
        model=model,
        engine=dataclasses.replace(ENGINE, dtype=dtype),
        train=TrainConfig(
            rows=R, row_tokens=T, load_balancing_coef=load_balancing_coef, dtype=dtype
        ),
        optim=OptimConfig(lr=3e-2, lr_warmup_steps=0, weight_decay=0.0),
    )


def batch() -> TrainBatch:
    """Rows of 9 to 12 tokens, the rest padding."""
    rng = np.random.default_rng(0)
    length_R1 = np.array([[9], [12], [10], [11]])
    live_RT = np.arange(T)[None] < length_R1
    positions_RT = np.where(live_RT, np.arange(T), 0)
    fields = {
        "tokens": np.where(live_RT, rng.integers(2, 16, (R, T)), 0).astype(np.int32),
        "positions": positions_RT.astype(np.int32),
        "segment_ids": live_RT.astype(np.int32),
        "sequence": np.where(live_RT, np.arange(R)[:, None], -1).astype(np.int32),
        "loss_mask": (live_RT & (positions_RT > 3)).astype(np.float32),
    }
    stacked = {name: value[None, None] for name, value in fields.items()}
    return TrainBatch.of(PackedBatch(**stacked, num_micro_U=np.ones(1, np.int32)))


@pytest.fixture(scope="module")
def adapted():
    """An actor after three updates of its adapters, with the weights it started from."""
    actor = actor_of(ADAPTERS)
    actor.init()
    before = jax.device_get(actor.state.params)
    placed = actor.place(batch())
    losses = [float(actor.update(placed, SUPERVISED)["loss"]) for _ in range(3)]
    return actor, before, losses


def test_only_adapters_learn(adapted):
    actor, before, losses = adapted
    assert losses[2] < losses[0]
    (adapters, rest), (old_adapters, old_rest) = map(lora.split, (actor.state.params, before))
    jax.tree.map(np.testing.assert_array_equal, rest, old_rest)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), adapters, old_adapters)
    assert all(jax.tree.leaves(changed))


def test_the_optimiser_holds_moments_of_adapters_alone(adapted):
    actor, _, _ = adapted
    adapters, _ = lora.split(actor.state.params)
    moments = sum(leaf.size for leaf in jax.tree.leaves(actor.state.opt_state) if leaf.ndim)
    assert moments == 2 * sum(leaf.size for leaf in jax.tree.leaves(adapters))


def test_the_reference_is_the_actor_with_its_adapters_off(adapted):
    actor, before, _ = adapted
    placed = actor.place(batch())
    plain = actor_of(DENSE)
    # A copy: the weights are given away.
    plain.start_from(jax.tree.map(jnp.array, lora.split(before)[1]))
    assert_close(actor.reference_logprobs(placed), plain.logprobs(placed), scale=1)
    assert np.abs(actor.reference_logprobs(placed) - actor.logprobs(placed)).max() > 0.01


def test_the_kl_over_the_vocabulary_is_to_the_weights_below_the_adapters(adapted):
    actor, before, _ = adapted
    trained = jax.device_get(actor.state)
    objective = policy("policy_gradient", {}, kl_coef=1.0, kl_estimate="full")
    kl = {}
    for name, params in (("fresh", before), ("trained", trained.params)):
        actor.state = jax.device_put(trained.replace(params=params), actor.state_shardings())
        kl[name] = float(actor.update(actor.place(batch()), objective)["kl_loss"])
    actor.state = jax.device_put(trained, actor.state_shardings())
    assert kl["fresh"] == 0
    assert kl["trained"] > 0.01


def test_training_from_a_checkpoint_adds_fresh_adapters(adapted):
    _, before, _ = adapted
    actor = actor_of(ADAPTERS)
    trained = actor.state
    rest = lora.split(before)[1]
    actor.start_from(jax.tree.map(jnp.array, rest))
    adapters, base = lora.split(actor.state.params)
    jax.tree.map(np.testing.assert_array_equal, base, rest)
    assert all((leaf["lora_b"] == 0).all() for leaf in adapters["layers"]["mlp"].values())
    actor.state = trained


@pytest.mark.long
def test_frozen_weights_are_kept_once_and_no_wider_than_they_are_computed_with(adapted):
    _, before, _ = adapted
    narrow = actor_of(ADAPTERS, dtype="bfloat16")
    narrow.start_from(jax.tree.map(jnp.array, before))
    adapters, rest = lora.split(narrow.state.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rest)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapters)} == {"float32"}
    placed = narrow.place(batch())
    ours = narrow.logprobs(placed)
    # What the same weights give in float32: they are rounded where they are used, or where they are kept.
    wide = narrow.state.replace(params=jax.tree.map(jnp.array, before))
    np.testing.assert_array_equal(ours, narrow.logprobs_program(wide.params, placed))
    narrow.for_sampling()
    _, sampled = lora.split(narrow.backend.params)
    shared = jax.tree.map(
        lambda a, b: a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer(), rest, sampled
    )
    assert all(jax.tree.leaves(shared))
    losses = [float(narrow.update(placed, SUPERVISED)["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]
    adapters, rest = lora.split(narrow.state.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rest)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapters)} == {"float32"}


@pytest.mark.parametrize("model", [ADAPTERS, MIXTURE], ids=["adapters", "mixture"])
def test_samples_have_the_trainers_logprobs(adapted, model):
    actor = actor_of(model)
    if model is MIXTURE:
        actor.init()
    prompts = prompts_of(*([2, 3 + i, 4] for i in range(3)))
    options = SamplingOptions(num_samples=1, seed=0, step=0, temperature=1.0)
    completions = actor.generate(prompts, options)
    blank = jax.tree.map(np.zeros_like, batch())
    for i, tokens in enumerate(completions.tokens):
        n = 3 + len(tokens)
        blank.tokens[0, 0, i, :n] = np.concatenate([prompts.tokens[i], tokens])
        blank.positions[0, 0, i, :n] = np.arange(n)
        blank.segment_ids[0, 0, i, :n] = 1
        blank.loss_mask[0, 0, i, 3:n] = 1
    ours = actor.logprobs(actor.place(blank.replace(num_micro_U=np.ones(1, np.int32))))
    for i, logprob in enumerate(completions.rollout_logprob):
        assert_close(ours[0, 0, i, 3 : 3 + len(logprob)], logprob, scale=1)


@pytest.fixture(scope="module")
def mixture_alone():
    return trained_and_sampled(())


def trained_and_sampled(layout):
    """Samples of a mixture, log-probabilities of a batch, and loss and size of the gradient of an update."""
    actor = actor_of(MIXTURE, layout=layout)
    actor.init()
    options = SamplingOptions(num_samples=1, seed=0, step=0, temperature=1.0)
    tokens = actor.generate(prompts_of(*([2, 3 + i, 4] for i in range(4))), options).tokens
    placed = actor.place(batch())
    logprobs = np.asarray(actor.logprobs(placed))
    metrics = actor.update(placed, SUPERVISED)
    return tokens, logprobs, [float(metrics[name]) for name in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    "layout",
    [
        # More tensor shards in generation than in training: four devices with an expert each.
        pytest.param({"train": "1-2-4", "generate": "1-4-1-2", "fsdp": 4}, marks=pytest.mark.long),
        # Experts over replicas and tensor shards.
        pytest.param(
            {"train": "1-4-2", "generate": "1-2-2-2", "expert": 2}, marks=pytest.mark.long
        ),
        pytest.param({"train": "2-2-2", "generate": "1-4-2-1", "fsdp": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda layout: f"{layout['train']} {layout['generate']}",
)
def test_a_mixture_on_eight_devices_is_that_on_one(layout, mixture_alone):
    tokens, logprobs, metrics = mixture_alone
    found = trained_and_sampled(tuple(layout.items()))
    jax.tree.map(np.testing.assert_array_equal, found[0], tokens)
    assert_close(found[1], logprobs, scale=1)
    assert found[2] == pytest.approx(metrics, rel=1e-6)


@pytest.mark.slow
def test_the_load_balancing_loss_balances():
    loads = {}
    for coefficient in (0.0, 10.0):
        actor = actor_of(MIXTURE, coefficient)
        actor.init()
        # Sure of itself from the start, and so uneven.
        params = actor.state.params
        params["layers"]["mlp"]["router"] *= 8
        actor.start_from(params)
        placed = actor.place(batch())
        for _ in range(10):
            metrics = actor.update(placed, SUPERVISED)
        loads[coefficient] = float(metrics["moe/load_balancing_loss"])
        assert metrics["moe/max_load"] >= 1
        assert 0 <= metrics["moe/idle_experts"] <= 1
    assert loads[10.0] < loads[0.0] - 0.05
