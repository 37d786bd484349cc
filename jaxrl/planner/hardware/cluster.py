"""A cluster: devices of one kind in an existing shape, with its possible pools and its links.

    h100:16x8     16 hosts of 8 GPUs
    v5p:4x4x8     a slice of 128 chips

Devices are numbered so that neighbours are close. A pool is a contiguous range of them: whole slabs (a host
of GPUs, a layer of a torus), or a half, a quarter, ... of a slab. Pools of such sizes fit side by side, the
largest first, without crossing the border of a slab.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxrl.mesh.hardware import Accelerator
from jaxrl.planner.hardware.topologies import check_shape, check_topology, shape_text

_TPU_HOST_CHIPS = 4


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in a shape.

    Attributes:
      accelerator: kind of the devices.
      shape: hosts x devices for GPUs, sides of the torus in chips for TPUs.
    """

    accelerator: Accelerator
    shape: tuple[int, ...]

    def __post_init__(self):
        check_shape(self.accelerator, self.shape)

    @staticmethod
    def parse(text: str) -> Cluster:
        """Parses "KIND:AxBxC"; KIND is a name of the hardware table or the path of a JSON file.

        Raises:
          UserError: the text, the kind or the topology is wrong.
        """
        return Cluster(*check_topology(text))

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

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """The possible sizes of a pool, ascending."""
        slabs = max(self.shape) if self.accelerator.arrangement == "torus" else self.shape[0]
        slab = self.num_devices // slabs
        parts, size = set(), slab
        while size > 1:
            size //= next(q for q in range(2, size + 1) if size % q == 0)
            parts.add(size)
        return tuple(sorted(parts | {slab * k for k in range(1, slabs + 1)}))

    def group_gbs(self, members: int, stride: int) -> float:
        """Vendor's GB/s at which each member of a group sends to the next one in a ring.

        If a group spans hosts, its members share the links of their host with neighbouring groups.

        Args:
          members: number of members of the group.
          stride: distance in devices between members.
        """
        kind = self.accelerator
        if members * stride <= kind.domain:
            return kind.link_gbs
        in_host = max(1, kind.devices_per_host // stride)
        return min(kind.link_gbs, kind.host_gbs * in_host / kind.devices_per_host)
