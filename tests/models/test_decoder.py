import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx

from jaxrl.algos.logprobs import token_logprobs
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES
from jaxrl.models.attention import attention
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph, init_params, rotary_angles, rotate, split_layers
from jaxrl.models.model_config import STACKS, LoraConfig, ModelConfig, RopeScaling

TINY = ModelConfig(
    vocab_size=24, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=8
)
FAMILIES = {
    "qwen2": TINY,
    "qwen3": dataclasses.replace(TINY, qkv_bias=False, qk_norm=True),
    # head_dim * num_heads is not d_model, the unembedding is its own, wavelengths are stretched.
    "llama": dataclasses.replace(
        TINY,
        qkv_bias=False,
        tie_embeddings=False,
        d_model=20,
        rope_scaling=RopeScaling(factor=4.0, original_max_positions=16),
    ),
    "gemma": dataclasses.replace(
        TINY,
        num_layers=3,
        qkv_bias=False,
        qk_norm=True,
        sliding_window=3,
        layer_pattern=("sliding", "full"),
        rope_theta=1_000.0,
        rope_local_theta=100.0,
        rope_scaling=RopeScaling(factor=8.0, kind="linear"),
        query_pre_attn_scalar=4.0,
        attention_softcap=5.0,
        logits_softcap=8.0,
        activation="gelu_tanh",
        post_norms=True,
        zero_centered_norms=True,
        scale_embeddings=True,
    ),
}


# The parts of SmolLM3, Ministral 3, OLMo 3 and Phi-4-mini, together.
FAMILIES["later"] = dataclasses.replace(
    FAMILIES["gemma"],
    num_layers=2,
    layer_pattern=("sliding", "unrotated"),
    pre_norms=False,
    qk_norm_over_heads=True,
    rotary_fraction=0.5,
    rope_scaling=RopeScaling(
        kind="yarn", factor=8.0, original_max_positions=3, query_beta=0.3, beta_slow=0.1
    ),
)
FAMILIES["qwen3.5"] = dataclasses.replace(
    TINY,
    num_layers=4,
    qkv_bias=False,
    qk_norm=True,
    gated_attention=True,
    zero_centered_norms=True,
    rotary_fraction=0.5,
    layer_pattern=("delta", "full"),
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=5,
    delta_value_dim=6,
)
FAMILIES["gpt-oss"] = dataclasses.replace(
    TINY,
    output_bias=True,
    attention_sinks=True,
    sliding_window=3,
    layer_pattern=("sliding", "full"),
    num_experts=4,
    experts_per_token=2,
    expert_biases=True,
    activation="clamped_silu",
)


FAMILIES["qwen3.5-moe"] = dataclasses.replace(
    FAMILIES["qwen3.5"], num_experts=4, experts_per_token=2, shared_d_ff=20, shared_gate=True
)
# Heads of 8 and of 12 dimensions, two and one of keys.
FAMILIES["gemma4"] = dataclasses.replace(
    TINY,
    num_layers=4,
    qkv_bias=False,
    qk_norm=True,
    value_norm=True,
    keys_as_values=True,
    full_head_dim=12,
    full_kv_heads=1,
    sliding_window=3,
    layer_pattern=("sliding", "full"),
    rope_theta=1_000.0,
    rope_local_theta=100.0,
    rope_scaling=RopeScaling(kind="proportional", rotated=0.5),
    query_pre_attn_scalar=1.0,
    activation="gelu_tanh",
    post_norms=True,
    scale_embeddings=True,
    scaled_layers=True,
    num_experts=4,
    experts_per_token=2,
    shared_d_ff=20,
    expert_norms=True,
)
FAMILIES["glm-4.5"] = dataclasses.replace(
    TINY,
    num_layers=3,
    qk_norm=True,
    rotary_fraction=0.5,
    num_experts=6,
    experts_per_token=2,
    sigmoid_routing=True,
    expert_groups=3,
    groups_per_token=2,
    routed_scale=1.5,
    shared_d_ff=20,
    first_dense_layers=1,
    dense_d_ff=28,
)


