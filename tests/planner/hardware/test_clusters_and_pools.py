"""Clusters, the pools they can be cut into, and which placements there are."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.hardware import accelerator
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.search.placements import checked_placement, placement_name, placements_of


@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        ("h100:1x4", 4, (1, 2, 4)),
        ("h100:3x8", 24, (1, 2, 4, 8, 16, 24)),
        ("v5p:2x2x4", 16, (1, 2, 4, 8, 12, 16)),
        ("v5e:4x8", 32, (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)),
        ("7x:2x2x1", 8, (1, 2, 4, 8)),
    ],
)
def test_pools_are_slabs_or_halves_of_one(name, devices, sizes):
    cluster = Cluster.parse(name)
    assert (cluster.num_devices, cluster.pool_sizes, cluster.name) == (devices, sizes, name)


def test_a_larger_cluster_has_all_pools_of_a_smaller_one():
    kind = accelerator("h100")
    shapes = list(kind.growing_shapes())[:12]
    pools = [set(Cluster(kind, shape).pool_sizes) for shape in shapes]
    assert all(small <= large for small, large in itertools.pairwise(pools))


def test_a_group_inside_a_host_has_its_links():
    cluster = Cluster.parse("h100:16x8")
    assert cluster.group_gbs(8, 1) == cluster.group_gbs(2, 4) == 450


def test_groups_that_leave_a_host_share_what_leaves_it():
    # 400 GB/s of a host: one ring of all its eight devices, four rings of two each, eight of one each.
    cluster = Cluster.parse("h100:16x8")
    assert cluster.group_gbs(16, 1) == 400
    assert cluster.group_gbs(16, 4) == 100
    assert cluster.group_gbs(2, 8) == cluster.group_gbs(4, 32) == 50
    # A slice of a TPU has the same links everywhere.
    assert Cluster.parse("v5p:4x4x8").group_gbs(16, 8) == 180


@pytest.mark.parametrize(
    "text", ["", "h100", ":2x8", "h100:", "h100:ax8", "h100:-1x8", "h100:2x8x"]
)
def test_a_topology_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="is not KIND:AxB"):
        Cluster.parse(text)


def test_a_topology_that_does_not_exist_says_what_does():
    with pytest.raises(
        UserError, match=r"v5e comes as 1x1, 2x2, .*up to 256 devices; the next larger is 4x8"
    ):
        Cluster.parse("v5e:4x5")
    with pytest.raises(UserError, match="a100 comes as HOSTSx8, or as 1x4"):
        Cluster.parse("a100:2x6")


@pytest.mark.parametrize(("roles", "bell"), list(enumerate((1, 1, 2, 5, 15, 52, 203))))
def test_there_are_as_many_placements_as_the_bell_number(roles, bell):
    names = tuple("abcdef"[:roles])
    found = list(placements_of(names))
    assert len(found) == len(set(found)) == bell
    assert all(sorted(name for pool in p for name in pool) == list(names) for p in found)


@hypothesis.given(st.permutations("abcd"), st.lists(st.integers(1, 3), max_size=3))
def test_a_placement_of_a_users_is_one_of_them(names, cuts):
    pools, left = [], list(names)
    for cut in cuts:
        pools.append(left[:cut])
        left = left[cut:]
    assert checked_placement([*pools, left], "abcd") in set(placements_of("abcd"))


def test_a_placement_has_a_name():
    assert placement_name((("actor", "reference"), ("critic",))) == "actor + reference | critic"
