"""Clusters, the pools they can be cut into, and which placements there are."""

import dataclasses

import numpy as np
import pytest

from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.search.mapping import placements_of


@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        ("h100:1x4", 4, (1, 2, 3, 4)),
        ("h100:3x8", 24, (3, 6, 9, 12, 15, 18, 21, 24)),
        ("v5p:2x2x4", 16, (4, 8, 12, 16)),
        ("v5e:4x8", 32, (8, 16, 24, 32)),
        ("7x:2x2x1", 8, (1, 2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_pools_have_an_equal_part_of_every_host(name, devices, sizes):
    cluster = Cluster.parse(name)
    assert (cluster.num_devices, cluster.pool_sizes, cluster.name) == (devices, sizes, name)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("h100:1x4", (1, 2, 4)),
        ("h100:3x8", (1, 2, 4, 8, 16, 24)),
        ("v5p:2x2x4", (1, 2, 4, 8, 12, 16)),
    ],
)
def test_in_the_papers_system_pools_are_whole_hosts_or_halves_of_one(name, sizes):
    assert dataclasses.replace(Cluster.parse(name), whole_hosts=True).pool_sizes == sizes


def groups(devices: int, members: int, stride: int) -> np.ndarray:
    """Groups of a pool whose members are `stride` apart."""
    places = np.arange(devices).reshape(-1, members, stride)
    return places.swapaxes(1, 2).reshape(-1, members)


def test_a_group_inside_a_host_has_its_links():
    cluster = Cluster.parse("h100:16x8")
    assert cluster.ring(groups(128, 8, 1)) == (8, 7, 0, 450)
    assert cluster.ring(groups(128, 2, 4)) == (2, 1, 0, 450)
    # A single host has no others.
    assert Cluster.parse("h100:1x8").ring(groups(6, 3, 2)) == (3, 2, 0, 450)


def test_groups_that_leave_a_host_share_what_leaves_it():
    # 400 GB/s of a host: one ring of all its eight devices, four rings of two each, eight of one each.
    cluster = Cluster.parse("h100:16x8")
    assert cluster.ring(groups(128, 16, 1)) == (16, 14, 1, 400)
    assert cluster.ring(groups(128, 16, 4)) == (16, 8, 7, 100)
    assert cluster.ring(groups(128, 2, 8)) == (2, 0, 1, 50)
    # A slice of a TPU has the same links everywhere.
    assert Cluster.parse("v5p:4x4x8").ring(groups(128, 16, 8)) == (16, 8, 0, 180)


def test_a_pool_shares_the_network_with_the_other_pools():
    # Half of every host has half of its 400 GB/s.
    cluster = Cluster.parse("h100:16x8")
    assert cluster.ring(groups(64, 8, 1)) == (8, 6, 1, 200)
    assert cluster.ring(groups(64, 16, 4)) == (16, 0, 15, 50)
    whole = dataclasses.replace(cluster, whole_hosts=True)
    assert whole.ring(groups(64, 8, 1)) == (8, 7, 0, 450)


def test_groups_that_do_not_divide_a_host_cross_it():
    # Three devices of each host: pairs 0-1, 2-3 and 4-5, of which the second has two hosts.
    assert Cluster.parse("h100:2x8").ring(groups(6, 2, 1)) == (2, 0, 1, 150)
    # Triples of whole hosts: 6-7-8 and 15-16-17 cross, and both send from the second host.
    assert Cluster.parse("h100:3x8").ring(groups(24, 3, 1)) == (3, 1, 1, 200)


def test_a_part_of_every_host_of_a_slice_has_that_part_of_its_links():
    cluster = Cluster.parse("v5p:4x4x8")
    assert cluster.ring(groups(64, 2, 1)) == (2, 1, 0, 180)
    assert cluster.ring(groups(64, 8, 1)) == (8, 2, 2, 90)


@pytest.mark.parametrize(("roles", "bell"), list(enumerate((1, 1, 2, 5, 15, 52, 203))))
def test_there_are_as_many_placements_as_the_bell_number(roles, bell):
    names = tuple("abcdef"[:roles])
    found = list(placements_of(names))
    assert len(found) == len(set(found)) == bell
    assert all(sorted(name for pool in p for name in pool) == list(names) for p in found)
