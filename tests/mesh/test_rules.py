import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from jaxrl.errors import UserError
from jaxrl.mesh import rules
from jaxrl.mesh.devices import abstract_mesh, build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.rules import (
    GENERATE_RULES,
    TRAIN_RULES,
    check_divides,
    constraint,
    partition_spec,
    parts_of,
    shardings,
    shards_of,
)

RULE_TABLES = (TRAIN_RULES, GENERATE_RULES)
# Weights as a decoder names them: shape and axes. Every size divides over up to eight devices but kv_heads.
WEIGHTS = {
    "embedding": ((16, 8), ("vocab", "embed")),
    "q": ((8, 8, 8, 2), ("layers", "embed", "heads", "head_dim")),
    "k": ((8, 8, 2, 2), ("layers", "embed", "kv_heads", "head_dim")),
    "mlp": ((8, 8, 16), ("layers", "embed", "mlp")),
    "norm": ((8, 8), ("layers", "embed")),
}


def spec(axes, shape, rules, mesh) -> P:
    return partition_spec(axes, shape, rules, dict(mesh.shape), "weight")


def test_a_weight_in_training_and_in_generation():
    mesh = mesh_of("1-4-2", "1-2-2-2", fsdp=2)
    axes, shape = ("embed", "heads", "head_dim"), (16, 8, 4)
    assert spec(axes, shape, TRAIN_RULES, mesh) == P("fsdp", ("tensor_gen", "tensor_micro"), None)
    assert spec(axes, shape, GENERATE_RULES, mesh) == P(None, "tensor_gen", None)


def test_axes_of_size_one_are_left_out():
    assert spec(("embed", "heads"), (3, 5), TRAIN_RULES, mesh_of("1-1-1")) == P(None, None)


def test_a_dimension_without_a_name_is_never_split():
    assert spec((None, "mlp"), (3, 8), TRAIN_RULES, mesh_of("1-2-1")) == P(None, "tensor_gen")


@pytest.mark.parametrize(
    ("generate", "kv_heads", "expected"),
    [
        ("1-2-2-2", 4, ("tensor_gen", "tensor_micro")),
        # As far as it divides: two heads over tensor_gen, each held by both devices of tensor_micro.
        ("1-2-2-2", 2, "tensor_gen"),
        ("1-2-2-2", 1, None),
        ("1-2-2-2", 3, None),
        # Two devices of four share a head.
        ("1-4-1-2", 2, "tensor_gen"),
    ],
)
def test_kv_heads_are_replicated_where_they_do_not_divide(generate, kv_heads, expected):
    mesh = mesh_of("1-4-2", generate)
    assert spec(("kv_heads",), (kv_heads,), TRAIN_RULES, mesh) == P(expected)


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        # One expert for each of 8 devices.
        (8, P(("expert", "tensor_gen", "tensor_micro"), None, None)),
        # Four groups of devices with an expert each, whose width two devices share.
        (4, P(("expert", "tensor_gen"), None, "tensor_micro")),
        (2, P("expert", None, ("tensor_gen", "tensor_micro"))),
        (6, P("expert", None, ("tensor_gen", "tensor_micro"))),
    ],
)
def test_experts_lie_whole_over_tensor_devices_as_far_as_they_divide(experts, expected):
    mesh = mesh_of("1-4-2", "1-2-2-2", expert=2)
    axes = ("experts", "embed", "mlp")
    assert spec(axes, (experts, 8, 16), TRAIN_RULES, mesh) == expected


@pytest.mark.parametrize(
    ("t_g", "kv_heads", "parts"),
    [
        (8, 4, 4),
        (8, 2, 2),
        (8, 1, 1),
        (8, 8, 8),
        (16, 8, 8),
        (16, 4, 4),
        (16, 2, 1),
        (12, 2, 2),
        (6, 2, 2),
        (6, 3, 1),
    ],
)
def test_kv_heads_in_generation_are_split_over_factors_of_t_g(t_g, kv_heads, parts):
    mesh = abstract_mesh(ParallelLayout(p=1, t=t_g, d=1, p_g=1, t_g=t_g))
    assert parts_of(("kv_heads",), (kv_heads,), GENERATE_RULES, mesh) == (parts,)


def test_experts_have_to_divide_over_the_expert_axis():
    with pytest.raises(UserError, match="experts of size 3 does not divide over expert=2"):
        spec(("experts", "mlp"), (3, 16), TRAIN_RULES, mesh_of("1-4-2", expert=2))


@pytest.mark.parametrize("axis", ["heads", "mlp", "vocab"])
def test_a_dimension_that_does_not_divide_is_refused_with_the_values(axis):
    message = (
        rf"weight: {axis} of size 6 does not divide over tensor_gen=2 x tensor_micro=2 \(4 shards\)"
    )
    with pytest.raises(UserError, match=message):
        spec((axis,), (6,), TRAIN_RULES, mesh_of("1-4-2", "1-2-2-2"))


def test_the_refusal_of_a_tree_names_the_weight():
    mesh = mesh_of("1-4-2")
    axes = {"layer": {"up": ("embed", "mlp")}}
    shapes = {"layer": {"up": jax.ShapeDtypeStruct((8, 6), jnp.float32)}}
    with pytest.raises(UserError, match=r"\['layer'\]\['up'\]: mlp of size 6"):
        shardings(axes, shapes, TRAIN_RULES, mesh)


