"""Has training ruined the model? Judged by metrics, so that a checkpoint from before can be kept.

A learning rate that is too high ruins weights within a step, and they are finite: nothing stops, and a few
saves later every checkpoint holds them. So each step's metrics are looked at, and it is remembered at which
steps the weights were last found sound:

    step               18      19      20      21      22
    training metrics   fine    fine    fine    out     out       what step 20 began with was fine: 19
    evaluation         .75             .74             .02       20 was measured and was fine

Not covered: stopping or going back by itself; that is for a person to decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from jaxrl.checks import check_fields, coefficient, positive, shown

# Metrics of evaluations, of which more is better.
_EVALUATION = "val-core/"
_REWARD = "critic/score/mean"


@dataclasses.dataclass(frozen=True)
class CollapseConfig:
    """When a model counts as ruined; a checkpoint from before is then kept, and a message says so.

    Attributes:
      accuracy_loss: share of the best accuracy in evaluation (any `val-core/` metric) whose loss is a
        collapse: at 0.5, less than half of the best. 1 does not look.
      reward_loss: how far `critic/score/mean` may fall below its best, in units of reward; 0 does not look.
      ranges: metric -> (low, high); outside of it is a collapse. The defaults are far from what training that
        works shows: half a nat a token is a large step of a policy; a loss of 20 nats a token is worse than
        guessing among a million tokens.
    """

    accuracy_loss: Annotated[float, positive(at_most=1)] = 0.5
    reward_loss: Annotated[float, coefficient()] = 0.0
    ranges: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"actor/ppo_kl": (-5.0, 5.0), "sft/loss": (0.0, 20.0)}
    )

    def __post_init__(self):
        check_fields(self)
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


class CollapseDetector:
    """Follows the metrics of a stage.

    Attributes:
      found: what is wrong at present, a sentence for each metric, by metric.
    """

    def __init__(self, config: CollapseConfig):
        """Args: what counts as a collapse."""
        self._config = config
        self._best: dict[str, float] = {}
        self._evaluated_step: int | None = None
        self._trained_step: int | None = None
        self.found: dict[str, str] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Takes in the metrics of a step, which were measured on its way, evaluation at its end.

        Returns:
          What has gone wrong with this step and was not wrong before.
        """
        before = dict(self.found)
        for name in metrics:
            fault = self._fault(name, metrics[name])
            self.found.pop(name, None)
            if fault is not None:
                self.found[name] = fault
        if not self.found:
            # A step's own metrics tell how good the weights were that it began with.
            self._trained_step = max(step - 1, 0)
            if any(name.startswith(_EVALUATION) for name in metrics):
                self._evaluated_step = step
        return [fault for name, fault in self.found.items() if name not in before]

    @property
    def sound_steps(self) -> list[int]:
        """Steps whose weights were found sound: the newest by evaluation, and by training if newer."""
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
        if name == _REWARD and self._config.reward_loss:
            best = self._best_of(name, value)
            if value < best - self._config.reward_loss:
                return f"{name} {value:.3g} is {best - value:.3g} below {best:.3g}"
        return None

    def _best_of(self, name: str, value: float) -> float:
        self._best[name] = max(value, self._best.get(name, value))
        return self._best[name]

    # What outlives a step

    def record(self) -> dict[str, Any]:
        """JSON-able: what a resumed run needs to judge the same."""
        return {
            "best": dict(self._best),
            "evaluated_step": self._evaluated_step,
            "trained_step": self._trained_step,
            "found": dict(self.found),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes on from a record."""
        self._best, self.found = dict(record["best"]), dict(record["found"])
        self._evaluated_step, self._trained_step = record["evaluated_step"], record["trained_step"]
