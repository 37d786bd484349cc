"""Accelerators by name: what there is, and what is refused before anything is loaded."""

import importlib.util

import pytest

from jaxrl.errors import UserError
from jaxrl_planner.hardware.accelerators import accelerator
from jaxrl_planner.hardware.cluster import GPU_TARGETS, Cluster, read_topology, target_text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h101:2x8", "did you mean h100"),
        ("v5p", "or v5p:4x4x8 "),
        ("v5p:4x4", "v5p comes as .*multiples of 4"),
        ("v5p:4x4x7", "the next larger is 4x4x8"),
        ("v6e:3x3", "is no topology that exists"),
        ("v6e:32x32", "up to 256 devices"),
        ("h100:16x9", "comes as HOSTSx8"),
        ("h100:0x8", "is not KIND:AxB"),
        ("h100:16", "is no topology that exists"),
        ("", "is not KIND:AxB"),
    ],
)
def test_what_does_not_exist_is_refused(name, words):
    with pytest.raises(UserError, match=words):
        Cluster.parse(name)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("v5e:2x2", "pip install libtpu"),
        ("h100:1x8", "pip install --no-deps jax-cuda13-plugin=="),
    ],
)
def test_a_missing_compiler_is_named_with_the_line_that_installs_it(name, command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=command):
        read_topology(name)


def test_every_gpu_states_its_target():
    for name, target in GPU_TARGETS.items():
        # Vendors count in another giga, and the driver keeps some for itself.
        assert target["memory"] / 1e9 == pytest.approx(accelerator(name).memory_gb, rel=0.08)
        assert target_text(name).count("{") == target_text(name).count("}")


@pytest.mark.tpu
def test_a_slice_has_its_chips():
    topology = read_topology("v5p:2x2x2")
    assert len(topology.devices) == topology.devices_per_host == 8
    assert topology.devices[0].platform == "tpu"
