"""Resource pools: which devices a role runs on (HybridFlow sections 2.3 and 4.1).

A placement is a table, pool -> layout and roles. Roles of one pool are colocated: they share its devices
and take turns. Roles of different pools run at the same time, because JAX dispatches without waiting: a
value that crosses over is sent when it exists, and nothing waits until somebody reads.

    {}                                       all colocated on all devices (DeepSpeed-Chat)
    {"actor":  {"roles": ("actor",),         all apart (OpenRLHF)
                "train": "1-4-1"},
     "critic": {"roles": ("critic",),
                "train": "1-2-1"}, ...}
    {"policy": {"roles": ("actor", "reference"), "train": "1-4-1"},
     "value":  {"roles": ("critic", "reward"),   "train": "1-4-1"}}      NeMo-Aligner

Pools never overlap. This file knows names and devices; what a role is, is not its business.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout

# The pool of a run without a table.
EVERYTHING = "all"

_OWN_SETTINGS = ("roles", "devices")
# One for the run, not for a pool.
_RUN_SETTINGS = ("simulated_devices", "layout", "hardware")


@dataclasses.dataclass(frozen=True)
class Pool:
    """A row of the table, checked; no devices yet.

    Attributes:
      name: of the pool.
      roles: that live in it.
      config: how they use its devices.
      span: positions of its devices among those of the run, first and last; None takes the next ones.
    """

    name: str
    roles: tuple[str, ...]
    config: LayoutConfig
    span: tuple[int, int] | None = None

    @functools.cached_property
    def layout(self) -> ParallelLayout:
        """The checked layout."""
        try:
            return ParallelLayout.from_config(self.config)
        except UserError as error:
            where = f"pool {self.name}: " if self.name != EVERYTHING else ""
            raise UserError(f"{where}{error}") from error


@dataclasses.dataclass(frozen=True)
class ResourcePool:
    """A named set of devices with a layout of its own."""

    name: str
    roles: tuple[str, ...]
    config: LayoutConfig
    layout: ParallelLayout
    devices: tuple[Any, ...]

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The pool's devices as its layout arranges them; colocated roles share it."""
        return build_mesh(self.layout, self.devices)


def read_placement(
    table: Mapping[str, Mapping[str, Any]], mesh: LayoutConfig, roles: Sequence[str]
) -> tuple[Pool, ...]:
    """Checks a placement, without devices.

    Args:
      table: pool -> {"roles": names, "devices": "first-last", and settings of `mesh` that differ}. Without
        "devices" a pool takes as many as its layout needs, after those of the pools before it. Empty: all
        roles in one pool, of all devices.
      mesh: settings of all pools.
      roles: the run's.

    Raises:
      UserError: a role has no pool, or two, or does not exist; a setting does not; a layout is none.
    """
    if not table:
        everything = Pool(EVERYTHING, tuple(roles), mesh)
        _ = everything.layout  # checks it
        return (everything,)
    pools = tuple(_read_pool(name, row, mesh) for name, row in table.items())
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


def places(table: Mapping[str, Mapping[str, Any]], role: str) -> bool:
    """Whether a row of a placement names the role; UserError if a row has no roles."""
    return any(role in _roles_of(name, row) for name, row in table.items())


def _roles_of(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    roles = row.get("roles")
    named = isinstance(roles, list | tuple) and all(isinstance(role, str) for role in roles)
    if not named or not roles:
        raise UserError(
            f'placement.{name}.roles is {roles!r}; name the roles that live there, such as ("actor",), or '
            "take the pool off the table"
        )
    return tuple(roles)


def _read_pool(name: str, row: Mapping[str, Any], mesh: LayoutConfig) -> Pool:
    known = [f.name for f in dataclasses.fields(mesh) if f.name not in _RUN_SETTINGS]
    unknown = set(row) - {*_OWN_SETTINGS, *known}
    if unknown:
        raise UserError(
            f"placement.{name} has {', '.join(sorted(unknown))}; a pool has "
            f"{', '.join((*_OWN_SETTINGS, *known))}"
        )
    changes = {key: value for key, value in row.items() if key in known}
    try:
        config = dataclasses.replace(mesh, **changes)
    except UserError as error:
        raise UserError(f"placement.{name}.{error}") from error
    pool = Pool(name, _roles_of(name, row), config, _span(name, row.get("devices")))
    layout = pool.layout
    if pool.span is not None and pool.span[1] - pool.span[0] + 1 != layout.num_devices:
        raise UserError(
            f"placement.{name}.devices={row['devices']} are {pool.span[1] - pool.span[0] + 1} devices, but "
            f"its layout {layout.name} needs {layout.num_devices}; change one of them, or leave devices out"
        )
    return pool


def _span(name: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,7})-(\d{1,7})", text) if isinstance(text, str) else None
    if match is None or int(match[2]) < int(match[1]):
        raise UserError(
            f"placement.{name}.devices={text!r} is not first-last, two positions such as '0-3'; leave it "
            "out to take the next free devices"
        )
    return int(match[1]), int(match[2])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The pools of a run. Disjoint."""

    pools: tuple[ResourcePool, ...]

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
        """Devices that any pool has."""
        return sum(len(pool.devices) for pool in self.pools)

    def pool_of(self, role: str) -> ResourcePool:
        """Where a role lives."""
        return next(pool for pool in self.pools if role in pool.roles)


def take_devices(pools: Sequence[Pool], devices: Sequence[Any]) -> Placement:
    """Gives the pools their devices.

    A single pool takes them all. Where several processes share the run, every pool takes as many of each
    process: each then takes part in every role.

    Raises:
      UserError: there are too few devices, pools overlap, or processes have unequal shares of one.
    """
    if len(pools) == 1 and pools[0].span is None:
        (pool,) = pools
        return Placement((_with(pool, devices),))
    wanted = sum(pool.layout.num_devices for pool in pools)
    if wanted > len(devices):
        needs = " + ".join(f"{pool.name} {pool.layout.num_devices}" for pool in pools)
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
            first, last = taken, taken + pool.layout.num_devices - 1
        else:
            first, last = pool.span
        taken = last + 1
        placed.append(_with(pool, _share(pool, list(by_process.values()), first, last + 1)))
    return Placement(tuple(placed))


def _share(pool: Pool, hosts: list[list[Any]], first: int, end: int) -> list[Any]:
    """Devices `first` to `end` of the run, counted round the processes, so that each has as many."""
    n = len(hosts)
    if first % n or end % n:
        raise UserError(
            f"pool {pool.name} takes devices {first} to {end - 1} of {n} processes, which do not have equal "
            f"shares of it; make the size of every pool a multiple of {n}"
        )
    if end > n * min(map(len, hosts)):
        raise UserError(
            f"pool {pool.name} takes devices {first} to {end - 1}, this run has 0 to "
            f"{n * min(map(len, hosts)) - 1}; move it, or make pools smaller"
        )
    return [device for own in hosts for device in own[first // n : end // n]]


def _with(pool: Pool, devices: Sequence[Any]) -> ResourcePool:
    return ResourcePool(pool.name, pool.roles, pool.config, pool.layout, tuple(devices))
