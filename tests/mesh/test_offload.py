import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.offload import offload, onload
from jaxrl.mesh.rules import TRAIN_RULES, shardings

VALUES = {"moment": np.arange(32, dtype=np.float32).reshape(4, 8), "step": np.int32(3)}


@pytest.fixture
def on_device():
    mesh = build_mesh(ParallelLayout(p=1, t=4, d=2, p_g=1, t_g=4))
    wanted = shardings({"moment": ("embed", "mlp"), "step": ()}, VALUES, TRAIN_RULES, mesh)
    return jax.device_put(VALUES, wanted), wanted


def test_offloaded_arrays_lie_in_host_memory_and_come_back(on_device):
    state, wanted = on_device
    offloaded = offload(state)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded)} == {"pinned_host"}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    back = onload(offloaded, wanted)
    jax.tree.map(np.testing.assert_array_equal, back, VALUES)
    jax.tree.map(lambda leaf, s: leaf.sharding == s or pytest.fail(str(s)), back, wanted)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(offloaded))
    # It is computed with like any other.
    assert float(jnp.sum(back["moment"])) == VALUES["moment"].sum()


def test_devices_that_cannot_offload_are_refused(on_device, monkeypatch):
    state, _ = on_device
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "addressable_memories", lambda self: [self.default_memory()])
    with pytest.raises(
        UserError, match=r"cannot offload .* not pinned_host; keep them on the device"
    ):
        offload(state)
    assert not state["moment"].is_deleted()
