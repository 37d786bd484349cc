"""Operations counted from a model's shape are those of the traced programs, part by part."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import of_extension
from meshes import mesh_of
from small import actor_on

from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.parallel_layers import expert_parallel
from jaxrl.mesh.rules import TRAIN_RULES
from jaxrl.models.experts import apply_experts, apply_experts_in_tiles
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.models.shapes import SHAPES
from jaxrl.roles.flops import attention_flops, token_flops, training_flops
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.train_config import TrainConfig

abstract_batch = of_extension("jaxrl_planner.compiled.programs:abstract_batch")
matmul_flops = of_extension("jaxrl_planner.compiled.programs:matmul_flops")

R, T = 2, 64
# Of the products of an update those that may be computed again, logits aside.
AGAIN = 1.12
MODEL = ModelConfig(
    vocab_size=96, num_layers=3, d_model=32, d_ff=48, num_heads=4, num_kv_heads=2, head_dim=8
)
LORA = dataclasses.replace(MODEL, lora=LoraConfig(rank=4))


def test_a_token_by_hand():
    # Per layer q 32x32, k and v 32x16, o 32x32, three of 32x48; logits 32x96; two operations each.
    weights = 2 * (3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 96)
    assert token_flops(MODEL).weights == weights
    assert token_flops(MODEL).training == 3 * weights
    # Rank 4: a and b of each projection.
    sides = (32 + 32) + (32 + 16) * 2 + (32 + 32) + 3 * (32 + 48)
    adapters = 2 * 3 * 4 * sides
    assert token_flops(LORA).adapters == adapters
    # Frozen weights have no gradient of their own.
    assert token_flops(LORA).training == 2 * weights + 3 * adapters


def test_a_token_of_a_mixture_by_hand():
    mixture = dataclasses.replace(
        MODEL, num_experts=6, experts_per_token=2, shared_d_ff=10, shared_gate=True
    )
    # Two experts of three 32x48, a router 32x6; a shared expert of three 32x10 and its gate of 32.
    more = 3 * 32 * 48 + 32 * 6 + 3 * 32 * 10 + 32
    assert token_flops(mixture).weights - token_flops(MODEL).weights == 2 * 3 * more
    assert mixture.num_active_params - MODEL.num_params == 3 * more
    assert mixture.num_params - mixture.num_active_params == 3 * 4 * 3 * 32 * 48
    adapted = dataclasses.replace(mixture, lora=LORA.lora)
    more = 3 * (32 + 48) + 3 * (32 + 10)
    assert token_flops(adapted).adapters - token_flops(LORA).adapters == 2 * 3 * 4 * more


def test_latent_attention_and_dense_layers_by_hand():
    mixture = dataclasses.replace(MODEL, num_experts=6, experts_per_token=2, num_kv_heads=4)
    latent = dataclasses.replace(
        mixture,
        qkv_bias=False,
        kv_latent=10,
        q_latent=6,
        rope_dim=2,
        value_dim=5,
        first_dense_layers=1,
        dense_d_ff=20,
    )
    # q 32x6 and 6x32, latents 32x12, keys without rotation and values 10x(4*(6+5)), o 20x32.
    attention = 32 * 6 + 6 * 32 + 32 * 12 + 10 * 44 + 20 * 32
    weights = 3 * attention + 3 * 32 * 20 + 2 * (2 * 3 * 32 * 48 + 32 * 6) + 32 * 96
    assert token_flops(latent).weights == 2 * weights
    # Norms of latents, two of each layer, the last one; the embedding is the head.
    assert latent.num_active_params == weights + 3 * (6 + 10 + 2 * 32) + 32
    adapted = dataclasses.replace(latent, lora=LORA.lora)
    sides = 3 * ((32 + 6) + (6 + 32) + (32 + 12) + (10 + 44) + (20 + 32))
    sides += 3 * (32 + 20) + 2 * 2 * 3 * (32 + 48)
    assert token_flops(adapted).adapters == 2 * 4 * sides
    # A pair of tokens: keys of 8 and values of 5 for 4 heads; 2 operations.
    np.testing.assert_array_equal(
        attention_flops(latent, np.array([1, 2])), 3 * 2 * 4 * 13 * np.array([1, 3.0])
    )
    assert latent.kv_bytes_per_token(2) == 3 * 12 * 2


def test_attention_by_hand():
    # Pairs 1, 3 and 10 of causal sequences of 1, 2 and 4 tokens; 4 x 4 heads x 8 a pair, 3 layers.
    np.testing.assert_array_equal(
        attention_flops(MODEL, np.array([1, 2, 4])), 3 * 128 * np.array([1.0, 3, 10])
    )
    # A window of 2 in two layers of three: 1, 3 and 1 + 2 + 2 + 2 pairs there.
    slides = dataclasses.replace(
        MODEL, sliding_window=2, layer_pattern=("sliding", "full", "sliding")
    )
    np.testing.assert_array_equal(
        attention_flops(slides, np.array([1, 2, 4])), 128 * np.array([3.0, 9, 2 * 7 + 10])
    )


def test_heads_of_two_sizes_by_hand():
    model = dataclasses.replace(
        MODEL,
        num_layers=4,
        sliding_window=2,
        layer_pattern=("sliding", "full"),
        full_head_dim=12,
        full_kv_heads=1,
        keys_as_values=True,
    )
    # Two layers with q and o 32x32, k and v 32x16; two with q and o 32x48, k 32x12.
    heads = 2 * (2 * 32 * 32 + 2 * 32 * 16) + 2 * (2 * 32 * 48 + 32 * 12)
    weights = heads + 4 * 3 * 32 * 48 + 32 * 96
    assert token_flops(model).weights == 2 * weights
    # Biases of q, k and v, and norms.
    assert model.num_params == weights + 2 * (32 + 2 * 16) + 2 * (48 + 12) + 9 * 32
    # Four tokens: 1 + 2 + 2 + 2 pairs of 8 dimensions, 10 of 12; 4 heads, 4 operations, two layers each.
    assert attention_flops(model, np.array([4]))[0] == 4 * 4 * 2 * (7 * 8 + 10 * 12)
    # Keys and values, two layers of each kind, two bytes.
    assert model.kv_bytes_per_token(2) == 2 * 2 * 2 * (2 * 8 + 12)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "llama-3-8b", "qwen3-30b-a3b"])
def test_short_sequences_cost_six_operations_a_weight_and_token(name):
    """The rule of thumb, embeddings aside."""
    model = SHAPES[name]
    met = model.num_active_params - model.vocab_size * model.d_model
    assert training_flops(model, np.array([1]))[0] == pytest.approx(6 * met, rel=2e-3)
    assert token_flops(model).weights == pytest.approx(2 * met, rel=2e-3)


# Against the programs


@functools.cache
def traced(model: ModelConfig, tokens: int = T, chunk_tokens: int | str = "auto") -> int:
    """Operations of the products of an update in one microbatch."""
    train = TrainConfig(rows=R, row_tokens=tokens, logprob_chunk_tokens=chunk_tokens)
    actor = actor_on(mesh_of(), model=model, train=train)
    state, shape = actor.abstract_state(), PackedShape(1, 1, R, tokens)
    update = actor.update_program((SUPERVISED,))
    batches = (abstract_batch(actor, shape),)
    return matmul_flops(jax.make_jaxpr(update)(state, batches, None, actor.schedule).jaxpr)


def counted(model: ModelConfig, tokens: int = T) -> float:
    """The same by the model, when every token attends to its whole row, as rows this short are computed."""
    pairs = model.num_layers * tokens**2
    attention = 3 * 4 * model.num_heads * model.head_dim * pairs
    return R * (tokens * token_flops(model).training + attention)


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (MODEL, {"d_ff": 96}),
        (MODEL, {"num_layers": 5}),
        pytest.param(LORA, {"num_layers": 5}, marks=pytest.mark.long),
        pytest.param(MODEL, {"num_kv_heads": 1}, marks=pytest.mark.long),
        (LORA, {"lora": LoraConfig(rank=8)}),
        pytest.param(
            LORA, {"lora": LoraConfig(rank=4, targets=("q", "down"))}, marks=pytest.mark.long
        ),
    ],
    ids=["ffn", "layers", "layers below adapters", "kv heads", "rank", "targets"],
)
def test_a_change_of_the_model_changes_the_program_by_as_much(before, changes):
    """Differences tell parts apart."""
    after = dataclasses.replace(before, **changes)
    by_program, by_model = traced(after) - traced(before), counted(after) - counted(before)
    # Scores and the gate may be computed again in the backward pass; a part that were counted with the wrong
    # factor would be a third or a half away.
    assert 0.99 <= by_program / by_model <= AGAIN, by_program / by_model


def test_longer_rows_change_the_program_by_as_much():
    small = dataclasses.replace(MODEL, vocab_size=2)
    by_program = traced(small, 2 * T) - 2 * traced(small, T)
    by_model = counted(small, 2 * T) - 2 * counted(small, T)
    # Tiles of scores may be computed again in the backward pass: four products of three then become five.
    assert by_model * 0.99 <= by_program <= by_model * 7 / 6 * 1.01


def test_chunks_of_logits_are_computed_again_and_a_single_one_is_not():
    logits = R * T * 2 * MODEL.d_model * MODEL.vocab_size
    assert counted(MODEL) <= traced(MODEL) <= 1.1 * counted(MODEL)
    assert traced(MODEL, chunk_tokens=R * T // 2) - traced(MODEL) == logits


@pytest.mark.parametrize("owners", [1, 4])
@pytest.mark.parametrize(
    ("apply", "forward", "update"),
    [
        # Three products, and two for the gradient of each. Tiles compute the three again, count as full, and
        # are summed.
        (apply_experts, (1.0, 1.0), (3.0, 3.0)),
        (apply_experts_in_tiles, (1.0, 1.5), (4.0, 6.1)),
    ],
    ids=["grouped", "tiled"],
)
def test_a_pair_is_computed_by_the_owner_of_its_expert_alone(owners, apply, forward, update):
    rows, tokens, width, inner, experts, each = 4, 1024, 16, 8, 8, 2
    mesh = abstract_mesh(
        ParallelLayout.from_config(LayoutConfig(train=f"1-1-{owners}", expert=owners))
    )
    layer = expert_parallel(apply, mesh, TRAIN_RULES)
    x = jnp.zeros((rows, tokens, width))
    chosen = jnp.zeros((rows, tokens, each), jnp.int32)
    shape = (experts, width, inner)
    weights = {name: {"weight": jnp.zeros(shape)} for name in ("gate", "up")}
    weights["down"] = {"weight": jnp.zeros((experts, inner, width))}
    axes = {name: {"weight": ("experts", None, None)} for name in weights}

    def out(x, weights):
        return layer(x, chosen, jnp.ones(chosen.shape), weights, axes).sum()

    once = rows * tokens * each * 3 * 2 * width * inner
    for function, (least, most) in ((out, forward), (jax.grad(out, argnums=(0, 1)), update)):
        found = matmul_flops(jax.make_jaxpr(function)(x, weights).jaxpr)
        assert least <= found / once <= most


@pytest.mark.parametrize(
    # Rematerialised: three products, gate and up once more, and two for the gradient of each: 11 of 3. Tiles
    # are half as many again here; down is traced once more, whose result nobody reads.
    ("apply", "passes"),
    [(apply_experts, 11 / 3), (apply_experts_in_tiles, 1.5 * 12 / 3)],
)
def test_the_gradient_of_shares_computes_no_expert_once_more(apply, passes):
    """A router's gradient needs what its experts gave; it comes with the gradient of their last product."""
    tokens, width, inner, experts, each = 2048, 64, 128, 4, 2
    x, shape = jnp.zeros((1, tokens, width)), (experts, width, inner)
    weights = {name: {"weight": jnp.zeros(shape)} for name in ("gate", "up")}
    weights["down"] = {"weight": jnp.zeros((experts, inner, width))}
    chosen = jnp.zeros((1, tokens, each), jnp.int32)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, share, weights):
        return x + apply(x, chosen, share, weights)

    def update(x, share, weights):
        gradients = jax.grad(lambda *of: (layer(*of) ** 2).sum(), argnums=(0, 1, 2))
        return gradients(x, share, weights)

    found = matmul_flops(jax.make_jaxpr(update)(x, jnp.zeros(chosen.shape), weights).jaxpr)
    assert found / (tokens * each * 3 * 2 * width * inner) == pytest.approx(passes, rel=0.01)
