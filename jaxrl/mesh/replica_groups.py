"""The processes that hold whole replicas of the generation layout together, and what they exchange.

Example: four processes of four devices each.

    devices of a replica    replicas of each group      groups
    2 (t_g = 2)             0 1 | 2 3 | 4 5 | 6 7       {0} {1} {2} {3}
    8 (t_g = 8)             0       | 1                 {0, 1} {2, 3}

Replicas need nothing of each other to sample. So each group runs programs of its own, on a mesh of its own
replicas, and no process plans the work of another group. Each gets what it needs of the samples of others,
over the devices.

A run that repeats the schedule of another has the groups of that one (`members`), whatever its own processes
are. Then a process may be in several groups.

    D devices, those of a group together   C values of a device
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import UserError
from jaxrl.mesh.handover import put
from jaxrl.mesh.hosts import fetch, gather
from jaxrl.mesh.rules import GENERATE_RULES

# Axes along which the generation layout splits weights; along all others it copies them.
_OF_WEIGHTS = {
    axis
    for name in ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "vocab")
    for axis in GENERATE_RULES[name]
}
# Values that all devices together send at once: a device receives as many, 64 MiB.
_MOST_SENT = 2**24


def _process_of(device: Any) -> int:
    return device.process_index


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """The groups of a mesh.

    Attributes:
      processes: processes of each group.
      meshes: mesh of each group, with the axes of the whole mesh.
      members: group of each replica.
      here: groups with devices of this process, ascending.
    """

    processes: tuple[tuple[int, ...], ...]
    meshes: tuple[Mesh, ...]
    members: tuple[int, ...]
    here: tuple[int, ...]

    def view(self, weights: Any, g: int) -> Any:
        """Weights in the generation layout of the whole mesh as arrays on that of group g, without copies."""
        devices = set(self.meshes[g].devices.flat)

        def on_group(leaf: Any) -> jax.Array:
            sharding = NamedSharding(self.meshes[g], leaf.sharding.spec)
            parts = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

        return jax.tree.map(on_group, weights)

    def share_out(self, work_N: np.ndarray, busy_G: Sequence[float] = ()) -> np.ndarray:
        """The group that does each of N pieces of work, int [N]; devices get about equally much.

        Args:
          work_N: amount of work of each piece, not negative.
          busy_G: what each group has to do already; none by default.
        """
        # The largest piece goes where there is least work so far, and of equal ones to the fewest pieces.
        loads = [
            (busy / mesh.size, 0.0, g)
            for g, (mesh, busy) in enumerate(
                zip(self.meshes, busy_G or [0.0] * len(self.meshes), strict=True)
            )
        ]
        heapq.heapify(loads)
        group_N = np.zeros(len(work_N), int)
        for n in np.argsort(-work_N, kind="stable").tolist():
            work, pieces, g = heapq.heappop(loads)
            group_N[n] = g
            of_device = 1 / self.meshes[g].size
            heapq.heappush(loads, (work + float(work_N[n]) * of_device, pieces + of_device, g))
        return group_N

    def gather(
        self, contents: Mapping[int, np.ndarray], wanted: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """The content of each group, int32, or what this process wants of it. Collective.

        Args:
          contents: content of each group in `here`, int32, one-dimensional, of any length; equal in all
            processes of the group.
          wanted: ranges of the content of each group, int [K, 2], in their order, without overlaps; they are
            returned one after another. None is all. Only these take memory.
        """
        num_devices = np.array([mesh.size for mesh in self.meshes])
        ends = np.cumsum(num_devices)
        firsts = ends - num_devices
        # Through the hosts: a program on the devices would not wait for those that still sample.
        told = gather(lambda: [(g, len(content)) for g, content in contents.items()])
        size_of = {g: size for of_process in told for g, size in of_process}
        sizes = np.array([size_of[g] for g in range(len(self.meshes))])
        C = int((-(-sizes // num_devices)).max())
        # Few different sizes, because each is a program.
        step = min(max(1, _MOST_SENT // int(ends[-1])), 1 << C.bit_length())
        ranges = [np.array([[0, n]]) for n in sizes] if wanted is None else wanted
        kept = [np.zeros((r[:, 1] - r[:, 0]).sum(), np.int32) for r in ranges]
        for start in range(0, C, step):
            part_DC = np.zeros((ends[-1], step), np.int32)
            for g, content in contents.items():
                for d in range(num_devices[g]):
                    values = content[d * C + start : d * C + min(start + step, C)]
                    part_DC[firsts[g] + d, : len(values)] = values
            all_DC = self._replicated(part_DC)[:, : C - start]
            for g, first in enumerate(firsts):
                for d, values in enumerate(all_DC[first : ends[g]]):
                    _keep(kept[g], ranges[g], values, d * C + start)
        return kept

    def _replicated(self, value_DC: np.ndarray) -> np.ndarray:
        devices = np.array([device for mesh in self.meshes for device in mesh.devices.flat])
        return fetch(put(value_DC, NamedSharding(Mesh(devices, "all"), P("all"))))


def _keep(kept: np.ndarray, ranges: np.ndarray, values: np.ndarray, low: int) -> None:
    """Writes what is wanted of some values, the first at index `low`, to their places in `kept`."""
    high = low + len(values)
    ends = np.cumsum(ranges[:, 1] - ranges[:, 0])
    first, last = np.searchsorted(ranges[:, 1], low, "right"), np.searchsorted(ranges[:, 0], high)
    for start, stop, end in zip(*ranges[first:last].T, ends[first:last], strict=True):
        a, b = max(start, low), min(stop, high)
        kept[end - (stop - a) : end - (stop - b)] = values[a - low : b - low]


def replica_groups(
    mesh: Mesh | AbstractMesh,
    process_of: Callable[[Any], int] = _process_of,
    *,
    members: Sequence[int] | None = None,
) -> ReplicaGroups | None:
    """The groups of a mesh; None if there is only one, or no devices.

    Args:
      mesh: devices, laid out for generation.
      process_of: function from a device to its process; replaced in tests.
      members: group of each replica, from 0, as another run had them. None makes them by processes, those of
        the first processes first.

    Raises:
      UserError: `members` are of another number of replicas.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    names = mesh.axis_names
    of_weights = [i for i, name in enumerate(names) if name in _OF_WEIGHTS]
    others = [i for i, name in enumerate(names) if name not in _OF_WEIGHTS]
    grid = mesh.devices.transpose(*others, *of_weights)
    replicas = grid.reshape(-1, *grid.shape[len(others) :])
    processes_of = [{process_of(device) for device in replica.flat} for replica in replicas]
    if members is None:
        members = _members(processes_of)
    if len(members) != len(replicas):
        raise UserError(
            f"the recorded schedule (rollout.schedule) has {len(members)} replicas of the sampler, and this "
            f"run has {len(replicas)}: repeat it on as many devices"
        )
    if max(members, default=0) == 0:
        return None
    # All replicas lie along one axis.
    sizes = [
        replicas.shape[1 + of_weights.index(i)] if i in of_weights else 1 for i in range(len(names))
    ]
    meshes, processes = [], []
    for g in range(max(members) + 1):
        of_group = [r for r, each in enumerate(members) if each == g]
        sizes[others[0]] = len(of_group)
        devices = np.moveaxis(replicas[of_group], 0, sum(i < others[0] for i in of_weights))
        meshes.append(Mesh(devices.reshape(sizes), names, axis_types=mesh.axis_types))
        processes.append(tuple(sorted(set().union(*(processes_of[r] for r in of_group)))))
    here = tuple(g for g, each in enumerate(processes) if jax.process_index() in each)
    return ReplicaGroups(tuple(processes), tuple(meshes), tuple(members), here)


def _members(processes_of: Sequence[set[int]]) -> list[int]:
    """The group of each replica: replicas on a common process are of one."""
    groups: list[tuple[set[int], list[int]]] = []
    for r, processes in enumerate(processes_of):
        group = (set(processes), [r])
        for other in [other for other in groups if other[0] & processes]:
            groups.remove(other)
            group = (group[0] | other[0], other[1] + group[1])
        groups.append(group)
    groups.sort(key=lambda group: min(group[0]))
    group_of = {r: g for g, (_, of_group) in enumerate(groups) for r in of_group}
    return [group_of[r] for r in range(len(processes_of))]
