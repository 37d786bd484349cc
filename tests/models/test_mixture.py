"""The mixture of experts against a slow twin; its statistics by hand; nothing is dropped."""

import dataclasses
import functools
import importlib.util
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from extras import import_extra
from flax import nnx

from jaxrl.models.compute import Compute
from jaxrl.models.experts import (
    apply_all_experts,
    apply_experts,
    apply_experts_in_tiles,
    experts_for,
)
from jaxrl.models.kernels.grouped_matmul import grouped_matmul
from jaxrl.models.mixture import MixtureOfExperts, Routing, load_balancing_loss, routing_metrics
from jaxrl.models.model_config import ModelConfig

B, T, D, F, E, A = 2, 7, 6, 5, 4, 2
CONFIG = ModelConfig(d_model=D, d_ff=F, num_experts=E, experts_per_token=A)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def silu(x):
    return x / (1 + np.exp(-x))


def experts_twin(x_BTD, expert_BTA, share_BTA, gate_EDF, up_EDF, down_EFD):
    """Token by token, expert by expert, in float64."""
    out = np.zeros(x_BTD.shape)
    for b, t in np.ndindex(*x_BTD.shape[:2]):
        x = x_BTD[b, t].astype(np.float64)
        for e, share in zip(expert_BTA[b, t], share_BTA[b, t], strict=True):
            if e < len(gate_EDF):
                out[b, t] += share * ((silu(x @ gate_EDF[e]) * (x @ up_EDF[e])) @ down_EFD[e])
    return out


@pytest.fixture
def inputs():
    expert_BTA = np.random.default_rng(1).integers(0, E + 1, (B, T, A)).astype(np.int32)
    return normal(B, T, D), expert_BTA, np.abs(normal(B, T, A, seed=2))


WEIGHTS = (normal(E, D, F, seed=3), normal(E, D, F, seed=4), normal(E, F, D, seed=5))


@jax.custom_vjp
def careless(x, weight, rows):
    """A grouped matmul that leaves NaN behind the last group, in its result and in a gradient."""
    out = grouped_matmul(x, weight, rows, None, "xla")
    return jnp.where(jnp.arange(len(x))[:, None] < rows.sum(), out, jnp.nan)


def careless_gradients(saved, d_out):
    x, weight, rows = saved
    assert_finite = lambda a: jnp.where(jnp.isfinite(a).all(), a, jnp.nan)  # noqa: E731
    pull = jax.vjp(lambda x, w: grouped_matmul(x, w, rows, None, "xla"), assert_finite(x), weight)[
        1
    ]
    d_x, d_weight = pull(assert_finite(d_out))
    return jnp.where(jnp.arange(len(x))[:, None] < rows.sum(), d_x, jnp.nan), d_weight, None


careless.defvjp(lambda *of: (careless(*of), of), careless_gradients)
in_chunks = functools.partial(apply_experts_in_tiles, multiply=careless)

all_ways = pytest.mark.parametrize(
    "apply",
    [
        jax.jit(apply_experts),
        jax.jit(apply_experts_in_tiles),
        jax.jit(in_chunks),
        jax.jit(apply_all_experts),
    ],
    ids=["grouped", "tiled", "kernel", "all"],
)


def named(gate, up, down):
    return {"gate": {"weight": gate}, "up": {"weight": up}, "down": {"weight": down}}


@all_ways
def test_experts_equal_their_twin(apply, inputs):
    found = apply(*inputs, named(*WEIGHTS))
    assert_close(found, experts_twin(*inputs, *WEIGHTS))


@all_ways
def test_parts_of_the_experts_sum_to_all_of_them(apply, inputs):
    """Expert parallelism relies on this: the outputs of separate groups of experts add up to the whole."""
    whole = apply(*inputs, named(*WEIGHTS))
    parts = [
        apply(*inputs, named(*(w[e : e + 2] for w in WEIGHTS)), first_expert=e) for e in (0, 2)
    ]
    assert_close(sum(parts), whole)


@all_ways
def test_no_token_is_dropped_when_all_choose_one_expert(apply):
    x = normal(1, 50, D)
    expert, share = np.full((1, 50, 1), 2, np.int32), np.ones((1, 50, 1), np.float32)
    found = apply(x, expert, share, named(*WEIGHTS))
    gate, up, down = (w[2] for w in WEIGHTS)
    assert_close(found, (silu(x @ gate) * (x @ up)) @ down)


