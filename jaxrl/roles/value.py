"""The critic: how much reward a policy is about to get, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params
from jaxrl.models.heads import values_before
from jaxrl.models.mixture import Routing
from jaxrl.roles.objective import Stats
from jaxrl.roles.score_learner import ScoreLearner
from jaxrl.types import PackedBatch


class ValueOutputs(NamedTuple):
    """What losses of a critic are made of.

    Attributes:
      value: [R, T], of the state before each token, in units of reward.
    """

    value: jax.Array


class Critic(ScoreLearner):
    """A model of values on a mesh; the actor's trunk, or another one, with a head of one score."""

    @protocol(PER_TOKEN)
    def values(self, batch: PackedBatch) -> jax.Array:
        """Value of the state before every token, float32 [U, M, R, T]; 0 at a sequence's first token."""
        return self.by_token(batch)

    def _outputs(self, params: Params, micro: Any) -> tuple[ValueOutputs, Routing | None]:
        scores_RTS, routing = self.scores(params, micro)
        return ValueOutputs(values_before(scores_RTS[..., 0], micro.segment_ids)), routing

    def _described(self, outputs: ValueOutputs) -> Stats:
        return {"vpred_mean": outputs.value}
