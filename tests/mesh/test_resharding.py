import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import of_extension
from jax.sharding import PartitionSpec as P

from jaxrl.errors import UserError
from jaxrl.mesh import rules
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shardings
from jaxrl.mesh.sharding_strategies import HYBRID, VANILLA, ShardingStrategy
from jaxrl.quantized import StoredType

collectives = of_extension("jaxrl_planner.compiled.traffic:collectives")
read_topology = of_extension("jaxrl_planner.hardware.cluster:read_topology")
of_resharding = of_extension("jaxrl_planner.resharding_costs:of_resharding")

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


def plan(
    train: str,
    generate: str = "",
    *,
    grouping: ShardingStrategy = HYBRID,
    dtype=jnp.float32,
    donate: bool = False,
    bucket_bytes: int | None = None,
    listed: bool = False,
    **shares: int,
):
    """Weights in their training layout, the shardings of generation, and the move between.

    `listed` asks for lists of layers in generation, as on a GPU.
    """
    layout = ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, **shares))
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices], grouping.axes)
    train_shardings, generate_shardings = (
        shardings(AXES, WEIGHTS, rules, mesh) for rules in (grouping.train, grouping.generate)
    )
    if listed:
        with mock.patch.object(rules, "lists_layers", lambda mesh: True):
            generate_shardings = rules.generation_shardings(AXES, WEIGHTS, mesh)
    params = jax.device_put(WEIGHTS, train_shardings)
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), WEIGHTS)
    move = Resharding(
        shapes,
        train_shardings,
        generate_shardings,
        dtype,
        donate=donate,
        bucket_bytes=bucket_bytes,
    )
    return params, generate_shardings, move


def bytes_per_device() -> int:
    """Of the arrays that lie on all eight devices."""
    spread = (a for a in jax.live_arrays() if len(a.sharding.device_set) == 8)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in spread)


@pytest.mark.parametrize(
    ("train", "generate", "shares"),
    [
        ("1-4-2", "1-2-2-2", {}),
        ("1-4-2", "1-1-4-2", {"fsdp": 2}),
        ("2-2-2", "1-2-2-2", {"fsdp": 2}),
        ("1-2-4", "", {"context": 2}),
        # More tensor shards in generation than in training.
        ("1-2-4", "1-4-1-2", {"fsdp": 2}),
        ("2-2-2", "1-4-2-1", {"fsdp": 2}),
    ],
)
def test_values_stay_and_lie_as_generation_asks(train, generate, shares):
    params, wanted, move = plan(train, generate, **shares)
    moved = move.to_generate(params)
    jax.tree.map(np.testing.assert_array_equal, moved, WEIGHTS)
    assert jax.tree.all(
        jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), moved, wanted)
    )


@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
@pytest.mark.parametrize(("p_g", "layers"), [(1, 13), (2, 14)])
def test_layers_that_make_stages_equal_stay_in_training(p_g, layers, bucket_bytes):
    """Four stages of four layers, of which the last two or three are zeros."""
    train = LayoutConfig(train="4-2-1", generate=f"{p_g}-2-{4 // p_g}-1")
    layout = ParallelLayout.from_config(train)
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    axes, rng = {"up": ("layers", "embed", "mlp")}, np.random.default_rng(0)
    weights = rng.normal(size=(16, 6, 8)).astype(np.float32)
    weights[layers:] = 0
    before, after = (jax.ShapeDtypeStruct((n, 6, 8), np.float32) for n in (16, layers))
    where = shardings(axes, {"up": before}, TRAIN_RULES, mesh)
    wanted = shardings(axes, {"up": after}, GENERATE_RULES, mesh)
    types = {"up": StoredType(jnp.dtype("float32"))}
    ends = ({"up": before}, where, wanted, types)
    options = {"bucket_bytes": bucket_bytes, "donate": True}
    move = Resharding(*ends, generate_shapes={"up": after}, **options)
    moved = move.to_generate(jax.device_put({"up": weights}, where))
    np.testing.assert_array_equal(moved["up"], weights[:layers])
    assert moved["up"].sharding.is_equivalent_to(wanted["up"], 3)
    again = move.to_train(moved)["up"]
    np.testing.assert_array_equal(again, weights)
    assert again.sharding.is_equivalent_to(where["up"], 3)


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