@all_ways
def test_gradients_by_finite_differences(apply, inputs):
    with jax.enable_x64(True):
        wide = lambda a: a.astype(np.float64)  # noqa: E731
        x, expert, share = wide(inputs[0]), inputs[1], wide(inputs[2])
        gate, up, down = map(wide, WEIGHTS)
        along = wide(normal(*x.shape, seed=6))

        @jax.jit
        def loss(x, share, gate):
            return jnp.sum(apply(x, expert, share, named(gate, up, down)) * along)

        at = (x, share, gate)
        step = tuple(wide(normal(*a.shape, seed=7 + i)) for i, a in enumerate(at))
        moved = lambda s: loss(*(a + s * 1e-6 * d for a, d in zip(at, step, strict=True)))  # noqa: E731
        slope = sum(
            np.sum(g * d) for g, d in zip(jax.grad(loss, argnums=(0, 1, 2))(*at), step, strict=True)
        )
        np.testing.assert_allclose(slope, (moved(1) - moved(-1)) / 2e-6, rtol=1e-6)


@all_ways
def test_experts_in_bfloat16_round_no_further_than_their_products(apply):
    """At widths of 256, with biases: outputs and gradients of inputs and shares, against float64 in NumPy."""
    x, share = normal(1, 40, 256), np.abs(normal(1, 40, 2, seed=1))
    gate, up, down = (normal(4, 256, 256, seed=2 + i) / 16 for i in range(3))
    bias, along = normal(4, 256, seed=5), normal(1, 40, 256, seed=6)
    expert = np.random.default_rng(7).integers(0, 4, (1, 40, 2)).astype(np.int32)
    narrow = lambda *arrays: [a.astype(jnp.bfloat16) for a in arrays]  # noqa: E731
    x, gate, up, down, bias, along = narrow(x, gate, up, down, bias, along)

    def loss(x, share):
        weights = named(gate, up, down)
        weights["down"]["bias"] = bias
        out = apply(x, expert, share, weights)
        return (out * along).astype(jnp.float32).sum(), out

    (d_x, d_share), out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, share)
    wide = lambda a: np.asarray(a, np.float64)  # noqa: E731
    expected = {"out": np.zeros((40, 256)), "share": np.zeros((40, 2)), "x": np.zeros((40, 256))}
    for t, a in np.ndindex(40, 2):
        e, row, d_out = expert[0, t, a], wide(x)[0, t], wide(along)[0, t]
        g, u = row @ wide(gate)[e], row @ wide(up)[e]
        sigmoid = 1 / (1 + np.exp(-g))
        given = (g * sigmoid * u) @ wide(down)[e] + wide(bias)[e]
        expected["out"][t] += share[0, t, a] * given
        expected["share"][t, a] = d_out @ given
        d_hidden = share[0, t, a] * (wide(down)[e] @ d_out)
        d_g = d_hidden * u * sigmoid * (1 + g * (1 - sigmoid))
        expected["x"][t] += wide(gate)[e] @ d_g + wide(up)[e] @ (d_hidden * g * sigmoid)
    for got, name in ((out, "out"), (d_share, "share"), (d_x, "x")):
        error = np.abs(wide(got)[0] - expected[name]).max() / np.abs(expected[name]).max()
        # A few roundings of 2**-9.
        assert error < 0.012, (name, error)


def with_adapters(weights, rank=2):
    for i, projection in enumerate(weights.values()):
        experts, rows, columns = projection["weight"].shape
        projection["bias"] = normal(experts, columns, seed=10 + i)
        projection["lora_a"] = normal(experts, rows, rank, seed=20 + i)
        projection["lora_b"] = normal(experts, rank, columns, seed=30 + i)
    return weights


@functools.partial(jax.jit, static_argnames="apply")
def out_and_gradients(apply, x, expert, share, weights, first, along):
    """Of inputs, shares and weights, in one program for all examples of a shape."""

    def loss(x, share, weights):
        out = apply(x, expert, share, weights, first_expert=first)
        return jnp.sum(out * along), out

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, share, weights)


