"""The input of a mapping search (roles and models, the work of a step, devices), and its result.

A placement is a partition of the roles into pools that share devices.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxrl.models.model_config import ModelConfig
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.step_costs import StepCosts
from jaxrl_planner.simulation.step_simulator import RoleMapping, RoleTasks
from jaxrl_planner.simulation.workload import Workload, train_name

Placement = tuple[tuple[str, ...], ...]


def placements_of(names: Sequence[str]) -> Iterator[Placement]:
    """All set partitions of the roles: 15 for four roles, 203 for six (Bell numbers).

    The first has all roles in one pool, the last has one pool per role. Pools are in the order of their first
    roles, and roles in the order given.
    """
    if not names:
        yield ()
        return
    *before, last = names
    for placement in placements_of(before):
        for i, pool in enumerate(placement):
            yield (*placement[:i], (*pool, last), *placement[i + 1 :])
        yield (*placement, (last,))


def placement_name(placement: Sequence[Sequence[str]]) -> str:
    """The placement as text, such as "actor + reference | critic + reward"."""
    return " | ".join(" + ".join(pool) for pool in placement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Limits of the layouts that a search tries.

    Attributes:
      max_tensor: maximum tensor parallelism t; it also never exceeds the devices joined by fast links.
      max_pipeline: maximum pipeline parallelism p.
      max_context: maximum number of replicas that share a row, also inside fast links.
      fsdp: whether weights and optimiser states may be sharded over replicas.
    """

    max_tensor: int = 8
    max_pipeline: int = 64
    max_context: int = 8
    fsdp: bool = True


@dataclasses.dataclass(frozen=True)
class MappingProblem:
    """The input of a mapping search.

    Attributes:
      dataflow: name of the dataflow.
      roles: roles with a model, in the order of the dataflow; exactly one generates.
      models: model of each role.
      workload: work of a step.
      cluster: devices.
      assumptions: assumptions of the simulation.
      limits: limits of the searched layouts.
    """

    dataflow: str
    roles: tuple[RoleTasks, ...]
    models: collections.abc.Mapping[str, ModelConfig]
    workload: Workload
    cluster: Cluster
    assumptions: Assumptions
    limits: SearchLimits

    @property
    def actor(self) -> RoleTasks:
        return next(role for role in self.roles if role.generates)

    @property
    def budget_bytes(self) -> float:
        """Bytes of a device that a program may use."""
        memory_gb = self.cluster.accelerator.memory_gb
        assume = self.assumptions
        return (memory_gb * assume.memory_share - assume.scratch_gb) * 1e9


@dataclasses.dataclass(frozen=True)
class ColocatedSet:
    """Devices shared by several roles, which run one after the other.

    Attributes:
      roles: names of the roles.
      first: index of the first device.
      devices: number of devices, contiguous.
      cluster: name of the cluster, or of the group in it, that has them.
      budget_bytes: bytes of a device that a program may use.
    """

    roles: tuple[str, ...]
    first: int
    devices: int
    cluster: str
    budget_bytes: float

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
class Mapping:
    """The fastest mapping of a dataflow, by simulation: all its numbers are predictions.

    Attributes:
      dataflow, cluster: names of both.
      num_devices: number of devices of the cluster.
      pools: pools, side by side; some devices may be idle.
      roles: mapping of each role, by name.
      breakdown: costs of each stage.
      placements: all searched placements, fastest first.
      common_rows: rows of a microbatch that all roles were simulated with; 0 if each role had its own number.
      remat: rematerialisation of the updates.
      alone: of a cluster of several groups, the name of each and what is fastest on it alone; None if it does
        not hold the models.
    """

    dataflow: str
    cluster: str
    num_devices: int
    pools: tuple[ColocatedSet, ...]
    roles: collections.abc.Mapping[str, RoleMapping]
    breakdown: StepCosts
    placements: tuple[PlacementResult, ...]
    common_rows: int = 0
    remat: str = "full"
    alone: tuple[tuple[str, Mapping | None], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step: the sum of its stages."""
        return sum(map(self.breakdown.stage_s, self.breakdown.stages))

    @property
    def placement(self) -> Placement:
        return tuple(pool.roles for pool in self.pools)

    @property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch: those of the simulation, or the smallest number that suits every role.

        The replicas and stages of every role divide it.
        """
        return self.common_rows or math.lcm(*(r.layout.row_parts for r in self.roles.values()))

    def peak_bytes(self, pool: int) -> float:
        """Peak bytes per device of a pool: all resident buffers plus the largest temporaries."""
        here = [task for task in self.breakdown.tasks if task.pool == pool]
        # A trained role's forward pass reuses the resident buffers of its training, its last task.
        resident = {task.role: task.costs.resident_bytes for task in here if task.costs.resident}
        transient = max((task.costs.transient_bytes for task in here), default=0.0)
        return sum(resident.values()) + transient

    def lines(self) -> list[str]:
        """Describes the mapping as lines of text; a plan has its seconds by cause."""
        found = [
            f"{self.dataflow} on {self.cluster}: {placement_name(self.placement)}, "
            f"{self.seconds:,.1f} s a step (predicted), remat {self.remat}"
        ]
        for i, pool in enumerate(self.pools):
            where = f" of {pool.cluster}" if self.alone else ""
            found.append(
                f"pool {i}: {pool.devices} devices {pool.name}{where}, {self.peak_bytes(i) / 1e9:.1f} of "
                f"{pool.budget_bytes / 1e9:.1f} GB"
            )
            for name in pool.roles:
                role = self.roles[name]
                line = f"  {name}: {train_name(role.layout)}"
                if role.slots:
                    generation = role.layout.name.split(" / ")[1]
                    line += f"; generation {generation}, {role.slots} slots a replica"
                found.append(line)
        for group, best in self.alone:
            what = "does not hold the models"
            if best is not None:
                what = f"{placement_name(best.placement)}, {best.seconds:,.1f} s a step (predicted)"
            found.append(f"{group} alone: {what}")
        return found