# One slice of one leaf, some of both, one bucket for all.
@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_change_nothing(bucket_bytes, dtype):
    params, wanted, move = plan("1-4-2", "1-2-2-2", bucket_bytes=bucket_bytes, dtype=dtype)
    moved = move.to_generate(params)
    jax.tree.map(lambda a, w: np.testing.assert_array_equal(a, w.astype(dtype)), moved, WEIGHTS)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), moved, wanted)


def test_leaves_larger_than_a_bucket_move_in_slices():
    _, _, move = plan("1-4-2", "1-2-2-2", bucket_bytes=200)
    # "up" takes 96 + 192 bytes a device, "embedding" 48 + 96: two slices of one, all of the other.
    assert [(b.indices, b.num_slices) for b in move.buckets] == [((2,), 2), ((0,), 1)]


def test_a_leaf_without_a_whole_dimension_moves_whole():
    _, _, move = plan("2-2-2", "1-1-4-2", fsdp=2, bucket_bytes=1)
    up = next(b for b in move.buckets if 2 in b.indices)
    assert up.weights[0].whole_dim is None
    assert up.num_slices == 1


@pytest.mark.parametrize(
    ("train", "generate", "shares", "grouping"),
    [
        ("1-4-2", "1-2-2-2", {}, HYBRID),
        ("2-2-2", "1-2-2-2", {"fsdp": 2}, HYBRID),
        ("1-4-2", "1-2-2-2", {}, VANILLA),
    ],
)
def test_there_and_back_is_the_same_bit_for_bit(train, generate, shares, grouping):
    params, wanted, move = plan(
        train, generate, grouping=grouping, donate=True, bucket_bytes=200, **shares
    )
    placed = jax.tree.map(lambda leaf: leaf.sharding, params)
    generating = move.to_generate(params)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), generating, wanted)
    training = move.to_train(generating)
    jax.tree.map(np.testing.assert_array_equal, training, WEIGHTS)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), training, placed)


@pytest.mark.parametrize("bucket_bytes", [1, 300, None])
@pytest.mark.parametrize(
    ("train", "generate", "shares"),
    [
        ("1-4-2", "1-2-2-2", {}),
        ("1-4-2", "1-1-4-2", {"fsdp": 2}),
        # Stages split the layers, so that these cannot be slices.
        ("2-2-2", "1-2-2-2", {"fsdp": 2}),
        ("1-2-4", "1-4-1-2", {"fsdp": 2}),
    ],
)
def test_a_list_has_the_layers_of_the_stack(train, generate, shares, bucket_bytes):
    """Bit for bit, where generation wants them, there and back; the other copy is given up."""
    options = {"listed": True, "donate": True, "bucket_bytes": bucket_bytes}
    params, wanted, move = plan(train, generate, **options, **shares)
    placed = jax.tree.map(lambda leaf: leaf.sharding, params)
    moved = move.to_generate(params)
    assert params["layers"]["up"].is_deleted() and params["layers"]["norm"].is_deleted()
    apart = WEIGHTS | {"layers": {name: [*x] for name, x in WEIGHTS["layers"].items()}}
    jax.tree.map(np.testing.assert_array_equal, moved, apart)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), moved, wanted)
    assert wanted["layers"]["norm"][1].spec == P(None)
    again = move.to_train(moved)
    assert moved["layers"]["up"][0].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, again, WEIGHTS)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), again, placed)


def test_no_program_holds_a_stack_beside_its_layers():
    """Of four layers of [256, 512] over t = 4, two to a group: a layer has 256 KiB a device."""
    layout = ParallelLayout.from_config(LayoutConfig(train="1-4-2", generate="1-2-2-2"))
    mesh = build_mesh(layout, jax.devices()[:8])
    axes, layer = {"up": ("layers", "embed", "mlp")}, 256 * 512 // 2 * 4
    shapes = {"up": jax.ShapeDtypeStruct((4, 256, 512), jnp.float32)}
    train = shardings(axes, shapes, TRAIN_RULES, mesh)
    with mock.patch.object(rules, "lists_layers", lambda mesh: True):
        generate = rules.generation_shardings(axes, shapes, mesh)
    move = Resharding(shapes, train, generate, jnp.float32, donate=True, bucket_bytes=1)
    (bucket,) = move.buckets
    assert bucket.num_slices == 4
    memory = bucket.gather_program.lower(*bucket.gather_arguments()).compile().memory_analysis()
    # The layer, and the count of those that are done; beside them the layer as it is gathered.
    assert memory.output_size_in_bytes < layer + 100
    assert memory.temp_size_in_bytes < 2 * layer
    # On the way back all that is beside the layers is what training gets.
    back = bucket.slice_program.lower(*bucket.slice_arguments()).compile().memory_analysis()
    assert back.temp_size_in_bytes <= back.output_size_in_bytes == 4 * layer // 2


