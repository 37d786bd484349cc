import re

import jax
import pytest
from beside import of_extension

from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh, build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import TRAIN_RULES

groups_of = of_extension("jaxrl_planner.mesh_command:groups")


def layout_of(train: str, generate: str = "", **shares: int) -> ParallelLayout:
    return ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, **shares))


def groups(layout: ParallelLayout, *axes: str) -> list[list[int]]:
    """Groups of devices that differ only along `axes`, numbered from 1 as in the paper's figures."""
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    ids = [device.id + 1 for device in mesh.devices.flat]
    return [[ids[i] for i in group] for group in groups_of(dict(mesh.shape), axes)]


TENSOR = TRAIN_RULES["heads"]
MICRO = ("stage_micro", "tensor_micro")


def test_a_layout_is_read_as_written():
    layout = layout_of("2-4-12", "1-2-4-12", fsdp=3, expert=2, context=2)
    assert (layout.p, layout.t, layout.d) == (2, 4, 12)
    assert (layout.p_g, layout.t_g, layout.d_g) == (1, 2, 4)
    assert layout.num_devices == 96
    assert layout.name == "2-4-12 / 1-2-4-12"
    assert layout.axis_sizes == {
        "data": 1,
        "fsdp": 3,
        "expert": 2,
        "context": 2,
        "fsdp_gen": 1,
        "stage_gen": 1,
        "stage_micro": 2,
        "tensor_gen": 2,
        "tensor_gen_2": 1,
        "tensor_gen_3": 1,
        "tensor_micro": 2,
    }


def test_generation_takes_replicas_for_more_tensor_shards_than_training_has():
    layout = layout_of("2-2-12", "1-8-2-3", fsdp=12)
    # Of 48 devices, 8 hold a copy in generation: two tensor shards of each of four replicas.
    assert (layout.fsdp_gen, layout.d_g) == (4, 2)
    assert layout.name == "2-2-12 / 1-8-2-3"
    expected = {"fsdp": 3, "fsdp_gen": 4, "stage_micro": 2, "tensor_gen": 2}
    assert {axis: n for axis, n in layout.axis_sizes.items() if n > 1} == expected
    # Four of six tensor shards of training, and two replicas, make four of generation.
    layout = layout_of("1-6-2", "1-4-3-1", fsdp=2)
    expected = {"fsdp_gen": 2, "tensor_gen": 2, "tensor_micro": 3}
    assert {axis: n for axis, n in layout.axis_sizes.items() if n > 1} == expected
    with pytest.raises(UserError, match="leaves d_g = 1 and d = 2; use 1-4-1-2"):
        layout_of("1-2-4", "1-4-1-4", fsdp=2)


@pytest.mark.parametrize(
    "train", ["", "1", "1-2", "1-2-3-4", "1-x-2", "1-0-2", "1--2", "1-2-", "1- 2-2", "-1-2-2"]
)
def test_a_train_layout_that_is_not_three_sizes_is_refused(train):
    with pytest.raises(UserError, match=re.escape(f"mesh.train={train!r} is not p-t-d")):
        layout_of(train)


@pytest.mark.parametrize("generate", ["1", "1-2-2", "1-2-2-2-1", "1-two-2-2", "1-0-2-2"])
def test_a_generate_layout_that_is_not_four_sizes_is_refused(generate):
    with pytest.raises(
        UserError, match=re.escape(f"mesh.generate={generate!r} is not p_g-t_g-d_g-d")
    ):
        layout_of("1-4-2", generate)


@pytest.mark.parametrize(
    ("train", "generate", "message"),
    [
        ("1-4-2", "1-3-1-2", "t_g=3 does not divide t=4"),
        ("1-4-2", "1-8-1-1", "t_g=8 does not divide t=4 .* mesh.fsdp=1 is no multiple of 2"),
        ("4-1-2", "3-1-1-2", "p_g=3 does not divide p=4"),
        # The remedy is the layout that would have been right.
        ("1-4-2", "1-2-4-2", "use 1-2-2-2"),
        ("1-4-2", "1-2-2-4", "use 1-2-2-2"),
    ],
)
def test_a_generate_layout_that_does_not_fit_the_train_layout_is_refused(train, generate, message):
    with pytest.raises(UserError, match=message) as error:
        layout_of(train, generate)
    assert generate in str(error.value)
    assert train in str(error.value)


@pytest.mark.parametrize(
    "shares",
    [
        {"fsdp": 3},
        {"expert": 3},
        {"context": 3},
        {"fsdp": 2, "context": 4},
        {"fsdp": 2, "expert": 4},
    ],
)
def test_shares_that_do_not_divide_the_replicas_are_refused(shares):
    with pytest.raises(UserError, match=r"does not divide d=4 of mesh\.train 1-1-4"):
        layout_of("1-1-4", **shares)


def test_a_layout_for_other_devices_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"needs 8 devices .* this run has 4 .*simulated_devices=8"):
        build_mesh(layout_of("1-4-2"), jax.devices()[:4])


def test_groups_of_figure_7():
    """Training 1-2-2, generation 1-1-2-2 on four devices."""
    layout = layout_of("1-2-2", "1-1-2-2")
    assert groups(layout, *TENSOR) == [[1, 2], [3, 4]]
    assert groups(layout, "tensor_gen") == [[1], [2], [3], [4]]
    assert groups(layout, *MICRO) == [[1, 2], [3, 4]]


def test_groups_of_figure_8():
    """Training 1-4-2, generation 1-2-2-2 on eight devices."""
    layout = layout_of("1-4-2", "1-2-2-2")
    assert groups(layout, *TENSOR) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert groups(layout, "tensor_gen") == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert groups(layout, *MICRO) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_pipeline_stages_are_grouped_at_intervals_too():
    """Training 4-2-1, generation 2-2-2-1: stages of generation are p/p_g = 2 stages apart."""
    layout = layout_of("4-2-1", "2-2-2-1")
    assert groups(layout, "stage_gen", "stage_micro") == [[1, 3, 5, 7], [2, 4, 6, 8]]
    assert groups(layout, "stage_gen") == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert groups(layout, *MICRO) == [[1, 3], [2, 4], [5, 7], [6, 8]]


def test_fsdp_and_context_split_the_data_replicas():
    layout = layout_of("1-2-4", fsdp=2, context=2)
    assert groups(layout, "data", "fsdp", "expert", "context") == [[1, 3, 5, 7], [2, 4, 6, 8]]
    assert groups(layout, "context") == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert groups(layout, "fsdp") == [[1, 5], [2, 6], [3, 7], [4, 8]]


def test_an_abstract_mesh_has_the_shape_of_the_real_one():
    layout = layout_of("1-4-2", "1-2-2-2")
    assert dict(abstract_mesh(layout).shape) == dict(build_mesh(layout, jax.devices()[:8]).shape)
    # No devices are needed for a machine that is not here.
    assert abstract_mesh(layout_of("8-8-16")).size == 1024
