"""A mapping that a search has found: pools, how each role is split, and the breakdown of its seconds."""

from __future__ import annotations

import collections.abc
import dataclasses
import math

from jaxrl.mesh.layout import ParallelLayout
from jaxrl.planner.search.placements import Placement, placement_name
from jaxrl.planner.simulation.cost_breakdown import CostBreakdown
from jaxrl.planner.simulation.workload import GenerationStrategy, Strategy, layout_of


@dataclasses.dataclass(frozen=True)
class RoleMapping:
    """Where a role is and how it is split.

    Attributes:
      name: of the role.
      pool: index of its pool.
      strategy: p, t, d and the share of FSDP.
      generation: p_g, t_g and slots of a replica; None of a role that does not sample.
    """

    name: str
    pool: int
    strategy: Strategy
    generation: GenerationStrategy | None

    @property
    def layout(self) -> ParallelLayout:
        """Both as a layout of its pool's mesh."""
        return layout_of(self.strategy, self.generation)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Devices that some roles share, in turns.

    Attributes:
      roles: their names.
      first: the first device.
      devices: how many there are, side by side.
    """

    roles: tuple[str, ...]
    first: int
    devices: int

    @property
    def name(self) -> str:
        """As a placement in a config has it: "0-63"."""
        return f"{self.first}-{self.first + self.devices - 1}"


@dataclasses.dataclass(frozen=True)
class TaskCosts:
    """What a role does in a stage.

    Attributes:
      role, pool: which, and the index of its pool.
      costs: seconds and bytes.
    """

    role: str
    pool: int
    costs: CostBreakdown


@dataclasses.dataclass(frozen=True)
class StageBreakdown:
    """A stage of a step: pools work side by side, roles of a pool one after the other.

    Attributes:
      name: one of `step_tasks.STAGES`.
      tasks: what is done in it.
    """

    name: str
    tasks: tuple[TaskCosts, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest pool."""
        return max(self.seconds_of_pools.values(), default=0.0)

    @property
    def seconds_of_pools(self) -> dict[int, float]:
        """Index of a pool -> the sum of its tasks."""
        found: dict[int, float] = {}
        for task in self.tasks:
            found[task.pool] = found.get(task.pool, 0.0) + task.costs.total_s
        return found


@dataclasses.dataclass(frozen=True)
class PlacementResult:
    """The best that a placement can do.

    Attributes:
      placement: pools of roles.
      devices: of each pool; () if it does not fit, or if a bound said that it is slower.
      seconds: of a step; infinite where it does not fit, None where only a bound is known.
    """

    placement: Placement
    devices: tuple[int, ...]
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The fastest mapping of a dataflow, as simulated: every number in it is a prediction.

    Attributes:
      dataflow, cluster: names of both.
      num_devices: of the cluster.
      pools: side by side; some devices may be idle.
      roles: by name.
      breakdown: of each stage.
      placements: every one that was looked at, the fastest first.
      budget_bytes: of a device, which no pool goes beyond.
    """

    dataflow: str
    cluster: str
    num_devices: int
    pools: tuple[Pool, ...]
    roles: collections.abc.Mapping[str, RoleMapping]
    breakdown: tuple[StageBreakdown, ...]
    placements: tuple[PlacementResult, ...]
    budget_bytes: float

    @property
    def seconds(self) -> float:
        """Of a step: the sum of its stages."""
        return sum(stage.seconds for stage in self.breakdown)

    @property
    def placement(self) -> Placement:
        """Which roles share a pool."""
        return tuple(pool.roles for pool in self.pools)

    @property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch: the fewest that divide over the replicas and stages of every role."""
        return math.lcm(*(role.strategy.row_parts for role in self.roles.values()))

    def peak_bytes(self, pool: int) -> float:
        """Of a device of a pool: all that stays, and the largest of what comes and goes."""
        resident = {
            task.role: task.costs.resident_bytes
            for stage in self.breakdown
            for task in stage.tasks
            if task.pool == pool and task.costs.resident
        }
        # A trained role's forward pass runs on what its training keeps, the last of its tasks.
        transient = [
            task.costs.transient_bytes
            for stage in self.breakdown
            for task in stage.tasks
            if task.pool == pool
        ]
        return sum(resident.values()) + max(transient, default=0.0)

    def lines(self) -> list[str]:
        """The mapping for people, a line each, with the breakdown of every cost."""
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
