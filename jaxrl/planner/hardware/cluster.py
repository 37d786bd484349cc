"""A cluster: devices of one kind in a shape that exists, the pools it can be cut into, and what links them.

    h100:16x8     16 hosts of 8 GPUs
    v5p:4x4x8     a slice of 128 chips

Devices are numbered so that neighbours are close. A pool is a run of them: whole slabs (a host of GPUs, a
layer of a torus), or a half, a quarter, ... of one. Such sizes can be laid out side by side in any number,
the largest first, without one crossing the border of another's slab.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxrl.mesh.hardware import Accelerator
from jaxrl.planner.hardware.topologies import check_shape, check_topology, shape_text


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in a shape.

    Attributes:
      accelerator: of which kind they are.
      shape: hosts x devices of GPUs, sides of a torus in chips.
    """

    accelerator: Accelerator
    shape: tuple[int, ...]

    def __post_init__(self):
        check_shape(self.accelerator, self.shape)

    @staticmethod
    def parse(text: str) -> Cluster:
        """The cluster that "KIND:AxBxC" names; KIND is a name of the table or a JSON file's path.

        Raises:
          UserError: the text, the kind or the topology is wrong.
        """
        return Cluster(*check_topology(text))

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.accelerator.name}:{shape_text(self.shape)}"

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.accelerator.num_devices(self.shape)

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """Numbers of devices that a pool may have, growing."""
        slabs = max(self.shape) if self.accelerator.arrangement == "torus" else self.shape[0]
        slab = self.num_devices // slabs
        parts, size = set(), slab
        while size > 1:
            size //= next(q for q in range(2, size + 1) if size % q == 0)
            parts.add(size)
        return tuple(sorted(parts | {slab * k for k in range(1, slabs + 1)}))

    def group_gbs(self, members: int, stride: int) -> float:
        """GB/s at which a member of a group sends to the next in a ring, by the vendor.

        Members of a group that spans hosts share what leaves their host with the groups beside it.

        Args:
          members: of the group.
          stride: devices from one member to the next.
        """
        kind = self.accelerator
        if members * stride <= kind.domain:
            return kind.link_gbs
        in_host = max(1, kind.devices_per_host // stride)
        return min(kind.link_gbs, kind.host_gbs * in_host / kind.devices_per_host)
