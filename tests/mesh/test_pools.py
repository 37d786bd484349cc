"""Placements: which role gets which devices, and what is refused."""

import types
import typing

import jax
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.pools import EVERYTHING, OwnLayout, read_placement, take_devices, takes_all

MESH = LayoutConfig(train="1-2-4", fsdp=2)
ROLES = ("actor", "critic", "reference", "reward")
NEMO = {
    "policy": {"roles": ("actor", "reference"), "train": "1-2-2", "generate": "1-1-2-2"},
    "value": {"roles": ("critic", "reward"), "train": "1-1-4", "fsdp": 4},
}


def ids(placement, role: str) -> list[int]:
    return sorted(d.id for d in placement.pool_of(role).devices)


def mesh_of(placement, role: str):
    return placement.pool_of(role).mesh_of(role)


def test_without_a_table_all_roles_share_all_devices():
    placement = take_devices(read_placement({}, MESH, ROLES), jax.devices())
    (pool,) = placement.pools
    assert pool.name == EVERYTHING and pool.roles == ROLES
    assert placement.num_devices == 8
    assert mesh_of(placement, "actor") is mesh_of(placement, "reward")


def test_pools_take_devices_one_after_the_other():
    placement = take_devices(read_placement(NEMO, MESH, ROLES), jax.devices())
    assert ids(placement, "actor") == ids(placement, "reference") == [0, 1, 2, 3]
    assert ids(placement, "critic") == ids(placement, "reward") == [4, 5, 6, 7]
    layout = placement.pool_of("actor").layout_of("actor")
    assert layout.name == "1-2-2 / 1-1-2-2"
    # What a row does not say is as in `mesh`.
    assert layout.fsdp == 2
    assert mesh_of(placement, "critic").shape["fsdp"] == 4


def test_devices_can_be_named():
    table = {
        "policy": {**NEMO["policy"], "devices": "4-7"},
        "value": {**NEMO["value"], "devices": "0-3"},
    }
    placement = take_devices(read_placement(table, MESH, ROLES), jax.devices())
    assert ids(placement, "actor") == [4, 5, 6, 7]
    assert ids(placement, "critic") == [0, 1, 2, 3]


def test_roles_of_a_pool_may_be_split_otherwise():
    table = changed("value", layouts={"reward": {"train": "2-2-1", "fsdp": 1}})
    placement = take_devices(read_placement(table, MESH, ROLES), jax.devices())
    critic, reward = mesh_of(placement, "critic"), mesh_of(placement, "reward")
    assert ids(placement, "critic") == ids(placement, "reward") == [4, 5, 6, 7]
    assert critic.shape["fsdp"] == 4 and reward.shape["stage_gen"] == 2
    assert placement.pool_of("reward").layout_of("reward").name == "2-2-1 / 2-2-1-1"
    assert mesh_of(placement, "actor") is mesh_of(placement, "reference")


def test_a_pool_that_names_its_devices_leaves_the_others_idle():
    table = {"all": {"roles": ROLES, "train": "1-2-2", "devices": "0-3"}}
    pools = read_placement(table, MESH, ROLES)
    assert not takes_all(pools)
    assert ids(take_devices(pools, jax.devices()), "actor") == [0, 1, 2, 3]


def device(number: int, process: int):
    return types.SimpleNamespace(
        id=number, process_index=process, platform="cpu", device_kind="cpu"
    )


def test_every_process_takes_part_in_every_pool():
    devices = [device(i, i // 4) for i in range(8)]
    placement = take_devices(read_placement(NEMO, MESH, ROLES), devices)
    assert ids(placement, "actor") == [0, 1, 4, 5]
    assert ids(placement, "critic") == [2, 3, 6, 7]


def test_pools_may_have_whole_processes():
    pools = read_placement(NEMO, MESH, ROLES, whole_hosts=True)
    placement = take_devices(pools, [device(i, i // 2) for i in range(8)])
    assert ids(placement, "actor") == [0, 1, 2, 3]
    assert ids(placement, "critic") == [4, 5, 6, 7]
    # One process has all.
    assert ids(take_devices(pools, jax.devices()), "critic") == [4, 5, 6, 7]
    with pytest.raises(UserError, match="devices 0 to 3, which are not all of a process's"):
        take_devices(pools, [device(i, i // 3) for i in range(9)])
    beyond = read_placement(changed("value", devices="6-9"), MESH, ROLES, whole_hosts=True)
    with pytest.raises(UserError, match="devices 6 to 9, this run has 0 to 7"):
        take_devices(beyond, [device(i, i // 2) for i in range(8)])


def test_a_pool_that_processes_cannot_share_is_refused():
    table = {
        "policy": {"roles": ("actor",), "train": "1-1-3", "fsdp": 1},
        "rest": {"roles": ("critic", "reference", "reward"), "train": "1-1-5", "fsdp": 1},
    }
    devices = [device(i, i // 4) for i in range(8)]
    with pytest.raises(UserError, match="multiple of 2"):
        take_devices(read_placement(table, MESH, ROLES), devices)


def changed(pool: str, **row) -> dict:
    return {**NEMO, pool: {**NEMO[pool], **row}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed("value", roles=("critic",)), "role 'reward' has no pool; add it to the roles of"),
        (changed("value", roles=("critic", "reward", "actor")), "role 'actor' is in the pools"),
        (
            changed("value", roles=("critic", "reward", "judge")),
            "'judge', which is no role of this",
        ),
        (changed("value", train="1-3-1"), "pool value: mesh.fsdp=4"),
        (changed("value", devices="0-2"), "placement.value.devices=0-2 are 3 devices"),
        (changed("value", devices="3-0"), "placement.value.devices=3-0 are -2 devices"),
        (
            changed("value", layouts={"critic": {"train": "1-2-1", "fsdp": 1}}),
            "the pool has 4; choose p*t*d = 4",
        ),
        (changed("value", layouts={"critic": {"train": "1-4-1"}}), "layouts.critic: mesh.fsdp=4"),
        (
            changed("value", layouts={"actor": {"fsdp": 1}}),
            "has no role 'actor'; its roles are critic",
        ),
    ],
)
def test_tables_that_cannot_be(table, message):
    with pytest.raises(UserError) as error:
        read_placement(table, MESH, ROLES)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed("value", train="1-1-8", fsdp=1), "need 12 devices (policy 4 + value 8)"),
        (changed("value", devices="2-5"), "pools policy and value overlap: both have device 2"),
        (changed("value", devices="6-9"), "this run has 0 to 7"),
    ],
)
def test_devices_that_are_not_there(table, message):
    with pytest.raises(UserError) as error:
        take_devices(read_placement(table, MESH, ROLES), jax.devices())
    assert message in str(error.value)


def test_a_pool_may_have_every_setting_of_a_layout():
    kinds = typing.get_type_hints(LayoutConfig)
    of_the_run = {"simulated_devices", "layout"}
    assert typing.get_type_hints(OwnLayout) == {
        name: kind for name, kind in kinds.items() if name not in of_the_run
    }
