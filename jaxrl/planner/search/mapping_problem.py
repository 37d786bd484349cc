"""What a mapping is searched for: roles and models, the work of a step, and the devices."""

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
class Limits:
    """Strategies that a search looks at.

    Attributes:
      max_tensor: t at most, and never beyond devices with fast links to each other.
      max_pipeline: p at most.
      fsdp: weights and states may be shared among replicas.
    """

    max_tensor: Annotated[int, count(1)] = 8
    max_pipeline: Annotated[int, count(1)] = 64
    fsdp: bool = True

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class MappingProblem:
    """Everything that a search is given.

    Attributes:
      dataflow: its name.
      roles: that have a model, in the order of the dataflow; exactly one generates.
      models: role -> its model.
      workload: of a step.
      cluster: the devices.
      assumptions: of the simulation.
      limits: which strategies are looked at.
    """

    dataflow: str
    roles: tuple[RoleTasks, ...]
    models: Mapping[str, ModelConfig]
    workload: Workload
    cluster: Cluster
    assumptions: Assumptions
    limits: Limits

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
