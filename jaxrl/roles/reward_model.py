"""Reward and cost models: one score for each sequence, as they are used and as they are trained.

A score is computed for every token, of which a sequence's last one counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params
from jaxrl.models.heads import last_scores
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.frozen import Frozen
from jaxrl.roles.objective import Stats
from jaxrl.roles.packed_model import each_micro
from jaxrl.roles.score_learner import ScoreLearner
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import PackedBatch


class ScoreOutputs(NamedTuple):
    """What losses of a reward model are made of.

    Attributes:
      score: [R, T], of a sequence as a whole on its last token, 0 elsewhere.
    """

    score: jax.Array


class RewardModel(Frozen):
    """A reward or cost model: one score for each sequence. It reads the policy's tokens as they are."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        tables: StateTables = ZERO["FSDP"],
        offload: bool = False,
    ):
        """Args as for `Frozen`; `model` has a head of scores, of which the first counts."""
        super().__init__(model, mesh, train=train, tables=tables, offload=offload)
        self.scores_program = jax.jit(self._packed_scores)

    @protocol(PER_TOKEN)
    def scores_of(self, batch: PackedBatch) -> jax.Array:
        """The score of each sequence on its last token, 0 elsewhere, float32 [U, M, R, T]."""
        return self.scores_program(self.onloaded(), batch)

    def _packed_scores(self, params: Params, batch: PackedBatch) -> jax.Array:
        def of_micro(micro: PackedBatch) -> jax.Array:
            scores_RTS, _ = self.scores(params, micro)
            return last_scores(scores_RTS, micro.segment_ids)[..., 0]

        return each_micro(of_micro, batch)


class RewardModelLearner(ScoreLearner):
    """A reward or cost model in training."""

    @protocol(PER_TOKEN)
    def scores_of(self, batch: PackedBatch) -> jax.Array:
        """The score of each sequence on its last token, 0 elsewhere, float32 [U, M, R, T]."""
        return self.by_token(batch)

    def _outputs(self, params: Params, micro: Any) -> tuple[ScoreOutputs, Routing | None]:
        scores_RTS, routing = self.scores(params, micro)
        return ScoreOutputs(last_scores(scores_RTS, micro.segment_ids)[..., 0]), routing

    def _described(self, outputs: ScoreOutputs) -> Stats:
        del outputs
        return {}
