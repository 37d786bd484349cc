"""Sums the traffic between devices of a compiled program, by mesh axes.

Bytes are a lower bound of what a device receives, with the best algorithm, times the rounds of loops.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxrl.planner.compiled.hlo import Collective

# (kind, axes, across hosts).
_Key: TypeAlias = tuple[str, tuple[str, ...], bool]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes.

    Attributes:
      kind: XLA's name, such as "all-gather".
      axes: mesh axes along which devices exchange data.
      across_hosts: whether some groups span several hosts.
      calls: number of collectives.
      nbytes: bytes received by the device that receives most.
    """

    kind: str
    axes: tuple[str, ...]
    across_hosts: bool
    calls: float
    nbytes: float

    def times(self, factor: float, *, share: float = 1.0) -> Traffic:
        """The traffic of `factor` repetitions with this share of the bytes."""
        nbytes = self.nbytes * factor * share
        return dataclasses.replace(self, calls=self.calls * factor, nbytes=nbytes)


def traffic_of(
    found: Iterable[tuple[float, Collective]], mesh: Mesh, *, devices_per_host: int
) -> list[Traffic]:
    """Sums collectives by kind and axes, those with the most bytes first.

    Args:
      found: (number of runs, collective); devices are numbered in the order of the flattened mesh.
      mesh: mesh of the program.
      devices_per_host: number of devices of a host; they have consecutive ids.
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
    """Adds up the traffic of several functions by kind and axes, most bytes first."""
    sums: dict[tuple, Traffic] = {}
    for part in parts:
        key = part.kind, part.axes, part.across_hosts
        before = sums.get(key, dataclasses.replace(part, calls=0.0, nbytes=0.0))
        sums[key] = dataclasses.replace(
            part, calls=before.calls + part.calls, nbytes=before.nbytes + part.nbytes
        )
    return sorted(sums.values(), key=lambda t: -t.nbytes)


def axes_of(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes along which the devices of a collective's groups differ."""
    sizes = tuple(mesh.shape.values())
    places = np.stack(np.unravel_index(np.arange(mesh.size), sizes), axis=-1)
    differ = np.zeros(len(sizes), bool)
    for group in collective.groups:
        of_group = places[list(group)]
        differ |= (of_group != of_group[:1]).any(axis=0)
    return tuple(name for name, along in zip(mesh.shape, differ, strict=True) if along)
