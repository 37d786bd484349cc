"""Models that are not trained: the common base of reference policies and reward models."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxrl.mesh.offload import offload, onloaded_copy
from jaxrl.mesh.sharding_strategies import ZERO, StateRules
from jaxrl.models.decoder import Params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.train_config import TrainConfig


class Frozen(PackedModel):
    """A model with frozen weights."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        state_rules: StateRules = ZERO["FSDP"],
        offload: bool = False,
    ):
        """Args as for `PackedModel`; `offload` keeps the weights in pinned host memory between calls."""
        super().__init__(model, mesh, train=train, state_rules=state_rules)
        self._offload = offload
        self._params: Params | None = None

    def load(self, params: Params) -> None:
        """Takes ownership of weights in the training layout."""
        self._params = offload(params) if self._offload else params

    def onloaded(self) -> Params:
        """The weights on the devices, in the training layout. If they are offloaded, this is a copy."""
        assert self._params is not None, "load() comes first"
        if self._offload:
            return onloaded_copy(self._params, self.train_shardings)
        return self._params
