"""An actor with adapters, and an actor with a mixture of experts, behave like a plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from closeness import assert_close
from meshes import mesh_of
from small import MODEL as DENSE
from small import actor_on
from tokens import prompts_of

from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.losses import SUPERVISED, policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import micro_of
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import PackedBatch, TrainBatch

ADAPTERS = dataclasses.replace(DENSE, lora=LoraConfig(rank=2, alpha=4.0))
MIXTURE = dataclasses.replace(
    DENSE, qkv_bias=False, qk_norm=True, num_experts=4, experts_per_token=2
)
# The parts of GLM-4.5.
SIGMOID = dataclasses.replace(
    MIXTURE,
    num_layers=3,
    sigmoid_routing=True,
    routed_scale=1.5,
    shared_d_ff=8,
    first_dense_layers=1,
    dense_d_ff=24,
)
ENGINE = dataclasses.replace(small.ENGINE, max_response_tokens=8)
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


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_the_correction_bias_of_a_router_is_not_trained(optimizer):
    """Neither by a gradient nor by weight decay; and it has no moments."""
    actor = Actor(
        SIGMOID,
        mesh_of(),
        train=TrainConfig(rows=R, row_tokens=T),
        optim=OptimConfig(kind=optimizer, lr=3e-2, lr_warmup_steps=0, weight_decay=0.5),
        temperature=1.0,
        seed=0,
    )
    actor.init()
    params = actor.state.params
    params["layers"]["mlp"]["correction_bias"] += 0.3
    actor.start_from(params)
    before = jax.device_get(actor.state.params)
    actor.update(actor.place(batch()), SUPERVISED)
    after = jax.device_get(actor.state.params)
    changed = jax.tree.map(lambda a, b: bool((a != b).all()), after, before)
    assert not changed["layers"]["mlp"].pop("correction_bias")
    np.testing.assert_array_equal(after["layers"]["mlp"]["correction_bias"], np.float32(0.3))
    assert all(jax.tree.leaves(changed["layers"])) and all(jax.tree.leaves(changed["first"]))
    paths = jax.tree_util.tree_leaves_with_path(actor.state.opt_state)
    assert not any("correction_bias" in jax.tree_util.keystr(path) for path, _ in paths)


def test_below_adapters_the_correction_bias_stays_wide():
    model = dataclasses.replace(SIGMOID, lora=LoraConfig(rank=2))
    shapes = actor_of(model, dtype="bfloat16").shapes["layers"]["mlp"]
    assert shapes["correction_bias"].dtype == jnp.float32
    assert shapes["router"].dtype == shapes["shared"]["up"]["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "model", [ADAPTERS, MIXTURE, SIGMOID], ids=["adapters", "mixture", "sigmoid"]
)
def test_samples_have_the_trainers_logprobs(adapted, model):
    actor = actor_of(model)
    if model is not ADAPTERS:
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


@pytest.fixture(scope="module", params=[MIXTURE, SIGMOID], ids=["softmax", "sigmoid"])
def mixture_alone(request):
    return request.param, trained_and_sampled(request.param, ())


def trained_and_sampled(model, layout):
    """Samples of a mixture, log-probabilities of a batch, and loss and size of the gradient of an update."""
    actor = actor_of(model, layout=layout)
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
    model, (tokens, logprobs, metrics) = mixture_alone
    found = trained_and_sampled(model, tuple(layout.items()))
    jax.tree.map(np.testing.assert_array_equal, found[0], tokens)
    assert_close(found[1], logprobs, scale=1)
    assert found[2] == pytest.approx(metrics, rel=1e-6)


def replaying_actor(model, layout=(), sampler="float32") -> Actor:
    actor = actor_on(
        mesh_of(**dict(layout)),
        model=model,
        engine=dataclasses.replace(ENGINE, dtype=sampler, keeps_routes=True),
        train=TrainConfig(rows=R, row_tokens=T, replay_routes=True),
        optim=OptimConfig(lr=3e-2, lr_warmup_steps=0, weight_decay=0.0),
    )
    actor.init()
    return actor


THREE_OF_A_KIND = dataclasses.replace(
    MIXTURE, num_layers=4, layer_pattern=("sliding", "full"), sliding_window=3, full_head_dim=6
)


@functools.cache
def replayed(model, layout=()):
    """What a policy makes of random routes: experts of each layer, log-probabilities, metrics."""
    actor, rng = replaying_actor(model, layout), np.random.default_rng(3)
    L, A = model.num_layers - model.first_dense_layers, model.experts_per_token
    shape = (L, R, T)
    routes_LRTA = np.stack([rng.permutation(model.num_experts)[:A] for _ in np.ndindex(shape)])
    routes_LRTA = routes_LRTA.reshape(*shape, A)
    given = batch()
    live_RT = given.segment_ids[0, 0] > 0
    packed = np.moveaxis(routes_LRTA, -1, 1).reshape(1, 1, L * A, R, T).astype(np.int16)
    placed = actor.place(given.replace(routes=packed))
    count = lambda experts: np.bincount(experts.reshape(-1), minlength=model.num_experts)  # noqa: E731
    expected_LE = np.stack([count(of_layer[live_RT]) for of_layer in routes_LRTA])

    @jax.jit
    def routing_of(params, batch):
        return actor.policy(actor.graph, params, micro_of(batch, 0, 0), temperature=1.0)[2]

    routing = routing_of(actor.state.params, placed)
    np.testing.assert_array_equal(routing.chosen_E, expected_LE)
    logprobs = np.asarray(actor.logprobs(placed))
    assert np.abs(logprobs - np.asarray(actor.logprobs(actor.place(given)))).max() > 1e-3
    metrics = actor.update(placed, SUPERVISED)
    return logprobs, [float(metrics[name]) for name in ("loss", "grad_norm", "moe/same_routes")]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MIXTURE, id="one stack"),
        pytest.param(SIGMOID, id="first dense", marks=pytest.mark.long),
        pytest.param(THREE_OF_A_KIND, id="periods", marks=pytest.mark.long),
    ],
)
def test_each_layer_replays_its_own_routes(model):
    _, metrics = replayed(model)
    assert 0 < metrics[2] < 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MIXTURE, {"train": "2-2-2", "generate": "1-2-2-2"}),
        (SIGMOID, {"train": "2-2-2", "generate": "1-2-2-2"}),
        (MIXTURE, {"train": "1-2-2", "generate": "1-2-1-2", "context": 2}),
        (MIXTURE, {"train": "1-4-2", "generate": "1-2-2-2", "expert": 2}),
    ],
)
def test_routes_are_replayed_on_eight_devices_as_on_one(model, layout):
    expected, found = replayed(model), replayed(model, tuple(layout.items()))
    assert_close(found[0], expected[0], scale=1)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


def test_a_trainer_takes_the_experts_of_its_sampler():
    """A sampler in bfloat16 often chooses others than a trainer in float32."""
    actor = replaying_actor(MIXTURE, sampler="bfloat16")
    prompts = prompts_of(*([2, 3 + i, 4] for i in range(4)))
    # About one token in a hundred.
    options = SamplingOptions(num_samples=24, seed=0, step=0, temperature=1.0)
    completions = actor.generate(prompts, options)
    for share_prompts in (False, True):
        shape = PackedShape(minibatches=1, microbatches=48, rows=R, tokens=T)
        packed, _ = pack_completions(completions, shape, share_prompts=share_prompts)
        tokens, routes = packed.tokens[0], np.moveaxis(packed.routes[0], 1, -1)
        live = packed.segment_ids[0] > 0
        in_use = np.arange(48) < packed.num_micro_U[0]
        assert (routes[in_use][~live[in_use]] == -1).all()
        for m, r in np.argwhere(live.any(-1)):
            for number in np.unique(packed.sequence[0, m, r][live[m, r]]):
                own = np.flatnonzero((packed.sequence[0, m, r] == number) & live[m, r])
                if number < 0:
                    continue
                sequence = np.concatenate(
                    [prompts.tokens[number // 24], completions.tokens[number]]
                )
                kept = completions.routes[number].reshape(len(sequence) - 1, -1)
                np.testing.assert_array_equal(tokens[m, r, own], sequence[-len(own) :])
                # The last token was not run.
                assert (routes[m, r, own[-1]] == -1).all()
                np.testing.assert_array_equal(
                    routes[m, r, own[:-1]], kept[len(kept) + 1 - len(own) :]
                )
        # A critic's batch needs none.
        assert "routes" not in packed.packing()
        placed = actor.place(packed)
        with_routes, without = (
            np.asarray(actor.logprobs(x)) for x in (placed, placed.replace(routes=None))
        )
        theirs = packed.rollout_logprob
        trained = packed.loss_mask > 0
        gap = [np.abs(x - theirs)[trained].mean() for x in (with_routes, without)]
        assert gap[0] < gap[1]
    metrics = actor.update(placed, SUPERVISED)
    assert 0.9 < metrics["moe/same_routes"] < 1


@pytest.mark.long
def test_the_weights_below_adapters_choose_their_experts_themselves():
    """As a reference of its own does."""
    actor = replaying_actor(dataclasses.replace(MIXTURE, lora=LoraConfig(rank=2)))
    without, rng = batch(), np.random.default_rng(0)
    routes = rng.permuted(np.tile(np.arange(4, dtype=np.int16), (1, 1, R, T, 2, 1)), axis=-1)
    routes = np.moveaxis(routes[..., :2].reshape(1, 1, R, T, 4), -1, 2)
    placed, alone = actor.place(without.replace(routes=routes)), actor.place(without)
    own = actor.reference_logprobs(alone)
    np.testing.assert_array_equal(actor.reference_logprobs(placed), own)
    assert np.abs(np.asarray(actor.logprobs(placed)) - own).max() > 1e-3
    full_kl = policy("policy_gradient", {}, kl_coef=1.0, kl_estimate="full")
    assert actor.update(placed, full_kl)["kl_loss"] > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("sigmoid", [False, True])
def test_without_the_samplers_experts_some_tokens_are_far_off(sigmoid):
    """In bfloat16 on both sides, 256 wide: in one layer of a hundred a token goes to other experts."""
    model = ModelConfig(
        **dict(vocab_size=512, num_layers=4, d_model=256, d_ff=128),
        **dict(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
        **dict(num_experts=16, experts_per_token=4, sigmoid_routing=sigmoid),
    )
    engine = EngineConfig(
        **dict(slots=16, prefill_prompts=4, max_prompt_tokens=16, max_response_tokens=64),
        **dict(tokens_per_dispatch=16, stop_ids=(), dtype="bfloat16", keeps_routes=True),
    )
    train = TrainConfig(rows=R, row_tokens=80, dtype="bfloat16", replay_routes=True)
    actor = actor_on(mesh_of(), model=model, engine=engine, train=train)
    actor.init()
    rng = np.random.default_rng(0)
    prompts = prompts_of(*(rng.integers(2, 500, 12).tolist() for _ in range(4)))
    options = SamplingOptions(num_samples=4, seed=0, step=0, temperature=1.0)
    packed, _ = pack_completions(actor.generate(prompts, options), PackedShape(1, 8, R, 80))
    placed, trained = actor.place(packed), packed.loss_mask > 0
    replayed, chosen = (
        np.abs(np.asarray(actor.logprobs(x)) - packed.rollout_logprob)[trained].max()
        for x in (placed, placed.replace(routes=None))
    )
    assert replayed < 0.1 and chosen > 3 * replayed
    assert 0.95 < actor.update(placed, SUPERVISED)["moe/same_routes"] < 1


def test_a_dense_model_has_no_routes_to_replay():
    with pytest.raises(UserError, match="this model is dense"):
        replaying_actor(DENSE)


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