def test_each_phase_gives_its_copy_up():
    params, _, move = plan("1-4-2", "1-2-2-2", donate=True)
    generating = move.to_generate(params)
    shared = {"norm", "scale"}
    deleted = {
        jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-1]: leaf.is_deleted()
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert deleted == {name: name not in shared for name in deleted}
    move.to_train(generating)
    assert generating["layers"]["up"].is_deleted()
    assert not generating["layers"]["norm"].is_deleted()


def test_a_device_holds_one_copy_and_no_more():
    others = bytes_per_device()
    params, _, move = plan("1-4-2", "1-2-2-2", donate=True)
    generating = move.to_generate(params)
    # Half of what tensor parallelism splits, all of the rest.
    copy = sum(w.generate_bytes for w in move.weights)
    assert copy == (8 * 6 // 2 + 2 * 6 * 8 // 2 + 2 * 6 + 3) * 4
    assert bytes_per_device() - others == copy
    training = move.to_train(generating)
    assert bytes_per_device() - others == sum(w.train_bytes for w in move.weights)
    del training


def test_two_types_cannot_share_one_copy():
    with pytest.raises(UserError, match=r"float32 cannot be given up .* bfloat16.*use one type"):
        plan("1-4-2", "1-2-2-2", dtype="bfloat16", donate=True)


@pytest.mark.parametrize("bucket_bytes", [1, 200, 300, 10**9])
def test_the_peak_is_a_bucket_above_the_generation_copy(bucket_bytes):
    _, _, move = plan("1-4-2", "1-2-2-2", donate=True, bucket_bytes=bucket_bytes)
    copy = sum(w.generate_bytes for w in move.weights)
    # "up" has a training shard of 96 bytes and comes first, "embedding" one of 48 bytes.
    own = {1: (144, 24), 200: (144, 96), 300: (192, 96), 10**9: (288,)}[bucket_bytes]
    assert tuple(b.temporary_bytes for b in move.buckets) == own
    expected = {
        1: max(96 + 144 - 48, 48 + 24),
        200: max(96 + 144 - 48, 48 + 96),
        300: max(96 + 192 - 48, 48 + 96),
        10**9: 96 + 48 + 288,
    }
    assert move.peak_bytes() == copy + expected[bucket_bytes]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_new_weights_do_not_compile_the_move_again(caplog, bucket_bytes, listed):
    options = {"bucket_bytes": bucket_bytes, "listed": listed}
    params, _, move = plan("1-4-2", "1-2-2-2", fsdp=2, **options)
    doubled = jax.tree.map(lambda w: w + w, params)
    move.to_generate(params)
    with jax.log_compiles():
        moved = move.to_generate(doubled)
    assert not [message for message in caplog.messages if message.startswith("Compiling")]
    np.testing.assert_array_equal(np.stack(moved["layers"]["up"]), 2 * WEIGHTS["layers"]["up"])


def test_the_compiler_writes_one_all_gather_and_nothing_else():
    """Inside the micro data-parallel groups of Figure 8; devices count from 0 here."""
    _, _, move = plan("1-4-2", "1-2-2-2")
    (bucket,) = move.buckets
    compiled = bucket.gather_program.lower(*bucket.gather_arguments()).compile()
    found = collectives(compiled.as_text(), 8)
    assert {c.kind for c in found} == {"all-gather"}
    assert {c.groups for c in found} == {((0, 1), (2, 3), (4, 5), (6, 7))}


def test_the_way_back_has_no_collective():
    _, _, move = plan("2-2-2", "1-1-4-2", fsdp=2, donate=True)
    texts = [b.slice_program.lower(*b.slice_arguments()).compile().as_text() for b in move.buckets]
    assert [collectives(text, 8) for text in texts] == [[] for _ in move.buckets]


@pytest.mark.tpu
def test_the_narrower_type_travels():
    """XLA's CPU backend has no collectives of bfloat16, so this is seen on a TPU's program only."""
    layout = ParallelLayout.from_config(LayoutConfig(train="1-4-2", generate="1-2-2-2"))
    mesh = build_mesh(layout, read_topology("v5e:2x4").devices)
    shapes = {"up": jax.ShapeDtypeStruct((2, 256, 1024), jnp.float32)}
    train, generate = (
        shardings({"up": ("layers", "embed", "mlp")}, shapes, rules, mesh)
        for rules in (TRAIN_RULES, GENERATE_RULES)
    )
    (bucket,) = Resharding(shapes, train, generate, jnp.bfloat16).buckets
    compiled = bucket.gather_program.lower(*bucket.gather_arguments()).compile()
    (gather,) = collectives(compiled.as_text(), 8)
    assert gather.result_bytes == 2 * 256 * 512 * 2


# In 8 bits

PLAIN = StoredType(np.dtype("float16"))
IN_8_BITS = {
    "embedding": PLAIN,
    "layers": {"up": StoredType(np.dtype("int8"), (1,)), "norm": PLAIN},
    "scale": PLAIN,
}


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**9])
@pytest.mark.parametrize(
    ("train", "generate", "shares"),
    [
        ("1-4-2", "1-2-2-2", {}),
        ("1-4-2", "1-2-2-2", {"fsdp": 2}),
        ("2-2-2", "2-1-2-2", {}),
        ("2-2-2", "1-2-2-2", {"fsdp": 2}),
    ],
)
def test_8_bits_are_the_same_in_every_layout_and_bucket(train, generate, shares, bucket_bytes):
    options = {"dtype": IN_8_BITS, "bucket_bytes": bucket_bytes, **shares}
    params, wanted, move = plan(train, generate, **options)
    moved = move.to_generate(params)
    if generate[0] == "1":
        listed = plan(train, generate, **options, listed=True)[2].to_generate(params)["layers"]
        for i, up in enumerate(listed["up"]):
            stack = moved["layers"]["up"]
            np.testing.assert_array_equal(up.values, stack.values[i])
            np.testing.assert_array_equal(up.scale, stack.scale[i])
    up = WEIGHTS["layers"]["up"]
    scale = np.abs(up).max(1, keepdims=True) * np.float32(1 / 127)
    np.testing.assert_array_equal(moved["layers"]["up"].values, np.rint(up / scale))
    np.testing.assert_array_equal(moved["layers"]["up"].scale, scale)
    np.testing.assert_array_equal(moved["embedding"], WEIGHTS["embedding"].astype(np.float16))
    where = wanted["layers"]["up"]
    assert moved["layers"]["up"].values.sharding.is_equivalent_to(where, 3)
    # The training copy stays as it is.
    jax.tree.map(np.testing.assert_array_equal, params, WEIGHTS)