DELTA = {"delta_key_heads": 2, "delta_value_heads": 4}
# The parts of Gemma 3n's layers that others have not.
SHARING = dataclasses.replace(
    TINY,
    num_layers=6,
    qk_norm=True,
    sliding_window=4,
    layer_pattern=("sliding", "full"),
    layer_inputs=6,
    sharing_layers=2,
    double_wide_sharing=True,
)
FAMILIES["deepseek-v3"] = dataclasses.replace(
    FAMILIES["glm-4.5"],
    qkv_bias=False,
    qk_norm=False,
    rotary_fraction=1.0,
    num_kv_heads=4,
    kv_latent=10,
    q_latent=6,
    rope_dim=2,
    value_dim=7,
    interleaved_rotary=True,
    rope_scaling=RopeScaling(
        kind="yarn", factor=8.0, original_max_positions=16, mscale=1.0, mscale_all_dim=0.5
    ),
)


fresh_params = jax.jit(init_params, static_argnums=0)


@functools.cache
def model_of(config: ModelConfig):
    """Graph and weights; biases and norm scales are random too, or they could not be seen missing."""
    graph, shapes, _ = decoder_graph(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: np.float32(0.3) * rng.normal(size=s.shape).astype("f"), shapes)
    return graph, jax.device_put(params)


def forward(config, params, tokens_BT, positions_BT, segment_ids_BT, compute=None):
    """Log-probability of every token, the plain way."""
    graph, _, _ = decoder_graph(config)
    model = nnx.merge(graph, params)
    compute = compute or Compute()

    def attend(q, k, v, kind, *_):
        return attention(q, k, v, segment_ids_BT, kind), None

    hidden_BTD, *_ = model(tokens_BT, positions_BT, attend, compute=compute, per_row=segment_ids_BT)
    return token_logprobs(
        functools.partial(model.logits, compute=compute),
        hidden_BTD,
        tokens_BT,
        segment_ids_BT,
        temperature=1.0,
        chunk_tokens=8,
    )[0]


@functools.cache
def compiled(config):
    """`forward` of a family, one program for all tests of a shape."""
    return jax.jit(functools.partial(forward, config))


def random_tokens(length: int, *, rows: int = 1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, TINY.vocab_size, (rows, length)).astype(np.int32)


def whole_sequence(tokens_BT):
    """Positions and segment ids of rows that hold one sequence each."""
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
    return positions_BT, np.ones_like(tokens_BT)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_the_parameter_count_of_a_family_is_that_of_its_weights(config):
    _, shapes, _ = decoder_graph(config)
    assert config.num_params == sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_every_weight_names_an_axis_for_each_dimension(config):
    _, shapes, axes = decoder_graph(config)
    jax.tree.map(
        lambda names, leaf: assert_names(names, leaf.ndim),
        axes,
        shapes,
        is_leaf=lambda v: isinstance(v, tuple),
    )
    layers = jax.tree.leaves(axes["layers"], is_leaf=lambda v: isinstance(v, tuple))
    assert {names[0] for names in layers} == {"layers"}


def assert_names(names: tuple[str, ...], ndim: int) -> None:
    assert len(names) == ndim
    assert {name for name in names if name} <= set(TRAIN_RULES) & set(GENERATE_RULES)


def test_fresh_weights_have_the_planned_shapes_and_scale():
    _, shapes, _ = decoder_graph(TINY)
    params = fresh_params(TINY, jax.random.key(0))
    jax.tree.map(
        lambda p, s: (p.shape, p.dtype) == (s.shape, s.dtype) or pytest.fail(), params, shapes
    )
    layers = params["layers"]
    # Layers are drawn apart.
    assert not np.array_equal(layers["mlp"]["up"]["weight"][0], layers["mlp"]["up"]["weight"][1])
    np.testing.assert_allclose(np.std(layers["mlp"]["up"]["weight"]), TINY.d_model**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(layers["mlp"]["down"]["weight"]), TINY.d_ff**-0.5, rtol=0.1)
    assert (np.asarray(layers["attention"]["q"]["bias"]) == 0).all()
    assert (np.asarray(layers["attention_norm"]["scale"]) == 1).all()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_packed_equals_unpacked(config):
    _, params = model_of(config)
    run, lengths = compiled(config), [7, 5, 3]
    sequences = [random_tokens(n, seed=n)[0] for n in lengths]
    T = 18
    tokens, positions, segments = (np.zeros((1, T), np.int32) for _ in range(3))
    starts = np.cumsum([0, *lengths[:-1]])
    for i, (start, sequence) in enumerate(zip(starts, sequences, strict=True), start=1):
        at = slice(start, start + len(sequence))
        tokens[0, at], positions[0, at], segments[0, at] = sequence, np.arange(len(sequence)), i
    packed = run(params, tokens, positions, segments)
    for start, sequence in zip(starts, sequences, strict=True):
        alone = np.zeros((1, T), np.int32)
        alone[0, : len(sequence)] = sequence
        segment = (np.arange(T) < len(sequence)).astype(np.int32)[None]
        logprob = run(params, alone, np.arange(T, dtype=np.int32)[None] * segment, segment)
        assert_close(packed[0, start : start + len(sequence)], logprob[0, : len(sequence)], scale=1)


