"""Protocols: where a method's arrays go and where its results lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from jaxrl.errors import UserError
from jaxrl.mesh import protocols
from jaxrl.mesh.protocols import Protocol, protocol


def shards(array: jax.Array) -> dict[int, tuple]:
    """Start and end of every dimension, by device."""
    return {
        device.id: tuple(s.indices(n)[:2] for s, n in zip(index, array.shape, strict=True))
        for device, index in array.sharding.devices_indices_map(array.shape).items()
    }


def owners(array: jax.Array) -> list[set[int]]:
    """Devices that hold the same part of the first dimension, in the order of the parts."""
    parts: dict[tuple, set[int]] = {}
    for device, index in shards(array).items():
        parts.setdefault(index[0], set()).add(device)
    return [parts[part] for part in sorted(parts)]


X = np.arange(16.0, dtype=np.float32).reshape(8, 2)
EVERYONE = [set(range(8))]


@pytest.mark.parametrize(
    ("pair", "placed"),
    [
        (protocols.ONE_TO_ALL, EVERYONE),
        # Two replicas of four tensor ranks.
        (protocols.THREE_D_PROTO, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        # Two micro replicas in each: the paper's micro-DP groups [G1 G2] [G3 G4] ... hold different samples.
        (protocols.THREE_D_ALL_MICRO_DP, [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        (protocols.THREE_D_PP_ONLY, EVERYONE),
        (protocols.DP_PROTO, [{i} for i in range(8)]),
        (protocols.METRICS, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (protocols.PER_TOKEN, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ],
    ids=lambda x: x.name if isinstance(x, Protocol) else "",
)
def test_where_a_host_array_goes(pair, placed):
    array = pair.place(mesh_of("1-4-2", "1-2-2-2"), X)
    assert owners(array) == placed
    np.testing.assert_array_equal(array, X)


def test_all_to_all_moves_nothing():
    assert protocols.ALL_TO_ALL.place(mesh_of("1-4-2"), X) is X


def test_a_pipeline_is_looked_into_stage_by_stage():
    mesh = mesh_of("2-2-2")
    per_layer = protocols.ONE_TO_ALL.place(mesh, np.zeros((4, 3), np.float32))
    collected = protocols.THREE_D_PP_ONLY.gather(mesh, per_layer)
    assert owners(collected) == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_tokens_of_a_row_lie_over_context():
    mesh = mesh_of("1-1-8", fsdp=2, context=2)
    batch = {"x": np.zeros((1, 1, 4, 6), np.float32), "count": np.zeros(3, np.int32), "name": "n"}
    placed = protocols.PER_TOKEN.place(mesh, batch)
    assert placed["x"].sharding.spec == P(None, None, ("data", "fsdp"), "context")
    assert placed["count"].sharding.is_fully_replicated
    assert placed["name"] == "n"


HALVES = Protocol("HALVES", lambda mesh, shape: P("data"), lambda mesh, shape: P())


class Doubler:
    """A role of a user's own, with a protocol of its own."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.seen = None

    @protocol(HALVES)
    def doubled(self, x: jax.Array, *, plus: jax.Array, times: int) -> dict[str, jax.Array]:
        """(x + plus) * times."""
        self.seen = x
        return {"sum": jax.jit(lambda x, plus: (x + plus) * times)(x, plus)}


def test_a_users_own_protocol_between_pools():
    first, second = Doubler(mesh_of("1-1-4")), Doubler(mesh_of("1-1-4", first=4))
    once = first.doubled(X, plus=X, times=2)
    assert first.seen.sharding.spec == P("data")
    # From the first role's devices to the second's, by the call alone.
    twice = second.doubled(once["sum"], plus=X, times=1)
    assert twice["sum"].devices() == set(jax.devices()[4:])
    assert twice["sum"].sharding.is_fully_replicated
    np.testing.assert_array_equal(twice["sum"], 5 * X)
    assert Doubler.doubled.__doc__ == "(x + plus) * times."


def test_inside_a_program_nothing_is_moved_by_hand():
    role = Doubler(mesh_of("1-1-4"))
    jaxpr = jax.make_jaxpr(lambda x: role.doubled(x, plus=x, times=2))(jnp.asarray(X))
    assert "device_put" not in str(jaxpr)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="3D_PROTO: replicas of size 3 does not divide over data=2"):
        protocols.THREE_D_PROTO.place(mesh_of("1-4-2"), np.zeros((3, 2), np.float32))
