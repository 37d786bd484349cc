"""The common base of critics and trainable reward models: a trunk with a score head."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.models.decoder import Params, score_config, score_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import Learner
from jaxrl.roles.packed_model import each_micro
from jaxrl.types import PackedBatch


class ScoreLearner(Learner):
    """A score model in training. Its score of a token is the first field of its `_outputs`."""

    def __init__(self, model: ModelConfig, mesh: Mesh, **options: Any):
        """Args as for `Learner`. `model` may be a language model; the score head replaces its unembedding."""
        super().__init__(score_config(model), mesh, **options)
        self.by_token_program = jax.jit(self._packed_by_token)

    def start_from(self, params: Params) -> None:
        """Starts from weights, which are donated; those of a language model get a score head of zeros."""
        if "score_head" not in params:
            params = score_params(params, self.model)
        super().start_from(params)

    def by_token(self, batch: PackedBatch) -> jax.Array:
        """The score of every token, float32 [U, M, R, T]."""
        return self.by_token_program(self.for_training().params, batch)

    def _packed_by_token(self, params: Params, batch: PackedBatch) -> jax.Array:
        def of_micro(micro: Any) -> jax.Array:
            outputs, _ = self._outputs(params, micro)
            return outputs[0]

        return each_micro(of_micro, batch)