@pytest.mark.slow
def test_unrolling_and_rematerialising_change_no_value_and_no_gradient():
    _, params = model_of(TINY)
    tokens_BT = random_tokens(10, rows=2)

    def evaluate(compute):
        def total(params):
            return forward(TINY, params, tokens_BT, *whole_sequence(tokens_BT), compute).sum()

        return jax.jit(jax.value_and_grad(total))(params)

    expected = evaluate(Compute())
    for compute in (Compute(remat="full"), Compute(remat="projections", unroll=2)):
        assert_close(evaluate(compute), expected, scale=1)


@pytest.mark.parametrize(
    "config",
    [FAMILIES["gemma"], FAMILIES["gpt-oss"], FAMILIES["qwen3.5"], FAMILIES["glm-4.5"], SHARING],
    ids=["windows", "sinks", "periods", "first dense", "sharing"],
)
def test_a_list_of_layers_computes_what_their_stack_does(config):
    """And no stack is made of it again."""
    _, params = model_of(config)
    tokens_BT = random_tokens(18)
    given = tokens_BT, *whole_sequence(tokens_BT)
    apart = jax.jit(split_layers)(params)
    run = compiled(config)
    assert_close(run(apart, *given), run(params, *given), scale=1)
    text = str(jax.make_jaxpr(run)(apart, *given))
    stacks = [params[name] for name in STACKS if name in params]
    sizes = {leaf.shape for leaf in jax.tree.leaves(stacks) if leaf.ndim > 3 or leaf[0].size > 300}
    assert sizes and not [size for size in sizes if f"f32[{','.join(map(str, size))}]" in text]


def test_vectors_of_one_kind_are_sliced_together():
    """By hand: the scales of two norms of a layer, of two of heads, biases of k and v, of gates and ups.

    The router's bias is as long as the norms of heads, but of other axes; q's has a shape of its own.
    """
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_biases": True}
    config = dataclasses.replace(TINY, qk_norm=True, **experts)
    graph, shapes, _ = decoder_graph(config)
    normal = lambda x: np.random.default_rng(0).normal(size=x.shape).astype(np.float32)  # noqa: E731
    params = jax.tree.map(normal, shapes)
    model = nnx.merge(graph, params)
    stacks, weights_of = model.vectors_joined()
    assert nnx.merge(graph, split_layers(params)).vectors_joined() is None
    pairs = [(2, 2, 2, 8), (2, 2, 8), (2, 2, 8, 24), (2, 2, 16)]
    assert sorted(x.shape for x in stacks[0]) == pairs
    whole = nnx.split(model.layers)[1]
    for layer in range(2):
        of_layer = jax.tree.map(lambda x: x[layer], (whole, stacks))  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, weights_of(of_layer[1]), of_layer[0])


def test_with_all_layers_unrolled_there_is_no_scan_that_stacks_what_is_kept():
    """Stacked, the activations of all layers are copied once forward and once backward."""
    _, shapes, _ = decoder_graph(TINY)
    tokens_BT = random_tokens(10, rows=2)

    def gradient(unroll):
        def total(params):
            where = whole_sequence(tokens_BT)
            return forward(TINY, params, tokens_BT, *where, Compute(unroll=unroll)).sum()

        return str(jax.make_jaxpr(jax.grad(total))(shapes))

    kept_of_all_layers = f"f32[{TINY.num_layers},2,10,{TINY.d_ff}]"
    assert kept_of_all_layers in gradient(1)
    assert kept_of_all_layers not in gradient(TINY.num_layers)