def test_a_leaf_is_not_cut_where_entries_share_a_scale():
    """With stages over the layers, only the model width is whole, over which the largest is taken."""
    for dtype, dim in ((jnp.float32, 1), (IN_8_BITS, None)):
        _, _, move = plan("2-2-2", "2-1-2-2", dtype=dtype)
        (up,) = (w for w in move.weights if w.shape == (2, 6, 8))
        assert up.whole_dim == dim


def test_weights_in_8_bits_cannot_replace_the_training_copy():
    with pytest.raises(UserError, match=r"float32 cannot be given up .* type float16"):
        plan("1-4-2", dtype=IN_8_BITS, donate=True)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_8_bits_travel_and_a_scale_for_each_output(fsdp):
    layout = ParallelLayout.from_config(LayoutConfig(train="1-4-2", generate="1-2-2-2", fsdp=fsdp))
    mesh = build_mesh(layout, jax.devices()[:8])
    shapes = {"up": jax.ShapeDtypeStruct((2, 256, 1024), jnp.float32)}
    train, generate = (
        shardings({"up": ("layers", "embed", "mlp")}, shapes, rules, mesh)
        for rules in (TRAIN_RULES, GENERATE_RULES)
    )
    received = {}
    for name in ("float32", "float16", "int8"):
        types = {"up": StoredType(np.dtype(name), (1,) if name == "int8" else ())}
        move = Resharding(shapes, train, generate, types)
        received[name] = of_resharding(move).costs.received
    lacking = 2 * 256 * 1024 // 2 * (1 - 1 / (2 * fsdp))
    assert received["float32"] == 4 * lacking
    assert received["float16"] == 2 * lacking
    # Half of the scales are gathered; with fsdp their largest entries are compared first, twice a scale.
    scales = 4 * 2 * 1024
    assert 0 < received["int8"] - lacking <= scales // 4 * (1 if fsdp == 1 else 3)
