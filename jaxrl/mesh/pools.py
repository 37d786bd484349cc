"""Resource pools: the devices that each role runs on (HybridFlow sections 2.3 and 4.1).

A placement maps each pool to a layout and its roles. Roles of one pool are colocated: they share its devices
and take turns. Roles of different pools run at the same time, because JAX dispatches asynchronously: a value
is sent to another pool once it is computed, and Python waits only when it reads a value.

    {}                                       all colocated on all devices (DeepSpeed-Chat)
    {"actor":  {"roles": ("actor",),         all apart (OpenRLHF)
                "train": "1-4-1"},
     "critic": {"roles": ("critic",),
                "train": "1-2-1"}, ...}
    {"policy": {"roles": ("actor", "reference"), "train": "1-4-1"},
     "value":  {"roles": ("critic", "reward"),   "train": "1-4-1"}}      NeMo-Aligner

Colocated roles may have different layouts: "layouts" holds, by role, the settings that differ from those of
the pool. Their meshes are other arrangements of the same devices.

Pools never overlap. This file handles names and devices only; it does not know what a role does.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Required

from jax.sharding import Mesh
from pydantic import Field, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from jaxrl.checks import NAME, count
from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout, Sharding

# The name of the only pool in a run without a placement.
EVERYTHING = "all"


@with_config(extra="forbid", strict=True)
class OwnLayout(TypedDict, total=False):
    """Settings of `mesh` that differ for a pool or a role; the others are settings of the whole run."""

    train: Annotated[str, NAME]
    generate: Annotated[str, NAME]
    fsdp: Annotated[int, count(1)]
    expert: Annotated[int, count(1)]
    context: Annotated[int, count(1)]
    sharding: Sharding
    offload_training_state: bool


class PoolSettings(OwnLayout, total=False):
    """A pool of a placement.

    Attributes:
      roles: names of the roles that live there.
      devices: positions "first-last" among the devices of the run. Without them a pool takes as many devices
        as its layout needs, after those of the pools before it.
      layouts: by role the settings that differ from the pool's.
    """

    roles: Required[Annotated[tuple[str, ...] | list[str], Field(min_length=1)]]
    # At most 7 digits: `int` refuses text of thousands of them with an error of its own.
    devices: Annotated[str, Field(pattern=r"^[0-9]{1,7}-[0-9]{1,7}$")]
    layouts: dict[str, OwnLayout]


@dataclasses.dataclass(frozen=True)
class Pool:
    """A checked pool.

    Attributes:
      name: name of the pool.
      roles: its roles.
      config: layout settings of the pool.
      span: first and last position of its devices among those of the run; None takes the next free ones.
      own: layout settings of roles that differ from the pool's, by role.
      whole_hosts: whether it has all devices of its processes, else an equal part of every process's.
      devices: its devices; empty until `take_devices`.
    """

    name: str
    roles: tuple[str, ...]
    config: LayoutConfig
    span: tuple[int, int] | None = None
    own: Mapping[str, LayoutConfig] = dataclasses.field(default_factory=dict)
    whole_hosts: bool = False
    devices: tuple[Any, ...] = ()

    @functools.cached_property
    def layout(self) -> ParallelLayout:
        """The checked layout of the pool, for roles without one of their own."""
        where = f"pool {self.name}: " if self.name != EVERYTHING else ""
        return _checked(self.config, where)

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices

    @property
    def layouts(self) -> dict[str, ParallelLayout]:
        return {role: self.layout_of(role) for role in self.roles}

    def config_of(self, role: str) -> LayoutConfig:
        return self.own.get(role, self.config)

    def layout_of(self, role: str) -> ParallelLayout:
        if role not in self.own:
            return self.layout
        return _checked(self.own[role], f"placement.{self.name}.layouts.{role}: ")

    def mesh_of(self, role: str) -> Mesh:
        """The mesh of a role; roles with the same layout share one mesh."""
        return self._meshes[self.layout_of(role)]

    @functools.cached_property
    def _meshes(self) -> dict[ParallelLayout, Mesh]:
        layouts = dict.fromkeys(self.layouts.values())
        return {layout: build_mesh(layout, self.devices) for layout in layouts}


def _checked(config: LayoutConfig, where: str) -> ParallelLayout:
    try:
        return ParallelLayout.from_config(config)
    except UserError as error:
        raise UserError(f"{where}{error}") from error


def read_placement(
    table: Mapping[str, PoolSettings],
    mesh: LayoutConfig,
    roles: Sequence[str],
    *,
    whole_hosts: bool = False,
) -> tuple[Pool, ...]:
    """Reads and checks a placement, without devices.

    Args:
      table: the checked `placement` of a config. An empty one puts all roles into one pool of all devices.
      mesh: default settings of all pools.
      roles: roles of the run.
      whole_hosts: whether each pool has processes of its own.

    Raises:
      UserError: a role is missing, duplicated or unknown, or a layout is malformed.
    """
    if not table:
        everything = Pool(EVERYTHING, tuple(roles), mesh)
        _ = everything.layout  # checks it
        return (everything,)
    pools = tuple(
        dataclasses.replace(_read_pool(name, row, mesh), whole_hosts=whole_hosts)
        for name, row in table.items()
    )
    homes: dict[str, list[str]] = {role: [] for role in roles}
    for pool in pools:
        for role in pool.roles:
            if role not in homes:
                raise UserError(
                    f"placement.{pool.name} holds {role!r}, which is no role of this run; its roles are "
                    f"{', '.join(roles)}: take {role!r} off the table"
                )
            homes[role].append(pool.name)
    for role, found in homes.items():
        if not found:
            raise UserError(
                f"role {role!r} has no pool; add it to the roles of one of "
                f"{', '.join(f'placement.{pool.name}' for pool in pools)}"
            )
        if len(found) > 1:
            raise UserError(
                f"role {role!r} is in the pools {' and '.join(found)}; a role lives in one: keep one of them"
            )
    return pools


def places(table: Mapping[str, PoolSettings], role: str) -> bool:
    """Whether a pool of the placement names the role."""
    return any(role in row["roles"] for row in table.values())


def _read_pool(name: str, row: PoolSettings, mesh: LayoutConfig) -> Pool:
    own: Any = {key: value for key, value in row.items() if key in OwnLayout.__annotations__}
    config = dataclasses.replace(mesh, **own)
    roles, layouts, span = tuple(row["roles"]), {}, None
    for role, changes in row.get("layouts", {}).items():
        if role not in roles:
            raise UserError(
                f"placement.{name}.layouts.{role}: the pool has no role {role!r}; its roles are "
                f"{', '.join(roles)}"
            )
        # Generation uses the training layout by default. A role with its own training layout must not inherit
        # the generation layout of the pool.
        base = dataclasses.replace(config, generate="") if "train" in changes else config
        layouts[role] = dataclasses.replace(base, **changes)
    if "devices" in row:
        first, last = map(int, row["devices"].split("-"))
        span = first, last
    pool = Pool(name, roles, config, span, layouts)
    if span is not None and span[1] - span[0] + 1 != pool.num_devices:
        raise UserError(
            f"placement.{name}.devices={row.get('devices')} are {span[1] - span[0] + 1} devices, but its "
            f"layout {pool.layout.name} needs {pool.num_devices}; change one of them, or leave devices out"
        )
    for role, layout in pool.layouts.items():
        if layout.num_devices != pool.num_devices:
            raise UserError(
                f"placement.{name}.layouts.{role}: {layout.name} is of {layout.num_devices} devices, and the "
                f"pool has {pool.num_devices}; choose p*t*d = {pool.num_devices}, or give the role a pool"
            )
    return pool


@dataclasses.dataclass(frozen=True)
class Placement:
    """The disjoint pools of a run, with their devices."""

    pools: tuple[Pool, ...]

    def __post_init__(self):
        owners: dict[int, str] = {}
        for pool in self.pools:
            for device in pool.devices:
                if device.id in owners:
                    raise UserError(
                        f"pools {owners[device.id]} and {pool.name} overlap: both have device {device.id}; "
                        "give each devices of its own, or put their roles in one pool"
                    )
                owners[device.id] = pool.name

    @property
    def num_devices(self) -> int:
        return sum(len(pool.devices) for pool in self.pools)

    def pool_of(self, role: str) -> Pool:
        return next(pool for pool in self.pools if role in pool.roles)


def takes_all(pools: Sequence[Pool]) -> bool:
    """Whether the pools take all devices: True for a single pool without "devices"."""
    return len(pools) == 1 and pools[0].span is None


def take_devices(pools: Sequence[Pool], devices: Sequence[Any]) -> Placement:
    """Assigns devices to the pools.

    A single pool takes all devices. In a multi-process run every pool takes the same number of devices from
    each process, or (`Pool.whole_hosts`) all devices of some processes.

    Raises:
      UserError: there are too few devices, pools overlap, or a pool does not divide over the processes.
    """
    if takes_all(pools):
        (pool,) = pools
        if pool.num_devices != len(devices):
            raise UserError(
                f"layout {pool.layout.name} needs {pool.num_devices}, found {len(devices)} "
                f"{devices[0].device_kind}; run on as many, change mesh.train and mesh.generate to what is "
                f"here, or, for a small model, set mesh.simulated_devices={pool.num_devices}"
            )
        return Placement((dataclasses.replace(pool, devices=tuple(devices)),))
    wanted = sum(pool.num_devices for pool in pools)
    if wanted > len(devices):
        needs = " + ".join(f"{pool.name} {pool.num_devices}" for pool in pools)
        raise UserError(
            f"the pools need {wanted} devices ({needs}), this run has {len(devices)}; make some smaller, or "
            "put roles in one pool, which share its devices"
        )
    by_process: dict[int, list[Any]] = collections.defaultdict(list)
    for device in devices:
        by_process[device.process_index].append(device)
    placed = []
    taken = 0
    for pool in pools:
        if pool.span is None:
            first, last = taken, taken + pool.num_devices - 1
        else:
            first, last = pool.span
        # Positions that are given move the next pool behind them, too.
        taken = last + 1
        take = _of_whole_hosts if pool.whole_hosts else _shares
        own = take(pool, first, taken, by_process)
        placed.append(dataclasses.replace(pool, devices=tuple(own)))
    return Placement(tuple(placed))


def _shares(pool: Pool, first: int, end: int, by_process: Mapping[int, list[Any]]) -> list[Any]:
    """Equally many devices of each process."""
    num_hosts = len(by_process)
    if first % num_hosts or end % num_hosts:
        raise UserError(
            f"pool {pool.name} takes devices {first} to {end - 1} of {num_hosts} processes, which do not "
            f"have equal shares of it; make the size of every pool a multiple of {num_hosts}, or set "
            "hosts.pools_apart"
        )
    # Some processes may have more devices than others; a pool takes equally many of each.
    shared = num_hosts * min(map(len, by_process.values()))
    if end > shared:
        raise _beyond(pool, first, end, shared)
    # A span counts the devices of all processes, of which each gives the same slice.
    part = slice(first // num_hosts, end // num_hosts)
    return [device for host in by_process.values() for device in host[part]]


def _of_whole_hosts(
    pool: Pool, first: int, end: int, by_process: Mapping[int, list[Any]]
) -> list[Any]:
    """All devices of some processes; in a run of one process any of its devices."""
    devices = [device for host in by_process.values() for device in host]
    if end > len(devices):
        raise _beyond(pool, first, end, len(devices))
    own = devices[first:end]
    of_hosts = sum(len(by_process[i]) for i in {device.process_index for device in own})
    if of_hosts > len(own) and len(by_process) > 1:
        raise UserError(
            f"pool {pool.name} takes devices {first} to {end - 1}, which are not all of a process's; with "
            f"hosts.pools_apart a pool has whole processes, here of {of_hosts} devices: change its layout"
        )
    return own


def _beyond(pool: Pool, first: int, end: int, there: int) -> UserError:
    return UserError(
        f"pool {pool.name} takes devices {first} to {end - 1}, this run has 0 to {there - 1}; move it, "
        "or make pools smaller"
    )
