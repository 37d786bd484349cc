"""The input of the mapping search: roles and models, the work of a step, and the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

from jaxrl.checks import check_fields, count
from jaxrl.models.model_config import ModelConfig
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.simulation.assumptions import Assumptions
from jaxrl.planner.simulation.step_tasks import RoleTasks
from jaxrl.planner.simulation.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Limits of the strategies that a search tries.

    Attributes:
      max_tensor: maximum tensor parallelism t; it also never exceeds the devices joined by fast links.
      max_pipeline: maximum pipeline parallelism p.
      max_context: maximum number of replicas that share a row, also inside fast links.
      fsdp: whether weights and optimiser states may be sharded over replicas.
    """

    max_tensor: Annotated[int, count(1)] = 8
    max_pipeline: Annotated[int, count(1)] = 64
    max_context: Annotated[int, count(1)] = 8
    fsdp: bool = True

    def __post_init__(self):
        check_fields(self)


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
      limits: limits of the searched strategies.
    """

    dataflow: str
    roles: tuple[RoleTasks, ...]
    models: Mapping[str, ModelConfig]
    workload: Workload
    cluster: Cluster
    assumptions: Assumptions
    limits: SearchLimits

    @property
    def actor(self) -> RoleTasks:
        """The role that generates."""
        return next(role for role in self.roles if role.generates)

    @property
    def budget_bytes(self) -> float:
        """Bytes of a device that a program may use."""
        memory_gb = self.cluster.accelerator.memory_gb
        assume = self.assumptions
        return (memory_gb * assume.memory_share - assume.scratch_gb) * 1e9