@hypothesis.settings(max_examples=6)
@hypothesis.given(
    tokens=st.sampled_from([1, 9, 400]),
    favourite=st.integers(0, 8),
    share_of_favourite=st.sampled_from([0.0, 0.5, 1.0]),
    held=st.sampled_from([(0, 8), (2, 4), (4, 4)]),
    adapted=st.booleans(),
    way=st.sampled_from(
        [apply_experts_in_tiles, functools.partial(in_chunks, expert_shards=3), apply_all_experts]
    ),
)
def test_chunks_are_the_grouped_products(tokens, favourite, share_of_favourite, held, adapted, way):
    """Outputs and gradients: uneven choices, empty experts, full and part tiles, pairs held elsewhere."""
    first, count = held
    rng = np.random.default_rng(tokens)
    expert = rng.integers(0, 9, (2, tokens, 3)).astype(np.int32)
    expert[rng.random(expert.shape) < share_of_favourite] = favourite
    x, share = normal(2, tokens, D), np.abs(normal(2, tokens, 3, seed=1))
    shapes = ((count, D, F), (count, D, F), (count, F, D))
    weights = named(*(normal(*shape, seed=3 + i) for i, shape in enumerate(shapes)))
    weights = with_adapters(weights) if adapted else weights
    along = normal(2, tokens, D, seed=9)

    ours, theirs = (
        out_and_gradients(apply, x, expert, share, weights, first, along)
        for apply in (way, apply_experts)
    )
    assert_close(ours, theirs, scale=10)


def test_a_platform_gets_the_way_that_it_compiles_well():
    def way(platform, dtype="bfloat16", capability=""):
        device = types.SimpleNamespace(platform=platform, compute_capability=capability)
        return experts_for(device, dtype)

    assert way("cpu") is experts_for(None, "float32") is apply_experts_in_tiles
    # Ampere has no backward kernel, and no GPU one for float32.
    otherwise = lambda *of, **by: way(*of, **by).keywords["otherwise"]  # noqa: E731
    assert otherwise("tpu") is apply_experts
    assert otherwise("gpu", capability="8.0") is apply_experts_in_tiles
    assert otherwise("gpu", "float32", "9.0") is apply_experts_in_tiles
    has_kernel = importlib.util.find_spec("tokamax") is not None
    assert (otherwise("gpu", capability="9.0") is apply_experts_in_tiles) == (not has_kernel)
    # A deterministic engine has tiles of eight rows while it decodes, too.
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
    assert experts_for(gpu, "float32", equal_tiles=True).keywords == {"most_rows": 8}


@pytest.mark.parametrize(
    ("platform", "tokens", "length", "shards", "applies_all"),
    [
        ("gpu", 2048, 1, 1, True),
        ("gpu", 2049, 1, 1, False),
        ("tpu", 512, 1, 1, True),
        ("tpu", 513, 1, 1, False),
        # A prompt, or an update.
        ("gpu", 1, 2, 1, False),
        # Of 4 experts that are held one pair needs a quarter.
        ("gpu", 1, 1, 2, True),
        ("gpu", 1, 1, 4, False),
    ],
)
def test_a_decoding_device_applies_all_experts_if_a_quarter_is_needed(
    platform, tokens, length, shards, applies_all
):
    device = types.SimpleNamespace(platform=platform, compute_capability="8.0")
    expert, share = jnp.zeros((tokens, length, 2), jnp.int32), jnp.ones((tokens, length, 2))
    given = (jnp.ones((tokens, length, D)), expert, share, named(*WEIGHTS))
    apply = functools.partial(experts_for(device, "float32"), expert_shards=shards)
    # Rows of pairs, or weights of tiles, are gathered.
    assert ("gather" not in str(jax.make_jaxpr(apply)(*given))) == applies_all


