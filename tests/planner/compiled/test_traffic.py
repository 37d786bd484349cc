"""How often the parts of a compiled program run, and what they move along which axes."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.planner.compiled.traffic import (
    computations_of,
    counted_collectives,
    merged,
    runs_of,
    traffic_of,
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"))


def compiled(mesh: Mesh, rounds: int, *, open_end: bool):
    """A loop of all-reduces along `tensor`, inside another one."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data", "tensor"), P()), out_specs=P("data")
    )
    def run(x, n):
        def inner(_, y):
            return jax.lax.psum(y * 1.5, "tensor")

        def outer(_, y):
            return jax.lax.fori_loop(0, 3, inner, y)

        y = jax.lax.psum(x, "tensor")
        return jax.lax.fori_loop(0, n if open_end else rounds, outer, y)

    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return jax.jit(run).lower(x, n).compile().as_text()


@pytest.mark.parametrize("open_end", [False, True])
def test_loops_are_multiplied_out(mesh, open_end):
    text = compiled(mesh, 5, open_end=open_end)
    found = list(counted_collectives(text, 8, open_loops=5))
    assert sum(times for times, _ in found) == 1 + 5 * 3
    (along,) = traffic_of(found, mesh, devices_per_host=2)
    assert (along.kind, along.axes, along.calls) == ("all-reduce", ("tensor",), 16)
    # [2, 2] float32 a device, of which an all-reduce of two receives as much.
    assert along.nbytes == 16 * 2 * 2 * 4
    assert not along.across_hosts
    assert traffic_of(found, mesh, devices_per_host=1)[0].across_hosts
    assert merged([along, along])[0].nbytes == 2 * along.nbytes == along.times(2).nbytes


HLO = pathlib.Path(__file__).with_name("nested_loops.hlo").read_text()


def test_counters_branches_and_fused_cuts_of_a_tpu():
    runs = runs_of(*computations_of(HLO))
    # From 1 to below 8 in steps of 2.
    assert runs["body"] == 4
    assert "few" not in runs and runs["many"] == 1
    assert "many" not in runs_of(*computations_of(HLO), longest_branch=False)
    kinds = {each.kind: each.result_bytes for _, each in counted_collectives(HLO, 2)}
    assert kinds == {"all-reduce": 16, "reduce-scatter": 8}
