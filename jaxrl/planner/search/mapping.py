"""The result of a search: pools, strategy of each role, and the cost breakdown."""

from __future__ import annotations

import collections.abc
import dataclasses
import math

from jaxrl.planner.search.placements import Placement, placement_name
from jaxrl.planner.simulation.step_simulator import RoleMapping, StageBreakdown


@dataclasses.dataclass(frozen=True)
class ColocatedSet:
    """Devices shared by several roles, which run one after the other.

    Attributes:
      roles: names of the roles.
      first: index of the first device.
      devices: number of devices, contiguous.
    """

    roles: tuple[str, ...]
    first: int
    devices: int

    @property
    def name(self) -> str:
        """The name in a config's placement: "0-63"."""
        return f"{self.first}-{self.first + self.devices - 1}"


@dataclasses.dataclass(frozen=True)
class PlacementResult:
    """The best result of a placement.

    Attributes:
      placement: partition of the roles into pools.
      devices: number of devices per pool; () if it does not fit, or if a bound shows that it is slower.
      seconds: seconds of a step; infinite if it does not fit, None if only a bound is known.
    """

    placement: Placement
    devices: tuple[int, ...]
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A mapping that is nearly as fast as the fastest.

    Attributes:
      name: description of its pools, or of its layouts.
      slower: its seconds of a step over those of the fastest, minus 1.
    """

    name: str
    slower: float


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The fastest mapping of a dataflow, by simulation: all its numbers are predictions.

    Attributes:
      dataflow, cluster: names of both.
      num_devices: number of devices of the cluster.
      pools: pools, side by side; some devices may be idle.
      roles: mapping of each role, by name.
      breakdown: costs of each stage.
      placements: all searched placements, fastest first.
      budget_bytes: bytes per device that no pool exceeds.
      alternatives: mappings that are nearly as fast, fastest first; empty if the search did not keep them.
      common_rows: rows of a microbatch that all roles were simulated with; 0 if each role had its own number.
    """

    dataflow: str
    cluster: str
    num_devices: int
    pools: tuple[ColocatedSet, ...]
    roles: collections.abc.Mapping[str, RoleMapping]
    breakdown: tuple[StageBreakdown, ...]
    placements: tuple[PlacementResult, ...]
    budget_bytes: float
    alternatives: tuple[Alternative, ...] = ()
    common_rows: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of a step: the sum of its stages."""
        return sum(stage.seconds for stage in self.breakdown)

    @property
    def placement(self) -> Placement:
        """The partition of the roles into pools."""
        return tuple(pool.roles for pool in self.pools)

    @property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch: those of the simulation, or the smallest number that suits every role.

        The replicas and stages of every role divide it.
        """
        return self.common_rows or math.lcm(
            *(role.strategy.row_parts for role in self.roles.values())
        )

    def peak_bytes(self, pool: int) -> float:
        """Peak bytes per device of a pool: all resident buffers plus the largest temporaries."""
        resident = {
            task.role: task.costs.resident_bytes
            for stage in self.breakdown
            for task in stage.tasks
            if task.pool == pool and task.costs.resident
        }
        # A trained role's forward pass reuses the resident buffers of its training, its last task.
        transient = [
            task.costs.transient_bytes
            for stage in self.breakdown
            for task in stage.tasks
            if task.pool == pool
        ]
        return sum(resident.values()) + max(transient, default=0.0)

    def lines(self) -> list[str]:
        """Describes the mapping with its cost breakdown, as lines of text."""
        found = [
            f"{self.dataflow} on {self.cluster}: {placement_name(self.placement)}, "
            f"{self.seconds:,.1f} s a step (predicted)"
        ]
        for i, pool in enumerate(self.pools):
            found.append(
                f"pool {i}: {pool.devices} devices {pool.name}, {self.peak_bytes(i) / 1e9:.1f} of "
                f"{self.budget_bytes / 1e9:.1f} GB"
            )
            for name in pool.roles:
                role = self.roles[name]
                line = f"  {name}: {role.strategy.name}"
                if (g := role.generation) is not None:
                    line += f"; generation {role.layout.name.split(' / ')[1]}, {g.slots} slots a replica"
                found.append(line)
        for stage in self.breakdown:
            found.append(f"{stage.name}: {stage.seconds:,.2f} s (predicted)")
            for task in stage.tasks:
                found.append(f"  {task.role}, pool {task.pool}: {task.costs.total_s:,.2f} s")
                found += [f"    {line}" for line in task.costs.lines()]
        return found