def test_tiles_need_no_memory_for_each_expert():
    """The compiler's own figure: rows of the experts' common width are what a mask over all of them takes."""
    experts, tokens, width = 16, 512, 64
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
    expert = jax.ShapeDtypeStruct((1, tokens, 4), jnp.int32)
    share = jax.ShapeDtypeStruct((1, tokens, 4), jnp.float32)
    shapes = ((experts, width, 32), (experts, width, 32), (experts, 32, width))
    weights = named(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    compiled = jax.jit(apply_experts_in_tiles).lower(x, expert, share, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * tokens * 4 * width * experts / 4


@functools.cache
def layer(config=CONFIG):
    return nnx.jit(lambda: MixtureOfExperts(config, rngs=nnx.Rngs(0)))()


X = normal(B, T, D)


def passed(layer, x=X, live=np.ones((B, T), bool), **options):  # noqa: B008
    """What a layer makes of tokens, and their routing, by one program."""
    return jax.jit(lambda x, live: layer(x, live, Compute(**options)))(x, live)


def test_the_most_probable_experts_share_the_token_in_proportion():
    found, _ = passed(layer())
    probability = np.exp(X @ np.asarray(layer().router[...]))
    probability /= probability.sum(-1, keepdims=True)
    expert = np.argsort(-probability, axis=-1)[..., :A]
    share = np.take_along_axis(probability, expert, -1)
    share /= share.sum(-1, keepdims=True)
    weights = [np.asarray(getattr(layer(), n).weight[...]) for n in ("gate", "up", "down")]
    assert_close(found, experts_twin(X, expert, share, *weights))


@pytest.mark.parametrize("groups", [1, 3])
def test_sigmoid_routing_is_its_slow_twin(groups):
    """A large bias takes part in the choice of groups and experts, and not in their weights."""
    config = dataclasses.replace(
        CONFIG,
        num_experts=6,
        experts_per_token=3,
        sigmoid_routing=True,
        routed_scale=2.5,
        expert_groups=groups,
        groups_per_token=min(2, groups),
    )
    mixture, bias = layer(config), normal(6, seed=8)
    mixture.correction_bias[...] = jnp.asarray(bias)
    found, routing = passed(mixture)
    score = 1 / (1 + np.exp(-X @ np.asarray(mixture.router[...])))
    expert = np.zeros((B, T, 3), np.int32)
    for b, t in np.ndindex(B, T):
        biased = (score[b, t] + bias).reshape(groups, -1)
        best = np.sort(biased, axis=1)[:, -2:].sum(1)
        biased[np.argsort(best)[: -config.groups_per_token]] = -np.inf
        expert[b, t] = np.argsort(-biased.reshape(-1))[:3]
    share = np.take_along_axis(score, expert, -1)
    share *= 2.5 / share.sum(-1, keepdims=True)
    weights = [np.asarray(getattr(mixture, n).weight[...]) for n in ("gate", "up", "down")]
    assert_close(found, experts_twin(X, expert, share, *weights))
    np.testing.assert_array_equal(routing.chosen_E, np.bincount(expert.reshape(-1), minlength=6))
    np.testing.assert_allclose(routing.probability_E.sum(), B * T, rtol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_every_token_passes_the_shared_expert(gated):
    config = dataclasses.replace(CONFIG, shared_d_ff=3, shared_gate=gated)
    mixture = layer(config)
    found, _ = passed(mixture)
    routed, _ = passed(layer())  # drawn from the same seed, before the shared expert
    shared = mixture.shared
    gate, up, down = (np.asarray(p.weight[...]) for p in (shared.gate, shared.up, shared.down))
    out = (silu(X @ gate) * (X @ up)) @ down
    if gated:
        out /= 1 + np.exp(-X @ np.asarray(mixture.shared_gate[...]))[..., None]
    assert_close(found, routed + out)


def test_a_clamped_gate_and_biases_by_hand():
    """One expert of width 1: gate 9 is cut to 7, up -8 to -7; then (up + 1) * gate * sigmoid(1.702 gate)."""
    ones = np.ones((1, 1, 1), np.float32)
    weights = {
        "gate": {"weight": 4 * ones, "bias": 1 * ones[0]},
        "up": {"weight": -5 * ones, "bias": 2 * ones[0]},
        "down": {"weight": 3 * ones, "bias": 0.5 * ones[0]},
    }
    hidden = (-7 + 1) * 7 / (1 + np.exp(-1.702 * 7))
    expert = np.zeros((1, 1, 1), np.int32)
    for apply in (apply_experts, apply_experts_in_tiles):
        clamped = jax.jit(functools.partial(apply, activation="clamped_silu"))
        out = clamped(2 * ones, expert, 0.25 * ones, weights)
        assert_close(out, 0.25 * (3 * hidden + 0.5) * ones)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_given_experts_take_the_place_of_the_routers_choice(sigmoid):
    """Their weights are the router's; -1 leaves a token to it; the order does not matter."""
    config = dataclasses.replace(CONFIG, sigmoid_routing=sigmoid, normalize_experts=True)
    mixture = layer(config)
    x, live = normal(B, T, D), np.ones((B, T), bool)
    live[1, 5:] = False
    _, own = passed(mixture, x, live, keeps_routes=True)
    given = np.array(own.expert)[..., ::-1].copy()
    given[0, 0] = [(given[0, 0, 0] + 1) % E, (given[0, 0, 0] + 2) % E]
    given[0, 1] = -1
    given[1, 5:] = 0  # padding
    found, routing = passed(mixture, x, live, keeps_routes=True, routes=given.astype(np.int16))
    expected = np.where(given == -1, own.expert, given)
    expected[1, 5:] = E
    np.testing.assert_array_equal(routing.expert, expected)
    logits = x @ np.asarray(mixture.router[...])
    score = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits)
    share = np.take_along_axis(score, np.minimum(expected, E - 1), axis=-1)
    share /= share.sum(-1, keepdims=True)
    weights = [np.asarray(getattr(mixture, name).weight[...]) for name in ("gate", "up", "down")]
    assert_close(found, experts_twin(x, expected, share, *weights))
    # Twelve live tokens: one has none given, and one has others.
    assert [float(count) for count in routing.same] == [10, 11]
    metrics = routing_metrics(jax.tree.map(lambda leaf: leaf[None], routing))
    np.testing.assert_allclose(metrics["moe/same_routes"], 10 / 11)


def test_padding_is_no_experts_business():
    x, live = normal(B, T, D), np.arange(T)[None] < np.array([[4], [7]])
    out, routing = passed(layer(), x, live)
    changed, same = passed(layer(), np.where(live[..., None], x, np.float32(1e3)), live)
    np.testing.assert_array_equal(np.asarray(out)[live], np.asarray(changed)[live])
    assert (np.asarray(out)[~live] == 0).all()
    jax.tree.map(np.testing.assert_array_equal, routing, same)
    assert routing.num_tokens == 11
    assert routing.chosen_E.sum() == 11 * A
    np.testing.assert_allclose(routing.probability_E.sum(), 11, rtol=1e-6)


def stacked(*layers):
    """Routing of layers of (chosen, probability sums) with 4 tokens each."""
    chosen, probability = (jnp.array(part, jnp.float32) for part in zip(*layers, strict=True))
    return Routing(chosen, probability, jnp.full(len(layers), 4.0))


EVEN = ([2, 2, 2, 2], [1, 1, 1, 1])
# Half of the tokens go to each of the first two, with probabilities 3/4 and 1/4 in the mean.
SKEWED = ([4, 4, 0, 0], [3, 1, 0, 0])


def test_the_load_balancing_loss_by_hand():
    np.testing.assert_allclose(load_balancing_loss(stacked(EVEN)), A)
    # E * (1 * 3/4 + 1 * 1/4)
    np.testing.assert_allclose(load_balancing_loss(stacked(SKEWED)), 4)
    np.testing.assert_allclose(load_balancing_loss(stacked(EVEN, SKEWED)), 3)
    nothing = Routing(jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.zeros(1))
    assert load_balancing_loss(nothing) == 0


def test_routing_metrics_by_hand():
    metrics = routing_metrics(stacked(EVEN, SKEWED))
    assert metrics == {"moe/load_balancing_loss": 3, "moe/max_load": 2, "moe/idle_experts": 0.25}


def test_the_load_balancing_loss_is_transformers_for_one_layer():
    torch = import_extra("parity", "torch")
    moe = import_extra("parity", "transformers.models.qwen3_moe.modeling_qwen3_moe")
    x, live = normal(B, T, D), np.arange(T)[None] < np.array([[4], [7]])
    _, routing = passed(layer(), x, live)
    logits = torch.from_numpy(x @ np.asarray(layer().router[...])).reshape(-1, E)
    expected = moe.load_balancing_loss_func(
        (logits,), num_experts=E, top_k=A, attention_mask=torch.from_numpy(live.astype(np.int64))
    )
    found = load_balancing_loss(jax.tree.map(lambda a: a[None], routing))
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(shared_d_ff=4, num_experts=0, experts_per_token=0), "shared_d_ff 4 and shared_gate"),
        (dict(shared_gate=True), "shared_d_ff 0 and shared_gate True"),
        (dict(routed_scale=2.0), "routed_scale 2 without sigmoid_routing"),
        (
            dict(sigmoid_routing=True, expert_groups=2, experts_per_token=3),
            "groups_per_token 1 of expert_groups 2 with experts_per_token 3",
        ),
        (dict(sigmoid_routing=True, expert_groups=4), "two or more"),
        (dict(first_dense_layers=4, dense_d_ff=8), "first_dense_layers 4 of num_layers 4"),
        (dict(first_dense_layers=1), "dense_d_ff 0"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(("experts", "chosen"), [(4, 0), (4, 5), (0, 2)])
def test_impossible_mixtures_are_refused(experts, chosen):
    with pytest.raises(ValueError, match=f"experts_per_token {chosen} of num_experts {experts}"):
        ModelConfig(num_experts=experts, experts_per_token=chosen)
