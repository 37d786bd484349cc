"""The critic: predicts the future reward of a policy, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params
from jaxrl.models.logprobs import values_before
from jaxrl.models.mixture import Routing
from jaxrl.roles.objective import Stats
from jaxrl.roles.score_learner import ScoreLearner
from jaxrl.types import PackedBatch


class ValueOutputs(NamedTuple):
    """Inputs of a critic's losses.

    Attributes:
      value: [R, T], value of the state before each token, in units of reward.
    """

    value: jax.Array


class Critic(ScoreLearner):
    """A value model on a mesh: the actor's trunk, or another one, with a head of one score."""

    @protocol(PER_TOKEN)
    def values(self, batch: PackedBatch) -> jax.Array:
        """Value of the state before every token, float32 [U, M, R, T]; 0 at the first token of a sequence."""
        return self.by_token(batch)

    def _outputs(self, params: Params, micro: Any) -> tuple[ValueOutputs, Routing | None]:
        scores_RTS, routing = self.scores(params, micro)
        return ValueOutputs(values_before(scores_RTS[..., 0], micro.segment_ids)), routing

    def _described(self, outputs: ValueOutputs) -> Stats:
        return {"vpred_mean": outputs.value}
