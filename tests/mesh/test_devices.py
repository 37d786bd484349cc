"""The order of devices in a mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.devices import device_grid

SIZES = {"data": 4, "fsdp": 2, "tensor_gen": 2}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The attributes that determine the order; `mesh_utils` accepts any object with them."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "imagined"


def accelerators(num_slices: int, per_slice: int) -> list[Accelerator]:
    return [
        Accelerator(s * per_slice + i, s, s) for s in range(num_slices) for i in range(per_slice)
    ]


def test_simulated_devices_are_in_the_order_of_their_ids():
    grid = device_grid({"data": 2, "tensor_gen": 4}, jax.devices()[:8])
    assert [[d.id for d in row] for row in grid] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_slices", [2, 4])
def test_data_alone_crosses_slices(num_slices):
    devices = accelerators(num_slices, 16 // num_slices)
    # The order in which they are listed does not matter.
    grid = device_grid(SIZES, devices[::-1])
    assert grid.shape == (4, 2, 2)
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    # The same along every axis but the first, and each slice one run of it.
    assert (slices == slices[:, :1, :1]).all()
    assert (np.diff(slices[:, 0, 0]) >= 0).all()
    assert len({device.id for device in grid.flat}) == 16


def test_a_layout_that_would_split_a_model_over_slices_is_refused():
    rule = r"24 devices in 3 slices: the data axis of 4 does not divide .* multiple of 3"
    with pytest.raises(UserError, match=rule):
        device_grid({"data": 4, "fsdp": 3, "tensor_gen": 2}, accelerators(3, 8))
