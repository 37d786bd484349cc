import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh import transition
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.mesh.transition import Transition

AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {"up": ("layers", "embed", "mlp"), "norm": ("layers", "embed")},
    "scale": ("head_dim",),
}
WEIGHTS = {
    "embedding": np.arange(8 * 6.0, dtype=np.float32).reshape(8, 6),
    "layers": {
        "up": np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32),
        "norm": np.arange(2 * 6.0, dtype=np.float32).reshape(2, 6),
    },
    "scale": np.arange(3.0, dtype=np.float32),
}


def plan(train: str, generate: str = "", *, dtype=jnp.float32, **shares: int):
    """Weights in their training layout, the shardings of generation, and the move between."""
    layout = ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, **shares))
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    train_shardings, generate_shardings = (
        shardings(AXES, WEIGHTS, rules, mesh) for rules in (TRAIN_RULES, GENERATE_RULES)
    )
    params = jax.device_put(WEIGHTS, train_shardings)
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), WEIGHTS)
    return (
        params,
        generate_shardings,
        Transition(shapes, train_shardings, generate_shardings, dtype),
    )


@pytest.mark.parametrize(
    ("train", "generate", "shares"),
    [
        ("1-4-2", "1-2-2-2", {}),
        ("1-4-2", "1-1-4-2", {"fsdp": 2}),
        ("2-2-2", "1-2-2-2", {"fsdp": 2}),
        ("1-2-4", "", {"context": 2}),
    ],
)
def test_values_stay_and_lie_as_generation_asks(train, generate, shares):
    params, wanted, move = plan(train, generate, **shares)
    moved = move.to_generate(params)
    jax.tree.map(np.testing.assert_array_equal, moved, WEIGHTS)
    assert jax.tree.all(
        jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), moved, wanted)
    )


def test_training_weights_survive_the_move():
    params, _, move = plan("1-4-2", "1-2-2-2", fsdp=2)
    move.to_generate(params)
    jax.tree.map(np.testing.assert_array_equal, params, WEIGHTS)


def test_generation_may_have_its_own_type():
    params, _, move = plan("1-4-2", "1-2-2-2", dtype="bfloat16")
    moved = move.to_generate(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {jnp.dtype("bfloat16")}
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), moved, WEIGHTS
    )


def test_leaves_that_lie_right_are_shared_and_only_those():
    params, _, move = plan("1-4-2", "1-2-2-2")
    moved = move.to_generate(params)
    # Norms are whole on every device in both layouts.
    assert moved["layers"]["norm"] is params["layers"]["norm"]
    assert moved["scale"] is params["scale"]
    assert moved["layers"]["up"] is not params["layers"]["up"]


def test_nothing_moves_on_one_device():
    params, _, move = plan("1-1-1")
    jax.tree.map(lambda a, b: a is b or pytest.fail("copied"), move.to_generate(params), params)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**9])
def test_buckets_change_nothing(monkeypatch, bucket_bytes):
    monkeypatch.setattr(transition, "BUCKET_BYTES", bucket_bytes)
    params, wanted, move = plan("1-4-2", "1-2-2-2", fsdp=2)
    moved = move.to_generate(params)
    jax.tree.map(np.testing.assert_array_equal, moved, WEIGHTS)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), moved, wanted)


def test_new_weights_do_not_compile_the_move_again(caplog):
    params, _, move = plan("1-4-2", "1-2-2-2", fsdp=2)
    doubled = jax.tree.map(lambda w: w + w, params)
    move.to_generate(params)
    with jax.log_compiles():
        moved = move.to_generate(doubled)
    assert not [message for message in caplog.messages if message.startswith("Compiling")]
    np.testing.assert_array_equal(moved["layers"]["up"], 2 * WEIGHTS["layers"]["up"])


def replica_groups(instruction: str) -> list[list[int]]:
    """Groups of a collective, from HLO's iota notation [groups, size]<=[dims]T(transposed dims)."""
    pattern = r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    groups, size, dims, order = re.search(pattern, instruction).groups()
    dims = [int(n) for n in dims.split(",")]
    order = [int(n) for n in order.split(",")] if order else range(len(dims))
    ids = np.arange(np.prod(dims)).reshape(dims).transpose(*order)
    return sorted(ids.reshape(int(groups), int(size)).tolist())


def test_the_compiler_writes_one_all_gather_and_nothing_else():
    """Inside the micro data-parallel groups of Figure 8; devices count from 0 here."""
    params, wanted, _ = plan("1-4-2", "1-2-2-2")
    move = jax.jit(lambda w: w, out_shardings=wanted["layers"]["up"])
    text = move.lower(params["layers"]["up"]).compile().as_text()
    collectives = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\((.*)", text)
    assert [name for name, _ in collectives] == ["all-gather"]
    assert replica_groups(collectives[0][1]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
