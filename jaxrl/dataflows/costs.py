"""Costs that a policy is to keep below a limit, and their Lagrange multiplier (Safe RLHF)."""

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
    """What a cost model says of a step's responses.

    Attributes:
      cost_B: float32, one for each response; above the limit is too much.
      metrics: of them.
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
    """The Lagrange multiplier: a unit of cost in units of reward."""

    def __init__(self, value: float, *, limit: float, learning_rate: float):
        """Args: the multiplier to begin with, the acceptable mean cost, and its logarithm's learning rate."""
        self.value = value
        self._limit = limit
        self._learning_rate = learning_rate

    def update(self, costs: Costs) -> Metrics:
        """Moves it by how far the step's mean cost is over the limit; reports the one that the step had."""
        used = self.value
        excess = jnp.float32(costs.cost_B.mean() - self._limit)
        self.value = float(
            raised_multiplier(jnp.float32(used), excess, learning_rate=self._learning_rate)
        )
        return {"cost/multiplier": used}
