"""Roles that do not learn: the reference policy, and models that judge (reward, cost)."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.parking import borrow, park
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params
from jaxrl.models.heads import last_scores
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.packed_model import PackedModel, TrainConfig, each_micro
from jaxrl.types import PackedBatch


class Frozen(PackedModel):
    """A model with weights that stay as they are."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        tables: StateTables = ZERO["FSDP"],
        park: bool = False,
    ):
        """Args as for `PackedModel`; `park` keeps the weights in pinned host memory between calls."""
        super().__init__(model, mesh, train=train, tables=tables)
        self._park = park
        self._weights: Params | None = None

    @property
    def params(self) -> Params:
        """The weights, in the training layout; assigned to."""
        assert self._weights is not None, "an assignment to `params` comes first"
        return borrow(self._weights, self.train_shardings) if self._park else self._weights

    @params.setter
    def params(self, params: Params) -> None:
        self._weights = park(params) if self._park else params


class Reference(Frozen):
    """The policy that training started from: what the price of leaving is measured against."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        temperature: float,
        tables: StateTables = ZERO["FSDP"],
        park: bool = False,
    ):
        """Args as for `Frozen`; `temperature` is the actor's."""
        super().__init__(model, mesh, train=train, tables=tables, park=park)
        self._temperature = temperature
        self._logprobs = jax.jit(self._packed_logprobs)

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch) -> jax.Array:
        """Log-probability of every token, float32 [U, M, R, T]."""
        return self._logprobs(self.params, batch)

    def _packed_logprobs(self, params: Params, batch: PackedBatch) -> jax.Array:
        temperature = self._temperature
        return each_micro(
            lambda micro: self.policy(self.graph, params, micro, temperature=temperature)[0], batch
        )


class Judge(Frozen):
    """A reward or cost model: one score for each sequence. It reads the policy's tokens as they are."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        tables: StateTables = ZERO["FSDP"],
        park: bool = False,
    ):
        """Args as for `Frozen`; `model` has a head of scores, of which the first counts."""
        super().__init__(model, mesh, train=train, tables=tables, park=park)
        self._scores = jax.jit(self._packed_scores)

    @protocol(PER_TOKEN)
    def scores_of(self, batch: PackedBatch) -> jax.Array:
        """The score of each sequence on its last token, 0 elsewhere, float32 [U, M, R, T]."""
        return self._scores(self.params, batch)

    def _packed_scores(self, params: Params, batch: PackedBatch) -> jax.Array:
        def of_micro(micro: PackedBatch) -> jax.Array:
            scores_RTS, _ = self.scores(params, micro)
            return last_scores(scores_RTS, micro.segment_ids)[..., 0]

        return each_micro(of_micro, batch)
