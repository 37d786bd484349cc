from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import of_extension
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh import rules
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.handover import Handover, move_arrays, move_program, route_of
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.quantized import StoredType

collectives = of_extension("jaxrl_planner.compiled.traffic:collectives")

AXES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "norm": ("embed",)}
WEIGHTS = {
    "up": np.random.default_rng(0).normal(size=(4, 8, 24)).astype(np.float32),
    "down": np.random.default_rng(1).normal(size=(4, 24, 8)).astype(np.float32),
    "norm": np.arange(8, dtype=np.float32),
}


def mesh_of(first: int, *sizes: int) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), tuple("abc"[: len(sizes)]))


def layout_mesh(first: int, train: str, fsdp: int = 1) -> Mesh:
    layout = ParallelLayout.from_config(LayoutConfig(train=train, fsdp=fsdp))
    return build_mesh(layout, jax.devices()[first : first + layout.num_devices])


def plan(learner: Mesh, sampler: Mesh, dtype=jnp.float32, **options):
    """Weights on the learner's devices, their shardings on the sampler's, and the hand-over."""
    train = shardings(AXES, WEIGHTS, TRAIN_RULES, learner)
    generate = rules.generation_shardings(AXES, WEIGHTS, sampler)
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), WEIGHTS)
    move = Handover(shapes, train, generate, dtype, **options)
    return jax.device_put(WEIGHTS, train), generate, move


def test_by_hand_four_shards_to_two_replicas_of_two():
    source, target = mesh_of(0, 4), mesh_of(4, 2, 2)
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(source, P("a")))
    where = NamedSharding(target, P("b"))
    route = route_of(x.shape, x.sharding, where)
    # A cell is a source shard. Two rounds of four: devices 4 and 6 need shards 0 and 1, 5 and 7 need 2 and 3.
    assert (route.source_cells, route.target_cells) == ((1,), (2,))
    first, second = (list(pairs) for pairs in route.rounds)
    assert sorted(first + second) == [
        (0, 4),
        (0, 6),
        (1, 4),
        (1, 6),
        (2, 5),
        (2, 7),
        (3, 5),
        (3, 7),
    ]
    assert [len(set(s for s, _ in pairs)) for pairs in (first, second)] == [4, 4]
    (moved,) = move_arrays([x], [where])
    shards = {shard.device.id: shard.data.tolist() for shard in moved.addressable_shards}
    assert shards == {4: [0, 1, 2, 3], 6: [0, 1, 2, 3], 5: [4, 5, 6, 7], 7: [4, 5, 6, 7]}


def test_replicas_send_about_as_much():
    source, target = mesh_of(0, 2, 2), mesh_of(4, 4)
    route = route_of((8,), NamedSharding(source, P()), NamedSharding(target, P("a")))
    (only,) = route.rounds
    assert sorted(sender for sender, _ in only) == [0, 1, 2, 3]


def test_devices_that_hold_a_cell_send_it_to_themselves():
    """Roles on the same devices with other layouts."""
    source, target = mesh_of(0, 4), mesh_of(0, 2, 2)
    x = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(source, P("a")))
    route = route_of(x.shape, x.sharding, NamedSharding(target, P("a")))
    pairs = [pair for pairs in route.rounds for pair in pairs]
    assert sorted(pairs) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3)]
    (moved,) = move_arrays([x], [NamedSharding(target, P("a"))])
    np.testing.assert_array_equal(moved, x)


SPECS = st.permutations(["a", "b", None, None]).map(lambda names: P(*names[:2]))


