"""The order of devices in a mesh."""

import dataclasses
import itertools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.devices import device_grid

SIZES = {"data": 4, "fsdp": 2, "tensor_gen": 2}


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes that determine the order; `mesh_utils` accepts any object with them."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "imagined"
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def slices(num_slices: int, per_slice: int) -> list[Device]:
    """Slices of one row of chips."""
    return [
        Device(s * per_slice + i, s, s, platform="tpu", coords=(i, 0, 0))
        for s in range(num_slices)
        for i in range(per_slice)
    ]


def hosts(num_hosts: int, per_host: int) -> list[Device]:
    """Hosts of GPUs: JAX calls each a slice."""
    return [Device(h * per_host + i, h, h) for h in range(num_hosts) for i in range(per_host)]


def test_simulated_devices_are_in_the_order_of_their_ids():
    grid = device_grid({"data": 2, "tensor_gen": 4}, jax.devices()[:8])
    assert [[d.id for d in row] for row in grid] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# The threads of the OpenBLAS that XLA calls: SciPy's, which is loaded for the first triangular system.
SOLVES = """
import ctypes, jax
from jaxrl.mesh.devices import simulate
simulate(2)
jax.scipy.linalg.solve_triangular(jax.numpy.eye(4), jax.numpy.ones(4)).block_until_ready()
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "scipy.libs/libscipy_openblas" in line}
print([ctypes.CDLL(path).scipy_openblas_get_num_threads() for path in loaded])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="/proc lists what is loaded")
def test_simulated_devices_solve_triangular_systems_side_by_side():
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SOLVES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1]\n"


@pytest.mark.parametrize("num_slices", [2, 4])
def test_data_alone_crosses_slices(num_slices):
    devices = slices(num_slices, 16 // num_slices)
    # The order in which they are listed does not matter.
    grid = device_grid(SIZES, devices[::-1])
    assert grid.shape == (4, 2, 2)
    slice_of = np.vectorize(lambda device: device.slice_index)(grid)
    # The same along every axis but the first, and each slice one run of it.
    assert (slice_of == slice_of[:, :1, :1]).all()
    assert (np.diff(slice_of[:, 0, 0]) >= 0).all()
    assert len({device.id for device in grid.flat}) == 16


def test_a_layout_that_would_split_a_model_over_slices_is_refused():
    rule = r"24 devices in 3 slices: the data axis of 4 does not divide .* multiple of 3"
    with pytest.raises(UserError, match=rule):
        device_grid({"data": 4, "fsdp": 3, "tensor_gen": 2}, slices(3, 8))


@pytest.mark.parametrize("data", [1, 2, 16])
def test_any_axis_may_cross_hosts_of_gpus(data):
    grid = device_grid({"data": data, "fsdp": 16 // data}, hosts(2, 8))
    assert [device.id for device in grid.flat] == list(range(16))


@pytest.mark.parametrize("part", [[0], [0, 1], [1, 2, 3], [0, 1, 2, 3]])
def test_a_part_of_every_host_of_a_slice_becomes_a_mesh(part):
    # A slice of 4x4 chips, whose hosts have 2x2 chips each.
    chips = [
        Device(4 * h + i, 0, h, platform="tpu", coords=(2 * x + i % 2, 2 * y + i // 2, 0))
        for h, (y, x) in enumerate(itertools.product(range(2), range(2)))
        for i in range(4)
    ]
    devices = [chips[4 * h + i] for h in range(4) for i in part]
    grid = device_grid({"data": 4, "tensor_gen": len(part)}, devices)
    assert {device.id for device in grid.flat} == {device.id for device in devices}
    if len(part) in (1, 3):
        # The other parts fill a box; here each host is a row.
        assert [[d.process_index for d in row] for row in grid] == [
            [h] * len(part) for h in range(4)
        ]
