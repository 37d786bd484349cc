"""Kinds of devices, as JAX names them, and what they can do."""

import jax
import pytest

from jaxrl.mesh.hardware import roof_of


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
