"""What goes from one line of a dataflow to the next: groups with their rewards, then what is learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.types import Completions, Scored, TrainBatch

# By name, as verl's users know them; a value may still be on its way from the devices.
Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Groups of a step with their rewards, on the host.

    Attributes:
      scored: N prompts with G responses each.
      metrics: what was measured while they were sampled and scored; of several batches the last one's.
      counts: what adds up over several batches.
    """

    scored: Scored
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def completions(self) -> Completions:
        """The responses without their rewards."""
        return self.scored.completions


@dataclasses.dataclass(frozen=True)
class Experience:
    """What a step learns from: its groups, and the same sequences packed where the actor wants them.

    Attributes:
      scored: on the host.
      batch: on the devices; entry t of its fields is about token t.
      metrics: all that was measured so far.
    """

    scored: Scored
    batch: TrainBatch
    metrics: Metrics

    @property
    def completions(self) -> Completions:
        """The responses without their rewards."""
        return self.scored.completions

    def extended(self, batch: TrainBatch, metrics: Mapping[str, Any] | None = None) -> Experience:
        """The same groups with a batch that holds more, and with further metrics."""
        return Experience(self.scored, batch, {**self.metrics, **(metrics or {})})
