"""AdamW and Muon, moments in fewer bits, and the schedule: by twins in NumPy, by convergence, by bytes.

T updates   D inputs   F outputs   N examples
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from meshes import mesh_of
from small import actor_on, assert_as_planned, whole_rows

from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.eight_bit_moments import BlockQuantized, block_of, dequantized, quantized
from jaxrl.roles.learner import TrainState
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig, Schedule, build_optimizer, matrix_dimensions
from jaxrl.roles.policy import Actor
from jaxrl.tracking.checkpoints import Checkpoints

D, F = 64, 128
# A layer of a model, as far as Muon looks: one matrix, and what it leaves to AdamW.
AXES = {"layers": {"up": {"weight": ("layers", "embed", "mlp")}}, "embedding": ("vocab", "embed")}


def updates_of(config: OptimConfig, gradients, weights, axes=None):
    """Directions of successive updates, and the last state; the weights stay."""
    optimizer = build_optimizer(config, axes)
    state, update = jax.jit(optimizer.init)(weights), jax.jit(optimizer.update)
    directions = []
    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            direction, state = update(gradient, state, weights)
            directions.append(direction)
    return directions, state


def adamw(gradients: np.ndarray, weight: np.ndarray, config: OptimConfig) -> np.ndarray:
    """The slow twin, in float64: the direction after all `gradients` [T, ...]."""
    mu = nu = np.zeros(weight.shape)
    direction = weight
    beta1, beta2 = config.betas
    for t, g in enumerate(gradients.astype(np.float64), start=1):
        mu = beta1 * mu + (1 - beta1) * g
        nu = beta2 * nu + (1 - beta2) * g * g
        mu_hat, nu_hat = mu / (1 - beta1**t), nu / (1 - beta2**t)
        direction = mu_hat / (np.sqrt(nu_hat) + config.epsilon) + config.weight_decay * weight
    return direction


ADAMW = OptimConfig(betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.1, grad_clip=np.inf)


@pytest.mark.parametrize(
    ("moments", "rtol"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.1)]
)
def test_it_is_adamw(moments, rtol):
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(6, D, F)).astype(np.float32)
    weight = rng.normal(size=(D, F)).astype(np.float32)
    config = dataclasses.replace(ADAMW, moments=moments)
    found, _ = updates_of(config, list(gradients), weight)
    expected = adamw(gradients, weight, ADAMW)
    # Rounding is relative to the top of a block: some values are off by more than most.
    error = np.sqrt(np.mean((found[-1] - expected) ** 2) / np.mean(expected**2))
    assert error < rtol


# 8 bits

rounded = jax.jit(quantized, static_argnames=("block", "signed"))
read = jax.jit(dequantized)


@given(st.integers(0, 2**31 - 1), st.booleans(), st.sampled_from([32, 64, 128]))
def test_a_value_is_rounded_to_one_of_the_two_codes_around_it(seed, signed, block):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 256)) ** 3 * 10.0 ** rng.integers(-12, 3, (3, 1))
    x = (x if signed else np.abs(x)).astype(np.float32)
    moment = jax.device_get(rounded(x, jax.random.key(seed), block=block, signed=signed))
    assert moment.codes.dtype == (jnp.int8 if signed else jnp.uint8)
    assert moment.codes.shape == x.shape and moment.scale.shape == (3, 256 // block)
    scale = np.abs(x.reshape(3, -1, block)).max(-1)
    np.testing.assert_array_equal(moment.scale, scale)
    # The twin in float64: neighbours on the grid of codes.
    levels, power = (127, 2) if signed else (255, 4)
    grid = (np.arange(levels + 1) / levels) ** power
    share = np.abs(x.astype(np.float64)) / np.repeat(scale, block, -1)
    found = np.abs(np.asarray(moment.codes, np.int64))
    width = np.append(np.diff(grid), 0)
    assert np.all(np.abs(grid[found] - share) <= np.maximum(width[found - 1], width[found]) + 1e-6)
    assert np.all(np.sign(moment.codes.astype(np.float32)) * np.sign(x) >= 0)
    np.testing.assert_allclose(
        read(moment), np.sign(x) * grid[found] * np.repeat(scale, block, -1), rtol=1e-5
    )


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_keeps_the_mean(signed):
    x = np.abs(np.random.default_rng(1).normal(size=(8, 128))).astype(np.float32) + 1e-3
    draw = jax.vmap(lambda key: dequantized(quantized(x, key, block=128, signed=signed)))
    draws = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), 4000)))
    # Standard errors: of steps of 3% at most, over 4,000 draws.
    np.testing.assert_allclose(draws.mean(0), x, rtol=5e-3, atol=2e-3)


def test_a_second_moment_that_is_not_0_does_not_become_0():
    x = np.array([1.0, 0.0, *[1e-20] * 126], np.float32)
    codes = rounded(x, jax.random.key(0), block=128, signed=False).codes
    assert codes.tolist() == [255, 0, *[1] * 126]


def test_what_was_rounded_once_stays():
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    once = read(rounded(x, jax.random.key(1), block=32, signed=True))
    again = read(rounded(once, jax.random.key(2), block=32, signed=True))
    np.testing.assert_allclose(again, once, rtol=1e-4)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_a_second_moment_decays(moments):
    """Rounded to the nearest, a thousandth less would be no less, and the rate would stay low for good."""
    weights, small = np.zeros((D, F), np.float32), np.full((D, F), 1e-6, np.float32)
    small[:, ::32] = 0.1
    optimizer = build_optimizer(OptimConfig(moments=moments, grad_clip=np.inf))

    def update(i, state):
        gradient = jnp.where(i == 0, jnp.ones_like(weights), small)
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(gradient, state, weights)[1]

    run = jax.jit(lambda: jax.lax.fori_loop(0, 401, update, optimizer.init(weights)))
    nu = run()[1].inner.nu
    nu = read(nu) if moments == "int8" else np.asarray(nu, np.float32)
    expected = 0.001 * 0.999**400
    assert float(nu[:, 1].mean()) == pytest.approx(expected, rel=0.05)


def test_shards_are_rounded_as_the_whole_is():
    """The draws go by the place in the whole array."""
    mesh = jax.make_mesh((2, 2), ("embed", "mlp"), devices=jax.devices()[:4])
    split = jax.NamedSharding(mesh, jax.P("embed", "mlp"))
    x = np.random.default_rng(1).normal(size=(D, F)).astype(np.float32)
    whole, parts = (
        rounded(x, jax.random.key(0), block=32, signed=True) for x in (x, jax.device_put(x, split))
    )
    assert parts.codes.sharding.is_equivalent_to(split, 2)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((64, 5120, 27648), 64),  # 27,648 / 16 = 64 x 27
        ((64, 5120, 40, 128), 128),  # a head is not split
        ((152064, 5120), 64),
        ((151936, 896), 128),  # 896 / 16 holds no block; 896 does
        ((24, 896, 16), 0),  # an adapter's rank
        ((24, 128), 0),  # few
        ((64, 96), 32),
        ((), 0),
    ],
)
def test_blocks_by_hand(shape, block):
    assert block_of(shape) == block


# Convergence


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_fewer_bits_converge_alike(kind):
    """A network learns from noisy examples, with features of very different sizes."""
    rng, examples = np.random.default_rng(0), jax.random.key(0)
    size_D = np.logspace(-2, 0, D, dtype=np.float32)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32) / np.float32(shape[-2] ** 0.5)

    truth = normal(D, F), normal(F, D)
    start = {"layers": {"up": {"weight": normal(1, D, F)}}, "embedding": normal(F, D)}

    def loss(weights, key):
        x_ND = jax.random.normal(key, (32, D)) * size_D[None]
        noise_ND = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (32, D))
        hidden = jnp.tanh(x_ND @ weights["layers"]["up"]["weight"][0])
        out_ND = hidden @ weights["embedding"]
        return jnp.mean((out_ND - jnp.tanh(x_ND @ truth[0]) @ truth[1] - noise_ND) ** 2)

    def train(moments: str) -> float:
        config = OptimConfig(kind=kind, moments=moments, weight_decay=0.0)
        optimizer = build_optimizer(config, AXES)

        def step(carry, t):
            weights, state = carry
            value, gradient = jax.value_and_grad(loss)(weights, jax.random.fold_in(examples, t))
            with jax.numpy_dtype_promotion("standard"):
                direction, state = optimizer.update(gradient, state, weights)
            return (jax.tree.map(lambda w, d: w - 3e-3 * d, weights, direction), state), value

        run = jax.jit(lambda w: jax.lax.scan(step, (w, optimizer.init(w)), jnp.arange(400)))
        losses = np.asarray(run(start)[1])
        assert losses[-50:].mean() < 0.25 * losses[:10].mean()
        return float(losses[-100:].mean())

    exact = train("float32")
    assert train("int8") == pytest.approx(exact, rel=0.03)


# Muon


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adamw():
    rng = np.random.default_rng(0)
    gradient = {
        "layers": {"up": {"weight": rng.normal(size=(2, 8, 32)).astype(np.float32)}},
        "embedding": rng.normal(size=(16, 8)).astype(np.float32),
    }
    weights = jax.tree.map(np.zeros_like, gradient)
    config = OptimConfig(kind="muon", weight_decay=0.0, grad_clip=np.inf)
    (found,), _ = updates_of(config, [gradient], weights, AXES)
    (plain,), _ = updates_of(dataclasses.replace(config, kind="adamw"), [gradient], weights)
    assert_close(found["embedding"], plain["embedding"])
    for layer, matrix in enumerate(gradient["layers"]["up"]["weight"]):
        out = np.asarray(found["layers"]["up"]["weight"][layer])
        u, _, vh = np.linalg.svd(np.asarray(matrix), full_matrices=False)
        # Newton-Schulz brings singular values to about 1, 0.7 to 1.2, times 0.2 sqrt(32).
        values = np.linalg.svd(out, compute_uv=False) / (0.2 * 32**0.5)
        assert np.all((values > 0.6) & (values < 1.3))
        assert np.sum(out * (u @ vh)) / np.linalg.norm(out) / np.linalg.norm(u @ vh) > 0.97
        # As large as an update of AdamW.
        assert np.sqrt(np.mean(out**2)) == pytest.approx(0.2, rel=0.25)


MIXTURE = ModelConfig(
    num_experts=4, experts_per_token=2, qk_norm=True, tie_embeddings=False, lora=LoraConfig(rank=2)
)
DENSE = ModelConfig(
    vocab_size=16, num_layers=2, d_model=64, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=32
)


def sides(config: ModelConfig) -> dict[str, tuple | None]:
    """Axes of inputs and outputs of every weight, by its path."""
    _, _, axes = decoder_graph(config)
    found = {}
    for path, names in jax.tree_util.tree_leaves_with_path(
        axes, is_leaf=lambda x: isinstance(x, tuple)
    ):
        keys = tuple(entry.key for entry in path)
        numbers = matrix_dimensions(keys, names)
        name = ".".join(keys).removeprefix("layers.")
        found[name] = numbers and tuple(tuple(names[i] for i in side) for side in numbers)
    return found


def test_muon_is_told_the_two_sides_of_every_matrix():
    found = sides(MIXTURE) | sides(DENSE)
    heads, keys = ("heads", "head_dim"), ("kv_heads", "head_dim")
    matrices = {
        "attention.q.weight": (("embed",), heads),
        "attention.k.weight": (("embed",), keys),
        "attention.v.weight": (("embed",), keys),
        "attention.o.weight": (heads, ("embed",)),
        "mlp.gate.weight": (("embed",), ("mlp",)),
        "mlp.up.weight": (("embed",), ("mlp",)),
        "mlp.down.weight": (("mlp",), ("embed",)),
        "attention.q.lora_a": (("embed",), (None,)),
        "attention.q.lora_b": ((None,), heads),
        "attention.o.lora_a": (heads, (None,)),
        "attention.o.lora_b": ((None,), ("embed",)),
        "mlp.down.lora_a": (("mlp",), (None,)),
        "mlp.down.lora_b": ((None,), ("embed",)),
    }
    for name, expected in matrices.items():
        assert found[name] == expected, name
    others = {name for name, pair in found.items() if pair is None}
    assert {
        "embedding",
        "unembedding",
        "mlp.router",
        "attention.q.bias",
        "final_norm.scale",
    } < others
    assert all(
        "norm" in n or "bias" in n or n in ("embedding", "unembedding", "mlp.router")
        for n in others
    )


# In a role


def actor_of(config: OptimConfig, sharding: str = "FSDP", **layout) -> Actor:
    return actor_on(mesh_of(**layout), model=DENSE, optim=config, state_rules=state_rules(sharding))


def stepped(actor: Actor, *seeds: int) -> list[float]:
    return [
        float(actor.update(actor.place(whole_rows(seed)), SUPERVISED)["loss"]) for seed in seeds
    ]


CONFIG = OptimConfig(lr=1e-2, lr_warmup_steps=0, epsilon=1e-4)


@functools.cache
def alone_and_start(config: OptimConfig) -> tuple[Actor, TrainState]:
    """One actor on one device for each setting, which compiles its programs once, and its first state."""
    actor = actor_of(config, train="1-1-1")
    actor.init()
    return actor, jax.device_get(actor.state)


def fresh(kind: str, moments: str) -> Actor:
    """That actor with the state that every test begins with."""
    actor, start = alone_and_start(dataclasses.replace(CONFIG, kind=kind, moments=moments))
    actor.state = jax.device_put(start, actor.state_shardings())
    return actor


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "moments", "sharding", "layout"),
    [
        ("adamw", "int8", "FSDP", {"train": "1-2-2", "fsdp": 2}),
        ("muon", "int8", "FSDP", {"train": "1-2-4", "fsdp": 4}),
        ("muon", "bfloat16", "ZeRO-3", {"train": "1-1-8"}),
    ],
    ids=["FSDP", "FSDP of 4", "ZeRO-3"],
)
def test_sharded_as_on_one_device(kind, moments, sharding, layout):
    """The draws of the rounding go by the place in the whole array, so shards round alike."""
    config = dataclasses.replace(CONFIG, kind=kind, moments=moments)
    alone = fresh(kind, moments)
    start = jax.device_get(alone.state)
    losses = stepped(alone, 0, 1, 2)
    actor = actor_of(config, sharding, **layout)
    actor.state = jax.device_put(start, actor.state_shardings())
    assert stepped(actor, 0, 1, 2) == pytest.approx(losses, rel=1e-3)
    # A gradient that is another by rounding may take the other of two codes, here and there.
    for found, expected in zip(
        jax.tree.leaves(actor.state.params), jax.tree.leaves(alone.state.params), strict=True
    ):
        off = np.abs(np.asarray(found) - np.asarray(expected))
        assert np.mean(off > 1e-4) < 0.01


def test_moments_of_8_bits_lie_as_their_weights():
    actor = actor_of(dataclasses.replace(CONFIG, moments="int8"), train="1-2-4", fsdp=4)
    actor.init()
    weight = actor.state.params["layers"]["mlp"]["down"]["weight"]
    moment = actor.state.opt_state[1].inner.mu["layers"]["mlp"]["down"]["weight"]
    assert isinstance(moment, BlockQuantized)
    assert moment.codes.sharding == weight.sharding
    # So its bytes are those counted above.
    assert_as_planned(actor)
    # One block of 64 cannot be split over four devices.
    assert moment.scale.shape == (2, 64, 1)
    assert moment.scale.sharding.spec == jax.sharding.PartitionSpec(*weight.sharding.spec[:2], None)


@pytest.mark.parametrize(("kind", "moments"), [("adamw", "int8"), ("muon", "bfloat16")])
@pytest.mark.long
def test_a_resumed_run_is_the_same_to_the_last_bit(kind, moments, tmp_path):
    config = dataclasses.replace(CONFIG, kind=kind, moments=moments)
    first = fresh(kind, moments)
    stepped(first, 0, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.prepare(None)
    checkpoints.save(1, {"actor": first.state}, {})
    checkpoints.commit()
    checkpoints.wait()
    # Restored into another layout and back, then on as if nothing had been.
    elsewhere = actor_of(config, train="1-2-4", fsdp=4)
    elsewhere.state = checkpoints.restore(1, {"actor": elsewhere.abstract_state()})["actor"]
    second = actor_of(config, train="1-1-1")
    second.state = jax.device_put(jax.device_get(elsewhere.state), second.state_shardings())
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, second.state, first.state)
    assert stepped(second, 2, 3) == stepped(first, 2, 3)
    jax.tree.map(np.testing.assert_array_equal, second.state, first.state)


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_a_minibatch_that_is_skipped_leaves_the_moments(kind):
    actor = fresh(kind, "int8")
    before = jax.device_get(actor.state)
    nothing = whole_rows()
    nothing = nothing.replace(loss_mask=np.zeros_like(nothing.loss_mask))
    actor.update(actor.place(nothing), SUPERVISED)
    jax.tree.map(np.testing.assert_array_equal, actor.state.opt_state, before.opt_state)


# The schedule


def test_another_rate_compiles_nothing():
    actor = fresh("adamw", "float32")
    before = jax.device_get(actor.state.params)
    stepped(actor, 0)
    update = actor.update_program((SUPERVISED,))
    compiled = update._cache_size()
    rate = actor.schedule
    try:
        actor.schedule = Schedule.of(OptimConfig(lr=0.0, lr_decay_steps=7))
        actor.state = jax.device_put(
            alone_and_start(dataclasses.replace(CONFIG, kind="adamw", moments="float32"))[1],
            actor.state_shardings(),
        )
        stepped(actor, 0)
    finally:
        actor.schedule = rate
    assert update._cache_size() == compiled
    # The new rate is the one that counts: 0 leaves the weights as they are.
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actor.state.params), before)


def test_optax_knows_what_is_a_moment():
    """The state's shardings rest on it: moments of both kinds are found in Muon's partition."""
    optimizer = build_optimizer(OptimConfig(kind="muon", moments="int8"), AXES)
    weights = {"layers": {"up": {"weight": np.zeros((1, D, F), "f")}}, "embedding": np.eye(64)}
    found = []
    optax.tree.map_params(
        optimizer,
        lambda moment, _: found.append(type(moment)) or 0,
        jax.eval_shape(optimizer.init, weights),
        weights,
        transform_non_params=lambda _: 0,
        is_leaf=lambda node: isinstance(node, BlockQuantized | optax.MaskedNode),
    )
    assert found.count(BlockQuantized) == 3  # one of Muon, two of AdamW
