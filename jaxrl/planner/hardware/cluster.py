"""A cluster: devices of one kind in an existing shape, with its possible pools and its links.

    h100:16x8     16 hosts of 8 GPUs
    v5p:4x4x8     a slice of 128 chips

A run has a process on each host, and its pools have an equal part of every host (`mesh.pools`):

    2 hosts of 4        host 0    host 1
    pool of 4 devices   0 1 . .   0 1 . .
    pool of 4 devices   . . 0 1   . . 0 1
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from jaxrl.planner.hardware.accelerators import Accelerator
from jaxrl.planner.hardware.topologies import check_shape, check_topology, shape_text

_TPU_HOST_CHIPS = 4


class ClusterDevice(NamedTuple):
    """A device of a cluster that need not be present, as `mesh.pools.take_devices` reads it."""

    id: int
    process_index: int


class Ring(NamedTuple):
    """The links of the slowest of several groups of devices, each of which is a ring.

    Attributes:
      members: number of devices of a group.
      near, far: hops of a gather over fast links, and over slower ones.
      gbs: vendor's GB/s at which each member sends to the next one, if all groups send at the same time.
    """

    members: int
    near: int
    far: int
    gbs: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in a shape.

    Attributes:
      accelerator: kind of the devices.
      shape: hosts x devices for GPUs, sides of the torus in chips for TPUs.
      whole_hosts: whether a pool has whole hosts or a part of one, as in the system of the HybridFlow paper.
        Our runs cannot do this.
    """

    accelerator: Accelerator
    shape: tuple[int, ...]
    whole_hosts: bool = False

    def __post_init__(self):
        check_shape(self.accelerator, self.shape)

    @staticmethod
    def parse(text: str) -> Cluster:
        """Parses "KIND:AxBxC"; KIND is a name of the hardware table or the path of a JSON file.

        Raises:
          UserError: the text, the kind or the topology is wrong.
        """
        kind, shape = check_topology(text)
        return Cluster(kind, shape)

    @property
    def name(self) -> str:
        """The name, in the format of `parse`."""
        return f"{self.accelerator.name}:{shape_text(self.shape)}"

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.accelerator.num_devices(self.shape)

    @property
    def host_devices(self) -> int:
        """The number of devices of a host; TPU hosts have four chips."""
        kind = self.accelerator
        if kind.arrangement == "hosts":
            return self.shape[1]
        return (
            min(_TPU_HOST_CHIPS, math.prod(self.shape)) * self.num_devices // math.prod(self.shape)
        )

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return self.num_devices // self.host_devices

    @property
    def devices(self) -> tuple[ClusterDevice, ...]:
        """The devices of a run with a process on each host."""
        per_host = self.num_devices if self.whole_hosts else self.host_devices
        return tuple(ClusterDevice(n, n // per_host) for n in range(self.num_devices))

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """The possible sizes of a pool, ascending."""
        if not self.whole_hosts:
            return tuple(self.num_hosts * k for k in range(1, self.host_devices + 1))
        slabs = max(self.shape) if self.accelerator.arrangement == "torus" else self.shape[0]
        slab = self.num_devices // slabs
        parts, size = set(), slab
        while size > 1:
            size //= next(q for q in range(2, size + 1) if size % q == 0)
            parts.add(size)
        return tuple(sorted(parts | {slab * k for k in range(1, slabs + 1)}))

    def ring(self, groups: np.ndarray) -> Ring:
        """The links of groups of devices inside a pool.

        A pool with a part of each host has that part of the host's links to others, and groups that leave the
        host share it. In a TPU slice it has that part of every link, because the chips of other pools lie
        between its own.

        Args:
          groups: int [groups, members], positions of all devices of the pool; neighbours in a row send to
            each other.
        """
        kind, members = self.accelerator, groups.shape[1]
        here = self.host_devices if self.whole_hosts else -(-groups.size // self.num_hosts)
        hosts = groups // here
        crossings = int((hosts[:, 1:] != hosts[:, :-1]).sum(axis=1).max(initial=0))
        part = here / self.host_devices
        if kind.arrangement == "torus":
            # A ring goes both ways. All devices of a slice are neighbours.
            hops, far = -(-members // 2), -(-crossings // 2) if part < 1 else 0
            return Ring(members, hops - far, far, kind.link_gbs * (part if far else 1))
        if not crossings:
            return Ring(members, members - 1, 0, kind.link_gbs)
        leaving = np.bincount(hosts[hosts != np.roll(hosts, -1, axis=1)]).max()
        gbs = min(kind.link_gbs, kind.host_gbs * part / int(leaving))
        return Ring(members, members - 1 - crossings, crossings, gbs)