@settings(max_examples=12)
@given(
    st.sampled_from([(2, 2), (4, 1), (1, 3), (2, 1)]),
    st.sampled_from([(2, 2), (1, 2), (3, 1), (1, 1)]),
    SPECS,
    SPECS,
)
def test_any_two_shardings(sizes, others, spec, wanted):
    source, target = mesh_of(0, *sizes), mesh_of(4, *others)
    x = np.arange(12 * 24, dtype=np.int32).reshape(12, 24)
    before = jax.device_put(x, NamedSharding(source, spec))
    where = NamedSharding(target, wanted)
    (after,) = move_arrays([before], [where])
    assert after.sharding == where
    np.testing.assert_array_equal(after, x)
    # Nobody sends or receives twice in a round, and a target device receives its shard once.
    route = route_of(x.shape, before.sharding, where)
    received = np.zeros(route.mesh.size)
    for pairs in route.rounds:
        senders, receivers = map(list, zip(*pairs, strict=True))
        assert len(set(senders)) == len(set(receivers)) == len(pairs)
        received[receivers] += 1
    cells = np.prod(route.target_cells)
    assert received.tolist() == [0] * source.size + [cells] * target.size
    most = max(cells, -(-cells * target.size // source.size))
    assert len(route.rounds) == most


@pytest.mark.parametrize(
    ("learner", "fsdp", "sampler", "bucket_bytes"),
    [("1-4-1", 1, "1-2-2", None), ("2-1-2", 2, "1-4-1", 300), ("1-2-2", 2, "2-1-1", 1)],
)
@pytest.mark.parametrize("listed", [False, True])
def test_weights_lie_as_the_sampler_asks(learner, fsdp, sampler, bucket_bytes, listed):
    """With `listed` as on GPUs: a list of layers in place of a stack."""
    listed &= sampler[0] == "1"
    meshes = layout_mesh(0, learner, fsdp), layout_mesh(4, sampler)
    with mock.patch.object(rules, "lists_layers", lambda mesh: listed):
        params, wanted, move = plan(*meshes, bucket_bytes=bucket_bytes)
    expected = {name: [*x] if listed and x.ndim > 1 else x for name, x in WEIGHTS.items()}
    for moved in (move.by_shards(params), move.to_generate(params)):
        jax.tree.map(np.testing.assert_array_equal, moved, expected)
        jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), moved, wanted)
    jax.tree.map(np.testing.assert_array_equal, params, WEIGHTS)
    if bucket_bytes == 1:
        # All leaves in slices of one entry along one dimension.
        assert all(bucket.num_slices > 1 for bucket in move.buckets)


@pytest.mark.parametrize("bucket_bytes", [None, 300, 1])
@pytest.mark.parametrize("sampler", ["1-2-2", "3-1-1"])
def test_layers_that_make_stages_equal_stay_behind(sampler, bucket_bytes):
    """Two stages of two layers, the last of which is none."""
    learner, sampler = layout_mesh(0, "2-1-2", 2), layout_mesh(4, sampler)
    kept = {name: x if name == "norm" else x[:3] for name, x in WEIGHTS.items()}
    before, after = (
        jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree)
        for tree in (WEIGHTS, kept)
    )
    where, wanted = (
        shardings(AXES, *each)
        for each in ((before, TRAIN_RULES, learner), (after, GENERATE_RULES, sampler))
    )
    options = {"generate_shapes": after, "bucket_bytes": bucket_bytes}
    move = Handover(before, where, wanted, jnp.float32, **options)
    params = jax.device_put(WEIGHTS, where)
    for moved in (move.by_shards(params), move.to_generate(params)):
        jax.tree.map(np.testing.assert_array_equal, moved, kept)
        jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), moved, wanted)


IN_8_BITS = {
    "up": StoredType(np.dtype("int8"), (1,)),
    "down": StoredType(np.dtype("int8"), (1,)),
    "norm": StoredType(np.dtype("float32")),
}


def test_8_bits_are_rounded_before_they_travel():
    """The learner splits the inputs of an output, which share a scale."""
    learner, sampler = layout_mesh(0, "1-2-2", fsdp=2), layout_mesh(4, "1-4-1")
    params, _, move = plan(learner, sampler, IN_8_BITS, bucket_bytes=200)
    moved = move.by_shards(params)
    for name in ("up", "down"):
        x = WEIGHTS[name]
        scale = np.abs(x).max(1, keepdims=True) * np.float32(1 / 127)
        np.testing.assert_array_equal(moved[name].values, np.rint(x / scale))
        np.testing.assert_array_equal(moved[name].scale, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_bytes_are_those_of_the_program(dtype):
    learner, sampler = layout_mesh(0, "1-2-2", fsdp=2), layout_mesh(4, "1-2-2")
    _, _, move = plan(learner, sampler, IN_8_BITS if dtype == "int8" else dtype)
    # Half of up and down, all of norm; scales of half of up's outputs and of all of down's.
    values = 4 * 8 * 24 // 2
    by_hand = {
        "float32": 4 * (2 * values + 8),
        "bfloat16": 2 * (2 * values + 8),
        "int8": 2 * values + 4 * 8 + 4 * (4 * 12 + 4 * 8),
    }
    assert move.received_bytes == by_hand[dtype]
    received = np.zeros(8)
    for bucket in move.buckets:
        text = move_program.lower(*bucket.move_arguments()).compile().as_text() or ""
        received += sum(bucket.num_slices * c.received(8) for c in collectives(text, 8))
    assert received.tolist() == [0] * 4 + [by_hand[dtype]] * 4