def test_rematerialising_keeps_less():
    """The policies differ in what they save: full < projections < none."""
    tokens_BT = random_tokens(10, rows=2)
    _, shapes, _ = decoder_graph(dataclasses.replace(TINY, num_layers=8))
    config = dataclasses.replace(TINY, num_layers=8)

    def saved_bytes(remat):
        def total(params):
            return forward(
                config, params, tokens_BT, *whole_sequence(tokens_BT), Compute(remat=remat)
            ).sum()

        residuals = jax.eval_shape(lambda params: jax.vjp(total, params)[1], shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))

    assert saved_bytes("full") < saved_bytes("projections") < saved_bytes("none")


def test_padding_ids_never_get_probability():
    config = dataclasses.replace(TINY, num_tokens=20)
    graph, params = model_of(config)
    model = nnx.merge(graph, params)
    # A state that points straight at a padding row would choose it.
    hidden = 50 * model.embedding[...][22]
    logits_V = model.logits(hidden, compute=Compute())
    assert np.argmax(hidden @ model.embedding[...].T) == 22
    p_V = np.asarray(jax.nn.softmax(logits_V))
    np.testing.assert_array_equal(p_V[20:], 0)
    np.testing.assert_allclose(p_V.sum(), 1, rtol=1e-6)

    gradient = jax.grad(lambda h: jax.nn.log_softmax(model.logits(h, compute=Compute()))[3])(hidden)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(TINY, qk_norm=True, tie_embeddings=False),
        FAMILIES["gemma"],
        FAMILIES["qwen3.5"],
    ],
    ids=["all parts", "gemma", "qwen3.5"],
)
def test_every_weight_takes_part(config):
    """A weight without gradient would be one that the forward pass forgot."""
    _, params = model_of(config)
    tokens_BT = random_tokens(12, rows=4)
    gradient = jax.jit(
        jax.grad(lambda p: forward(config, p, tokens_BT, *whole_sequence(tokens_BT)).sum())
    )(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        # Each layer of a stacked weight by itself.
        largest = np.abs(leaf).max(axis=tuple(range(1, leaf.ndim)) if "layers" in name else None)
        assert (largest > 0).all(), name


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("traced", {}),
        ("compiled", {}),
        ("traced", {"lora": LoraConfig(rank=2)}),
        ("traced", {"num_experts": 4, "experts_per_token": 2}),
        ("traced", {"sliding_window": 3, "layer_pattern": ("sliding", "sliding", "full")}),
        ("traced", DELTA | {"layer_pattern": ("delta", "full")}),
        ("traced", {"sliding_window": 3, "layer_pattern": ("sliding", "full"), "full_head_dim": 6}),
    ],
)
def test_the_program_does_not_grow_with_depth(stage, changes):
    tokens_BT = random_tokens(8)

    def size(num_layers):
        config = dataclasses.replace(TINY, num_layers=num_layers, **changes)
        _, shapes, _ = decoder_graph(config)
        total = lambda params: forward(config, params, tokens_BT, *whole_sequence(tokens_BT)).sum()  # noqa: E731
        program = jax.jit(jax.grad(total)).trace(shapes)
        return len(str(program.jaxpr) if stage == "traced" else program.lower().compile().as_text())

    assert abs(size(64) / size(4) - 1) < 0.1


def test_a_window_is_a_window_in_every_layer_that_slides_and_in_no_other():
    """Through L sliding layers a token knows L * (window - 1) tokens before it; one full layer knows all."""
    tokens_BT = random_tokens(12)
    changed_BT = tokens_BT.copy()
    changed_BT[0, 0] += 1

    def seen(pattern):
        config = dataclasses.replace(
            TINY, num_layers=3, sliding_window=3, layer_pattern=pattern, num_scores=0
        )
        graph, params = model_of(config)
        model = nnx.merge(graph, params)
        positions_BT, segment_ids_BT = whole_sequence(tokens_BT)

        def hidden(tokens_BT):
            attend = lambda q, k, v, kind, *_: (attention(q, k, v, segment_ids_BT, kind), None)  # noqa: E731
            return model(tokens_BT, positions_BT, attend, compute=Compute()).hidden_BTD

        run = jax.jit(hidden)
        differs_BT = (np.asarray(run(tokens_BT)) != np.asarray(run(changed_BT))).any(-1)
        return np.flatnonzero(differs_BT[0]).max()

    assert seen(("sliding",)) == 6
    assert seen(("sliding", "full")) == seen(("sliding", "sliding", "full")) == 11


