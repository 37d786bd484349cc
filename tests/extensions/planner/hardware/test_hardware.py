"""Kinds of devices, as JAX names them, and what they can do."""

import dataclasses
import json

import jax
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.hardware import CHIPS, roof_of
from jaxrl_planner.hardware.accelerators import ACCELERATORS, accelerator, accelerator_of


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("TPU v4", 275, 275),
        ("TPU v5 lite", 197, 197),
        ("TPU v5", 459, 459),
        ("TPU v5p", 459, 459),
        ("TPU v6 lite", 918, 918),
        ("TPU7x", 1153, 1153),
        ("NVIDIA A100-SXM4-80GB", 312, 156),
        ("NVIDIA H100 80GB HBM3", 989, 494),
        ("NVIDIA H100 PCIe", 756, 378),
        ("NVIDIA H200", 989, 494),
        ("NVIDIA B200", 2250, 1125),
    ],
)
def test_a_device_has_the_roof_of_its_data_sheet(kind, bfloat16, float32):
    roof = roof_of(kind)
    assert roof is not None
    assert (roof.tflops("bfloat16"), roof.tflops("float32")) == (bfloat16, float32)


def test_memory_of_the_two_cards_of_one_name():
    sizes = [roof_of(f"NVIDIA A100-SXM4-{size}GB") for size in (40, 80)]
    assert [roof.memory for roof in sizes if roof] == [1555, 2039]


def test_what_is_not_known_has_none():
    assert roof_of(jax.devices()[0].device_kind) is None
    assert roof_of("NVIDIA GeForce RTX 5090") is None


# Entries of the table


def test_an_unknown_chip_lists_the_known():
    with pytest.raises(UserError, match=r"'h1000' is not one of v4, v5e.*b200; did you mean h100"):
        accelerator("h1000")


def test_the_planner_knows_the_chips_that_a_step_knows():
    for name, (kinds, roof) in CHIPS.items():
        assert ACCELERATORS[name].roof == roof
        # No kind begins with a kind that stands before it.
        assert {accelerator_of(f"{kind} of 2026") for kind in kinds} == {accelerator(name)}


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_entry_comes_back_from_its_file(name, tmp_path):
    path = tmp_path / "entry.json"
    path.write_text(json.dumps(dataclasses.asdict(ACCELERATORS[name])))
    assert accelerator(str(path)) == ACCELERATORS[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gb": -1}, "memory_gb = -1: must be above 0"),
        ({"memry_gb": 3}, "memry_gb = 3: Unexpected.*its fields are name, memory_gb"),
        ({"devices_per_host": 2.5}, "devices_per_host = 2.5: "),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(changes, message, tmp_path):
    path = tmp_path / "entry.json"
    path.write_text(json.dumps(dataclasses.asdict(accelerator("h100")) | changes))
    with pytest.raises(UserError, match=message) as raised:
        accelerator(str(path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "shape", "exists"),
    [
        ("v5p", (4, 4, 8), True),
        ("v5p", (2, 2, 1), True),
        ("v5p", (4, 4, 6), False),
        ("v5p", (4, 4), False),
        ("v5e", (16, 16), True),
        ("v5e", (16, 32), False),
        ("h100", (16, 8), True),
        ("h100", (1, 4), True),
        ("h100", (2, 4), False),
        ("h100", (1, 3), False),
        ("h100", (8,), False),
    ],
)
def test_only_shapes_that_can_be_had_exist(name, shape, exists):
    assert accelerator(name).exists(shape) is exists


@pytest.mark.parametrize("name", ACCELERATORS)
def test_shapes_grow(name):
    entry = accelerator(name)
    sizes = [entry.num_devices(shape) for shape in entry.growing_shapes()]
    assert sizes == sorted(set(sizes)) and sizes[-1] > entry.largest / 2.5
    assert all(map(entry.exists, entry.growing_shapes()))
