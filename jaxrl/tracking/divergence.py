"""Detects divergence of training by metrics, so that a checkpoint from before it is kept.

With a learning rate that is too high, the weights can diverge within one step and stay finite. The run
continues, and a few saves later all of its checkpoints are useless. The detector therefore checks the metrics
of each step and remembers the newest steps with sound weights:

    step               18      19      20      21      22
    training metrics   fine    fine    fine    out     out     measure weights before the step: 19 is sound
    evaluation         .75             .74             .02     measures weights after the step: 20 is sound

Not covered: stopping the run or going back to a checkpoint. That decision is left to the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from jaxrl.checks import positive, settings, shown

# Prefix of evaluation accuracies; higher is better.
_EVALUATION = "val-core/"


@settings
class DivergenceConfig:
    """Thresholds for divergence, on which a run prints a message and keeps a checkpoint from before."""

    accuracy_loss: Annotated[float, positive(at_most=1)] = 0.5
    """Largest allowed loss of evaluation accuracy (any `val-core/` metric), as a share of its
    best value: 0.5 detects divergence below half of the best. 1 disables the check.
    """
    ranges: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"actor/ppo_kl": (-5.0, 5.0), "sft/loss": (0.0, 20.0)}
    )
    """Allowed range of metrics: metric -> (low, high). The defaults are far outside of healthy
    training: a KL of half a nat per token is already a large policy step, and a loss of 20 nats
    per token is worse than guessing among a million tokens.
    """

    def __post_init__(self):
        for name, bounds in self.ranges.items():
            if not _is_range(bounds):
                raise ValueError(
                    f"ranges.{name} is {shown(bounds)}; give two numbers, (low, high) with low < high"
                )


def _is_range(bounds: Any) -> bool:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return False
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in bounds)
    return numbers and bounds[0] < bounds[1]


class DivergenceDetector:
    """Checks the metrics of a training stage for divergence.

    Attributes:
      found: present faults: metric -> one sentence.
    """

    def __init__(self, config: DivergenceConfig):
        """Args: the thresholds."""
        self._config = config
        self._best: dict[str, float] = {}
        self._evaluated_step: int | None = None
        self._trained_step: int | None = None
        self.found: dict[str, str] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Checks the metrics of one step.

        Args:
          step: number of the step.
          metrics: metrics of the step. Training metrics are measured with the weights at its beginning,
            evaluation metrics with those at its end.

        Returns:
          One sentence for each fault that is new at this step.
        """
        before = dict(self.found)
        for name in metrics:
            fault = self._fault(name, metrics[name])
            self.found.pop(name, None)
            if fault is not None:
                self.found[name] = fault
        if not self.found:
            # Training metrics of a step are measured with the weights of the step before.
            self._trained_step = max(step - 1, 0)
            if any(name.startswith(_EVALUATION) for name in metrics):
                self._evaluated_step = step
        return [fault for name, fault in self.found.items() if name not in before]

    @property
    def sound_steps(self) -> list[int]:
        """The newest step that an evaluation found sound, and the newest by training metrics if later."""
        evaluated, trained = self._evaluated_step, self._trained_step
        if trained is None:
            return []
        if evaluated is None:
            return [trained]
        return [evaluated] if trained <= evaluated else [evaluated, trained]

    def _fault(self, name: str, value: float) -> str | None:
        if name in self._config.ranges:
            low, high = self._config.ranges[name]
            if not low <= value <= high:
                return f"{name} {value:.3g} is not between {low:g} and {high:g}"
        if name.startswith(_EVALUATION) and self._config.accuracy_loss < 1:
            best = self._best_of(name, value)
            if value < (1 - self._config.accuracy_loss) * best:
                return f"{name} {value:.3g} has lost more than {self._config.accuracy_loss:.0%} of {best:.3g}"
        return None

    def _best_of(self, name: str, value: float) -> float:
        self._best[name] = max(value, self._best.get(name, value))
        return self._best[name]

    # Saving and restoring

    def record(self) -> dict[str, Any]:
        """The state of the detector as JSON-able values, for a checkpoint."""
        return {
            "best": dict(self._best),
            "evaluated_step": self._evaluated_step,
            "trained_step": self._trained_step,
            "found": dict(self.found),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restores the state that `record` returned."""
        self._best, self.found = dict(record["best"]), dict(record["found"])
        self._evaluated_step, self._trained_step = record["evaluated_step"], record["trained_step"]
