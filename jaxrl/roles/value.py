"""The critic: how much reward a policy is about to get, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params
from jaxrl.models.heads import score_config, score_params, values_before
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import Learner
from jaxrl.roles.objective import Stats
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig, each_micro
from jaxrl.types import PackedBatch


class ValueOutputs(NamedTuple):
    """What losses of a critic are made of.

    Attributes:
      value: [R, T], of the state before each token, in units of reward.
    """

    value: jax.Array


class Critic(Learner):
    """A model of values on a mesh; the actor's trunk, or another one, with a head of one score."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        optim: OptimConfig,
        seed: int,
        tables: StateTables = ZERO["FSDP"],
        offload: bool = False,
    ):
        """Args as for `Learner`; `model` may be a language model, whose unembedding the head replaces."""
        super().__init__(
            score_config(model),
            mesh,
            train=train,
            optim=optim,
            seed=seed,
            tables=tables,
            offload=offload,
        )
        self._values = jax.jit(self._packed_values)

    def start_from(self, params: Params) -> None:
        """Takes over weights (they are donated); those of a language model get a head of zeros."""
        if "score_head" not in params:
            params = score_params(params, self.model)
        super().start_from(params)

    @protocol(PER_TOKEN)
    def values(self, batch: PackedBatch) -> jax.Array:
        """Value of the state before every token, float32 [U, M, R, T]; 0 at a sequence's first token."""
        return self._values(self.for_training().params, batch)

    def _packed_values(self, params: Params, batch: PackedBatch) -> jax.Array:
        return each_micro(lambda micro: self._outputs(params, micro)[0].value, batch)

    def _outputs(self, params: Params, micro: Any) -> tuple[ValueOutputs, Routing | None]:
        scores_RTS, routing = self.scores(params, micro)
        return ValueOutputs(values_before(scores_RTS[..., 0], micro.segment_ids)), routing

    def _described(self, outputs: ValueOutputs) -> Stats:
        return {"vpred_mean": outputs.value}
