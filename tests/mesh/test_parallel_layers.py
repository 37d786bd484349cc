"""Attention and experts on a mesh give what they give on one device, whatever is split over what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from meshes import mesh_of

from jaxrl.mesh import ring
from jaxrl.mesh.parallel_layers import attention_parallel, delta_parallel, expert_parallel
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shards_of
from jaxrl.mesh.token_exchange import exchange_pays
from jaxrl.models.attention import attention
from jaxrl.models.attention_kind import AttentionKind
from jaxrl.models.delta_net import DeltaInputs, delta_of_rows
from jaxrl.models.experts import (
    apply_all_experts,
    apply_experts,
    apply_experts_in_tiles,
    experts_for,
)

B, T, H, D, F, E, A = 8, 8, 4, 8, 8, 4, 2


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def value_and_gradients(function, *args):
    """The result, and gradients of a sum that weighs its entries differently."""

    def loss(*args):
        out = function(*args)
        return jnp.sum(out * normal(*out.shape, seed=9)), out

    numbers = tuple(i for i, a in enumerate(args) if np.issubdtype(a.dtype, np.floating))
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=numbers, has_aux=True))(*args)
    return out, gradients


# Heads are split as far as they go; key-value heads that are too few are shared.
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("rules", "layout"),
    [
        (TRAIN_RULES, {"train": "1-4-2", "generate": "1-2-2-2", "fsdp": 2}),
        (TRAIN_RULES, {"train": "1-1-8", "context": 8}),
        (TRAIN_RULES, {"train": "1-2-4", "context": 2}),
        (TRAIN_RULES, {"train": "1-4-2", "context": 2}),
        (GENERATE_RULES, {"train": "1-4-2", "generate": "1-2-2-2", "context": 2}),
        (GENERATE_RULES, {"train": "1-8-1"}),
    ],
    ids=lambda v: ",".join(map(str, v.values())) if "train" in v else "",
)
def test_attention_on_a_mesh(rules, layout, num_kv_heads):
    q, k, v = normal(B, T, 8, H), *(normal(B, T, num_kv_heads, H, seed=s) for s in (1, 2))
    # Packed rows, some with padding at the end.
    segments = np.sort(np.random.default_rng(0).integers(1, 4, (B, T)), axis=1).astype(np.int32)
    segments[::2, -2:] = 0
    mesh = mesh_of(**layout)
    tensor = shards_of("heads", rules, mesh)
    heads = (8 // tensor, max(1, num_kv_heads // tensor))
    exchange = ring.pick_split(shards_of("length", rules, mesh), *heads, whole_rows=True)
    assert exchange.ring == 1
    on_mesh = attention_parallel(attention, mesh, rules, exchange)
    sinks = [normal(8, seed=3)] if num_kv_heads == 2 else []

    def run(attend):
        return value_and_gradients(
            lambda q, k, v, *sinks: attend(q, k, v, segments, AttentionKind(0, 0.0, None, *sinks)),
            *(q, k, v, *sinks),
        )

    assert_close(run(on_mesh), run(attention))


@pytest.mark.parametrize(
    "split",
    [
        (2, 2),
        pytest.param((2, 1), marks=pytest.mark.long),
        pytest.param((1, 4), marks=pytest.mark.long),
    ],
)
def test_delta_layers_exchange_heads_whatever_way_attention_takes(split):
    """Two segments and padding, in the order of tokens that a ring needs too."""
    split, T, N, U = ring.ContextSplit(*split), 24, 8, 2
    qkv = normal(B, T, N, 4), normal(B, T, N, 4, seed=1), normal(B, T, N, U, 3, seed=2)
    taps = tuple(normal(*x.shape[2:], 3, seed=4) for x in qkv)
    decay, step = -np.abs(normal(B, T, N, U, seed=5)), np.abs(np.sin(normal(B, T, N, U, seed=6)))
    segments = np.repeat(np.array([[1, 2, 0]], np.int32), (10, 11, 3), axis=1).repeat(B, 0)
    mesh = mesh_of("1-2-4", context=split.size)
    shared = delta_parallel(delta_of_rows, mesh, TRAIN_RULES, split)
    order = functools.partial(ring.spread, split=split, mesh=mesh, rules=TRAIN_RULES)

    def run(recur, order, back):
        def out(*leaves):
            *of_tokens, taps = leaves[:3], *leaves[3:5], leaves[5:]
            (qkv, decay, step), ids = jax.tree.map(order, (of_tokens, jnp.asarray(segments)))
            live = (ids > 0)[..., None, None].astype(jnp.float32)
            inputs = DeltaInputs(qkv, taps, decay * live, step * live, ids > 0)
            return back(recur(inputs, None, ids)[0])

        return value_and_gradients(out, *qkv, decay, step, *taps)

    back = functools.partial(ring.unspread, split=split, mesh=mesh, rules=TRAIN_RULES)
    alone = run(delta_of_rows, lambda x: x, lambda x: x)
    assert_close(run(shared, order, back), alone, 1e-6)


def expert_weights(num_experts=E):
    """Random weights with biases and adapters, and their logical axes."""
    weights = {
        "gate": {
            "weight": normal(num_experts, D, F),
            "lora_a": normal(num_experts, D, 2),
            "lora_b": normal(num_experts, 2, F),
        },
        "up": {"weight": normal(num_experts, D, F, seed=1), "bias": normal(num_experts, F, seed=7)},
        "down": {
            "weight": normal(num_experts, F, D, seed=2),
            "bias": normal(num_experts, D, seed=8),
            "lora_a": normal(num_experts, F, 2, seed=3),
            "lora_b": normal(num_experts, 2, D, seed=4),
        },
    }
    inner, outer = (("experts", "embed", "mlp"), ("experts", "mlp", "embed"))
    axes = {
        "gate": {
            "weight": inner,
            "lora_a": ("experts", "embed", None),
            "lora_b": ("experts", None, "mlp"),
        },
        "up": {"weight": inner, "bias": ("experts", "mlp")},
        "down": {
            "weight": outer,
            "bias": ("experts", "embed"),
            "lora_a": ("experts", "mlp", None),
            "lora_b": ("experts", None, "embed"),
        },
    }
    return weights, axes


def runs_experts(expert, weights, axes):
    """A function that runs a layer forward and backward with these experts of each token."""
    x, share = normal(B, T, D), np.abs(normal(*expert.shape, seed=5))
    leaves, structure = jax.tree.flatten(weights)

    def run(layer):
        return value_and_gradients(
            lambda x, share, *leaves: layer(
                x, expert, share, structure.unflatten(leaves), axes, "clamped_silu"
            ),
            x,
            share,
            *leaves,
        )

    return run


@pytest.mark.parametrize(
    ("rules", "layout"),
    [
        (TRAIN_RULES, {"train": "1-1-4", "expert": 4}),
        pytest.param(
            TRAIN_RULES, {"train": "1-2-4", "expert": 2, "fsdp": 2}, marks=pytest.mark.long
        ),
        (TRAIN_RULES, {"train": "1-2-4", "expert": 2, "context": 2}),
        pytest.param(TRAIN_RULES, {"train": "1-4-2"}, marks=pytest.mark.long),
        # Two experts for each of two devices, which share the width of both.
        (TRAIN_RULES, {"train": "1-4-2", "generate": "1-2-2-2", "expert": 2}),
        # Four experts cannot lie on eight devices.
        pytest.param(TRAIN_RULES, {"train": "1-8-1"}, marks=pytest.mark.long),
        (GENERATE_RULES, {"train": "1-4-2", "generate": "1-2-2-2", "expert": 2}),
    ],
    ids=lambda v: ",".join(map(str, v.values())) if "train" in v else "",
)
def test_experts_on_a_mesh(rules, layout):
    weights, axes = expert_weights()
    expert = np.random.default_rng(6).integers(0, E + 1, (B, T, A)).astype(np.int32)
    run = runs_experts(expert, weights, axes)
    for apply in (apply_experts, apply_experts_in_tiles, apply_all_experts):
        found = run(expert_parallel(apply, mesh_of(**layout), rules))
        assert_close(found, run(apply_experts), scale=1)


def gathering_move(operand, output, input_offsets, send_sizes, output_offsets, _, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA has not on CPU, by gathering everything."""
    me = jax.lax.axis_index(axis_name)
    everything = [
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    ]
    row = jnp.arange(len(output))
    for rows, begins, sizes, places in zip(*everything, strict=True):
        within = row - places[me]
        is_sent = (within >= 0) & (within < sizes[me])
        moved = rows.at[begins[me] + within].get(mode="clip")
        output = jnp.where(is_sent.reshape(-1, *(1,) * (output.ndim - 1)), moved, output)
    return output


