"""Reward and cost models, frozen and in training: one score for each sequence.

The model scores every token; the score of a sequence is that of its last token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params
from jaxrl.models.logprobs import last_scores
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.frozen import Frozen
from jaxrl.roles.objective import Stats
from jaxrl.roles.packed_model import each_micro
from jaxrl.roles.score_learner import ScoreLearner
from jaxrl.types import PackedBatch


class ScoreOutputs(NamedTuple):
    """Inputs of a reward model's losses.

    Attributes:
      score: [R, T], the score of each sequence on its last token, 0 elsewhere.
    """

    score: jax.Array


class RewardModel(Frozen):
    """A frozen reward or cost model: one score for each sequence. It must share the policy's tokenizer."""

    def __init__(self, model: ModelConfig, mesh: Mesh, **options: Any):
        """Args as for `Frozen`; `model` has a score head, of which the first score is used."""
        super().__init__(model, mesh, **options)
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