def test_queries_of_a_decoded_token_wait_for_nothing_but_on_a_tpu():
    """A barrier there, and with several tokens none: a program of two layers has one in its scan."""
    graph, params, _ = decoder_graph(TINY)

    def run(params, tokens):
        attend = lambda q, k, v, kind, *_: (q, None)  # noqa: E731
        zeros = jnp.zeros(tokens.shape, jnp.int32)
        return nnx.merge(graph, params)(tokens, zeros, attend, compute=Compute()).hidden_BTD

    def barriers(tokens, platform):
        traced = jax.jit(run).trace(params, jnp.zeros((2, tokens), jnp.int32))
        return traced.lower(lowering_platforms=(platform,)).as_text().count("optimization_barrier")

    assert [barriers(1, platform) for platform in ("tpu", "cuda", "cpu")] == [1, 0, 0]
    assert barriers(2, "tpu") == 0


def test_rotation_depends_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 1, 1, 8)).astype(np.float32) for _ in range(2))

    @jax.jit
    def product(i, j):
        at = [rotary_angles(n[None, None], 8, 10_000.0, None) for n in (i, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    np.testing.assert_allclose(product(7, 3), product(107, 103), rtol=1e-4)
    np.testing.assert_allclose(product(5, 5), (q * k).sum(), rtol=1e-5)
    assert abs(product(7, 3) - product(3, 7)) > 1e-3


@pytest.mark.parametrize("platform", ["default", "tpu"])
def test_rotation_by_hand(platform, monkeypatch):
    """4 of 5 dimensions, theta 100: pairs (0, 2) and (1, 3) turn by position and position / 10 radians."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, **by: by[platform](x))
    x = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(1, 1, 1, 5)
    rotated = rotate(x, rotary_angles(jnp.array([[2]]), 4, 100.0, None), scale=2.0).reshape(5)
    c, s, c10, s10 = np.cos(2), np.sin(2), np.cos(0.2), np.sin(0.2)
    expected = [c - 3 * s, 2 * c10 - 4 * s10, 3 * c + s, 4 * c10 + 2 * s10, 5]
    np.testing.assert_allclose(rotated, 2 * np.array(expected), rtol=1e-5)


def test_stretched_wavelengths_keep_short_ones_and_divide_long_ones():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

    def frequencies(scaling):
        cos, sin = rotary_angles(jnp.array([[1]]), 64, 500_000.0, scaling)
        return np.arctan2(sin, cos).reshape(-1)

    plain, stretched = frequencies(None), frequencies(scaling)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(stretched[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(stretched[turns < 1], plain[turns < 1] / 8, rtol=1e-5)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    blend = (turns[between] - 1) / 3
    np.testing.assert_allclose(
        stretched[between], plain[between] * (blend + (1 - blend) / 8), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"full_head_dim": 7}, "full_head_dim 7 is odd"),
        ({"full_kv_heads": 3}, "num_heads 4 is not a multiple of full_kv_heads 3"),
        ({"num_tokens": 25}, "num_tokens 25 exceeds vocab_size 24"),
        ({"layer_pattern": ("delta", "full")}, "delta_key_heads 0 and delta_value_heads 0"),
        (DELTA | {"layer_pattern": ("delta", "full", "full")}, "num_layers 2 is no multiple of"),
    ],
)
def test_impossible_shapes_are_refused_with_their_values(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_latents_have_no_queries_that_grow():
    latent = FAMILIES["deepseek-v3"]
    scaling = dataclasses.replace(latent.rope_scaling, query_beta=0.1)
    with pytest.raises(ValueError, match=r"kv_latent 10 .* or scaled queries"):
        dataclasses.replace(latent, rope_scaling=scaling)