@pytest.mark.parametrize(
    "layout",
    [
        {"train": "1-1-8", "expert": 8},
        pytest.param({"train": "1-2-4", "expert": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("chosen", ["at random", "all the same", "none"])
def test_tokens_are_sent_to_the_devices_of_their_experts_alone(layout, chosen):
    """Two of 16 experts: over four devices 45% of them are on a device with one, over eight 24%."""
    weights, axes = expert_weights(16)
    number = {"at random": np.random.default_rng(6).integers(0, 17, (B, T, A)), "all the same": 3}
    expert = np.broadcast_to(number.get(chosen, 16), (B, T, A)).astype(np.int32)
    run, mesh = runs_experts(expert, weights, axes), mesh_of(**layout)
    moved = []

    def move(*args, **named):
        moved.append(args[0].shape)
        return gathering_move(*args, **named)

    layer = expert_parallel(apply_experts_in_tiles, mesh, TRAIN_RULES, move=move)
    assert_close(run(layer), run(apply_experts), scale=1)
    assert moved


@pytest.mark.parametrize(
    ("devices", "num_experts", "per_token", "pays"),
    # The expected number of receivers: 3.0 of 7, 2.1 of 3, 4.6 of 7, 7.0 of 31.
    [(8, 32, 4, True), (4, 32, 4, False), (8, 256, 8, False), (32, 256, 8, True)],
)
def test_an_exchange_pays_where_it_sends_half_of_the_bytes(devices, num_experts, per_token, pays):
    assert exchange_pays(devices, num_experts, per_token) == pays


@pytest.mark.parametrize(
    "layout",
    [
        {"train": "1-1-4", "expert": 4},
        {"train": "1-2-2", "expert": 2},
        pytest.param({"train": "1-8-1"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_experts_in_order_are_equal_to_the_last_bit(layout):
    weights, axes = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.bfloat16) if isinstance(x, np.ndarray) else x,
        expert_weights(8),
    )
    x, share = jnp.asarray(normal(B, T, D), jnp.bfloat16), np.abs(normal(B, T, 4, seed=5))
    expert = np.random.default_rng(6).integers(0, 9, (B, T, 4)).astype(np.int32)
    apply = experts_for(None, jnp.bfloat16, equal_tiles=True)

    def run(mesh):
        layer = expert_parallel(apply, mesh, GENERATE_RULES, in_order=True)
        return np.asarray(
            jax.jit(lambda *a: layer(*a, axes))(x, expert, share, weights).astype(jnp.float32)
        )

    np.testing.assert_array_equal(run(mesh_of(**layout)), run(mesh_of()))