def test_a_mesh_axis_claimed_twice_is_refused():
    with pytest.raises(UserError, match="tensor_gen is claimed by both heads and mlp"):
        spec(("heads", "mlp"), (8, 8), TRAIN_RULES, mesh_of("1-4-1"))
    with pytest.raises(UserError, match="fsdp is claimed by both batch and embed"):
        spec(("batch", "embed"), (8, 8), TRAIN_RULES, mesh_of("1-1-4", fsdp=4))


def test_both_tables_know_the_same_axes_and_no_weight_claims_one_twice():
    assert set(TRAIN_RULES) == set(GENERATE_RULES)
    mesh = abstract_mesh(ParallelLayout(p=4, t=4, d=8, p_g=2, t_g=2, fsdp=2, context=2))
    for table in RULE_TABLES:
        for shape, axes in WEIGHTS.values():
            spec(axes, shape, table, mesh)


def test_activations_of_generation_use_every_device():
    """Slots are split over the micro axes too, so all d_g * d replicas decode their own."""
    for train, generate, replicas in [("1-4-2", "1-2-2-2", 4), ("2-2-2", "1-1-4-2", 8)]:
        assert shards_of("batch", GENERATE_RULES, mesh_of(train, generate)) == replicas
    assert shards_of("batch", TRAIN_RULES, mesh_of("1-2-4", context=2)) == 2
    assert shards_of("length", TRAIN_RULES, mesh_of("1-2-4", context=2)) == 2


def test_a_constraint_places_an_activation_and_leaves_its_values():
    mesh = mesh_of("1-4-2", "1-2-2-2")
    x = jnp.arange(4 * 6 * 8.0).reshape(4, 6, 8)
    axes = ("batch", "length", "mlp")
    placed = jax.jit(lambda x: constraint(mesh, TRAIN_RULES)(x, axes))(x)
    expected = P("data", None, ("tensor_gen", "tensor_micro"))
    assert placed.sharding.is_equivalent_to(jax.NamedSharding(mesh, expected), 3)
    np.testing.assert_array_equal(placed, x)


def test_a_constraint_on_one_device_does_nothing():
    x = jnp.ones((2, 3))
    assert constraint(mesh_of("1-1-1"), TRAIN_RULES)(x, ("batch", "length")) is x


@pytest.mark.parametrize(
    ("size", "remedy"), [(6, "use 4 or 8"), (9, "use 8 or 12"), (3, "use 4,"), (1, "use 4,")]
)
def test_a_setting_that_does_not_divide_is_refused_with_a_remedy(size, remedy):
    mesh = mesh_of("1-2-4", fsdp=2)
    with pytest.raises(UserError) as error:
        check_divides("train.rows", size, "batch", TRAIN_RULES, mesh)
    message = str(error.value)
    assert message.startswith(f"train.rows={size} does not divide over data=2 x fsdp=2 (4 shards)")
    assert remedy in message


@st.composite
def layouts(draw):
    """Any layout of up to eight devices."""

    def divisor(n):
        return draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))

    p = draw(st.sampled_from([1, 2, 4, 8]))
    t = draw(st.sampled_from([n for n in (1, 2, 4, 8) if p * n <= 8]))
    d = draw(st.sampled_from([n for n in (1, 2, 4, 8) if p * t * n <= 8]))
    fsdp = divisor(d)
    return ParallelLayout(p, t, d, divisor(p), divisor(t), fsdp, divisor(d // fsdp))


def cells(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[set[int]]:
    """The indices a shard holds of each dimension."""
    return [set(range(size)[part]) for part, size in zip(index, shape, strict=True)]


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from([1, 2, 4, 8]))
def test_every_generation_shard_contains_the_training_shard_of_its_device(layout, kv_heads):
    """HybridFlow's zero redundancy: no device keeps training weights beside its generation weights."""
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    for name, (shape, axes) in WEIGHTS.items():
        shape = (8, 8, kv_heads, 2) if name == "k" else shape
        train, generate = (
            jax.NamedSharding(mesh, spec(axes, shape, rules, mesh)).devices_indices_map(shape)
            for rules in RULE_TABLES
        )
        for device in mesh.devices.flat:
            pairs = zip(cells(train[device], shape), cells(generate[device], shape), strict=True)
            assert all(own <= whole for own, whole in pairs), (name, device)


@pytest.mark.parametrize(
    ("platform", "generate", "listed"),
    [("gpu", "1-2-2-2", True), ("gpu", "2-2-1-2", False), ("tpu", "1-2-2-2", False)],
)
def test_layers_are_listed_on_gpus_without_stages(platform, generate, listed, monkeypatch):
    mesh = mesh_of("2-2-2", generate)
    monkeypatch.setattr(rules, "platform_of", lambda mesh: platform)
    axes = {
        "up": ("layers", "embed", "mlp"),
        "first": ("unstaged_layers", "mlp"),
        "embedding": ("embed",),
    }
    shapes = {"up": (4, 6, 8), "first": (3, 8), "embedding": (6,)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    where = rules.generation_shardings(axes, shapes, mesh)
    whole = rules.shardings(axes, shapes, rules.GENERATE_RULES, mesh)
    if not listed:
        assert where == whole
        return
    assert [s.spec for s in where["up"]] == [P(None, "tensor_gen")] * 4
    assert [s.spec for s in where["first"]] == [P("tensor_gen")] * 3
    assert where["embedding"] == whole["embedding"]
