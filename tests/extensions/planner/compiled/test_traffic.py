"""How often the parts of a compiled program run, and what they move along which axes."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_planner.compiled.traffic import (
    Collective,
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
    assert not along.network
    assert traffic_of(found, mesh, devices_per_host=1)[0].network == along.nbytes
    assert merged([along, along])[0].nbytes == 2 * along.nbytes == along.times(2).nbytes


@pytest.mark.parametrize(
    ("kind", "devices", "on_a_host"),
    [
        # Of 800 bytes a device has 100 and receives 700. 400 enter each host of four, 100 a device.
        ("all-gather", 700, 100),
        # The host's four results of 800 bytes, each with one sum from the other host.
        ("reduce-scatter", 5600, 800),
        # A reduce-scatter of 800 to 100 a device, and an all-gather: 400 enter the host in each.
        ("all-reduce", 1400, 200),
        # Half of what each of four devices receives comes from the other host.
        ("all-to-all", 700, 400),
    ],
)
def test_a_group_of_two_hosts_receives_once_for_all_its_members(kind, devices, on_a_host):
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    found = [(1.0, Collective(kind, (tuple(range(8)),), 800))]
    (along,) = traffic_of(found, mesh, devices_per_host=4)
    assert (along.nbytes, along.network) == (devices, on_a_host)
    # 100 GB/s inside a host, and 10 to others: the slower way decides.
    least = max((devices - on_a_host) / 100e9, on_a_host / 10e9)
    assert along.least_s(100, 10) == pytest.approx(least)


def test_a_permute_across_hosts_enters_the_host_of_its_target():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    ring = tuple((i, (i + 1) % 8) for i in range(8))
    (along,) = traffic_of(
        [(1.0, Collective("collective-permute", ring, 800))], mesh, devices_per_host=4
    )
    assert (along.nbytes, along.network) == (800, 200)


HLO = pathlib.Path(__file__).with_name("nested_loops.hlo").read_text()


def test_counters_branches_and_fused_cuts_of_a_tpu():
    runs = runs_of(*computations_of(HLO))
    # From 1 to below 8 in steps of 2.
    assert runs["body"] == 4
    assert "few" not in runs and runs["many"] == 1
    assert "many" not in runs_of(*computations_of(HLO), longest_branch=False)
    kinds = {each.kind: each.result_bytes for _, each in counted_collectives(HLO, 2)}
    assert kinds == {"all-reduce": 16, "reduce-scatter": 8}
