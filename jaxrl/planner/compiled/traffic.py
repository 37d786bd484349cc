"""What a compiled program moves between devices, by the axes of their mesh.

Bytes are those that a device receives at least, by the best algorithm, loops multiplied out.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxrl.planner.compiled.hlo import Collective

# Kind, axes, across hosts.
_Key: TypeAlias = tuple[str, tuple[str, ...], bool]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes.

    Attributes:
      kind: as XLA calls it, "all-gather" and so on.
      axes: of the mesh, along which devices exchange.
      across_hosts: some of them are in different hosts.
      calls: how often a device takes part.
      nbytes: that the device receives which receives most.
    """

    kind: str
    axes: tuple[str, ...]
    across_hosts: bool
    calls: float
    nbytes: float

    def times(self, factor: float) -> Traffic:
        """So many times of it."""
        return dataclasses.replace(self, calls=self.calls * factor, nbytes=self.nbytes * factor)


def traffic_of(
    found: Iterable[tuple[float, Collective]], mesh: Mesh, *, devices_per_host: int
) -> list[Traffic]:
    """Sums collectives by kind and axes, those with the most bytes first.

    Args:
      found: (how often, what), devices numbered as in the mesh, flattened.
      mesh: they run on.
      devices_per_host: whose devices have consecutive ids.
    """
    hosts = np.array([d.id // devices_per_host for d in mesh.devices.flat])
    calls: dict[_Key, float] = collections.defaultdict(float)
    received: dict[_Key, np.ndarray] = {}
    for times, each in found:
        axes = axes_of(each, mesh)
        if not axes:
            continue
        wide = any(len(set(hosts[list(group)])) > 1 for group in each.groups)
        key = each.kind, axes, wide
        calls[key] += times
        received[key] = received.get(key, np.zeros(mesh.size)) + times * each.received(mesh.size)
    sums = (Traffic(*key, calls[key], float(received[key].max())) for key in calls)
    return sorted(sums, key=lambda t: -t.nbytes)


def merged(parts: Iterable[Traffic]) -> list[Traffic]:
    """The same kinds and axes of several programs, added."""
    sums: dict[tuple, Traffic] = {}
    for part in parts:
        key = part.kind, part.axes, part.across_hosts
        before = sums.get(key, dataclasses.replace(part, calls=0.0, nbytes=0.0))
        sums[key] = dataclasses.replace(
            part, calls=before.calls + part.calls, nbytes=before.nbytes + part.nbytes
        )
    return sorted(sums.values(), key=lambda t: -t.nbytes)


def axes_of(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
    """Axes along which the devices of a collective's groups differ."""
    sizes = tuple(mesh.shape.values())
    places = np.stack(np.unravel_index(np.arange(mesh.size), sizes), axis=-1)
    differ = np.zeros(len(sizes), bool)
    for group in collective.groups:
        of_group = places[list(group)]
        differ |= (of_group != of_group[:1]).any(axis=0)
    return tuple(name for name, along in zip(mesh.shape, differ, strict=True) if along)
