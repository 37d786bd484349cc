"""Types between the lines of a dataflow: `Sampled` groups with rewards, then packed `Experience`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.roles.packing import Packing
from jaxrl.types import Completions, Scored, TrainBatch

# Metrics by name, with verl's names. A value may still be on the devices.
Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Groups of a step with their rewards, on the host.

    Attributes:
      scored: N prompts with G responses each.
      metrics: metrics of sampling and scoring; of several batches, those of the last.
      counts: counts that add up over several batches.
    """

    scored: Scored
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def completions(self) -> Completions:
        return self.scored.completions


@dataclasses.dataclass(frozen=True)
class Experience:
    """The data that a step learns from: its groups, and the same sequences packed on the actor's devices.

    Attributes:
      scored: groups with rewards, on the host.
      batch: packed sequences on the devices; entry t of a field is about token t.
      metrics: all metrics of the step so far.
      packing: where the sequences are in the batch.
    """

    scored: Scored
    batch: TrainBatch
    metrics: Metrics
    packing: Packing

    @property
    def completions(self) -> Completions:
        return self.scored.completions

    def extended(self, batch: TrainBatch, metrics: Mapping[str, Any] | None = None) -> Experience:
        """A copy with another batch and additional metrics."""
        return dataclasses.replace(self, batch=batch, metrics={**self.metrics, **(metrics or {})})
