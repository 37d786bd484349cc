"""Costs of responses, and the Lagrange multiplier that keeps them below a limit (Safe RLHF)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl.algos.controllers import raised_multiplier
from jaxrl.dataflows.experience import Metrics, Sampled
from jaxrl.dataflows.rewarding import SequenceScores
from jaxrl.dataflows.step_timer import StepTimer


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a step's responses.

    Attributes:
      cost_B: float32 [B], cost of each response.
      metrics: metrics of the costs.
    """

    cost_B: np.ndarray
    metrics: Metrics


class CostPhase:
    """The cost model in a step."""

    def __init__(self, scores: SequenceScores, timer: StepTimer):
        self._scores = scores
        self._timer = timer

    def score(self, sampled: Sampled) -> Costs:
        """The cost of each response."""
        with self._timer.phase("cost"):
            cost_B = self._scores(sampled.completions)
            return Costs(cost_B, {"cost/mean": cost_B.mean(), "cost/max": cost_B.max()})


class Multiplier:
    """The Lagrange multiplier: the reward that one unit of cost takes away."""

    def __init__(self, value: float, *, limit: float, learning_rate: float):
        """Args: the initial multiplier, the largest acceptable mean cost, and the rate of its logarithm."""
        self.value = value
        self._limit = limit
        self._learning_rate = learning_rate

    def update(self, costs: Costs) -> Metrics:
        """Raises it if the mean cost is above the limit, else lowers it; reports the previous value."""
        used = self.value
        excess = jnp.float32(costs.cost_B.mean() - self._limit)
        self.value = float(
            raised_multiplier(jnp.float32(used), excess, learning_rate=self._learning_rate)
        )
        return {"cost/multiplier": used}
