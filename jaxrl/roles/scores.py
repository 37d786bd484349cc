"""Models with a head of scores: critics, actor-critics, and reward or cost models, frozen and in training.

A critic predicts the future reward before every token; it is a model of its own, or a head of the actor's.
A reward model scores every token; the score of a sequence is that of its last token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.algos.logprobs import last_scores, values_before
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models.decoder import Params, score_config, score_params
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import Learner
from jaxrl.roles.losses import ScoreOutputs, Stats, ValueOutputs
from jaxrl.roles.packed_model import Frozen, each_micro
from jaxrl.roles.policy import Actor
from jaxrl.types import PackedBatch

_HEAD = "score_head"


class ScoreLearner(Learner):
    """A score model in training. Its score of a token is the first field of its `_outputs`."""

    def __init__(self, model: ModelConfig, mesh: Mesh, **options: Any):
        """Args as for `Learner`. `model` may be a language model; the score head replaces its unembedding."""
        super().__init__(score_config(model), mesh, **options)
        self.by_token_program = jax.jit(self._packed_by_token)

    def start_from(self, params: Params) -> None:
        """Starts from weights, which are donated; those of a language model get a score head of zeros."""
        # With zeros the first values are 0 rather than noise, and the trunk is at first left alone.
        if _HEAD not in params:
            params = score_params(params, self.model)
        super().start_from(params)

    def by_token(self, batch: PackedBatch) -> jax.Array:
        """The score of every token, float32 [U, M, R, T]."""
        return self.by_token_program(self.for_training().params, batch)

    def _packed_by_token(self, params: Params, batch: PackedBatch) -> jax.Array:
        return each_micro(lambda micro: self._outputs(params, micro)[0][0], batch)


class Critic(ScoreLearner):
    """A value model on a mesh: the actor's trunk, or another one, with a head of one score."""

    @protocol(PER_TOKEN)
    def values(self, batch: PackedBatch) -> jax.Array:
        """Value of the state before every token, float32 [U, M, R, T]; 0 at the first token of a sequence."""
        return self.by_token(batch)

    def _outputs(
        self, params: Params, micro: Any, *, supervised: bool = False
    ) -> tuple[ValueOutputs, Routing | None]:
        scores_RTS, routing = self.scores(params, micro)
        return ValueOutputs(values_before(scores_RTS[..., 0], micro.segment_ids)), routing

    def _described(self, outputs: ValueOutputs) -> Stats:
        return {"vpred_mean": outputs.value}


class ActorCritic(Actor):
    """A policy whose model has a value head beside its unembedding (`ModelConfig.value_head`).

    Its head begins at 0, as a critic's does. With adapters, these and the head are trained. The head goes to
    the sampler with the other weights, which does not read it.
    """

    def __init__(self, model: ModelConfig, mesh: Mesh, **options: Any):
        """Args as for `Actor`; `model` has both heads."""
        super().__init__(model, mesh, **options)
        self.logprobs_program = jax.jit(self._packed_logprobs_and_values)

    @protocol(PER_TOKEN)
    def logprobs_and_values(self, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        """`Actor.logprobs`, and values as of `Critic.values`, from one forward pass."""
        return self.logprobs_program(self.for_training().params, batch)

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch, *, first_minibatch: int = 0) -> jax.Array:
        """See `Actor.logprobs`; those before `first_minibatch` are there too."""
        return self.logprobs_and_values(batch)[0]

    def _packed_logprobs_and_values(
        self, params: Params, batch: PackedBatch
    ) -> tuple[jax.Array, jax.Array]:
        def both(micro: Any) -> tuple[jax.Array, jax.Array]:
            outputs, _ = self._outputs(params, micro)
            assert outputs.value is not None, "the model has a value head"
            return outputs.logprob, outputs.value

        return each_micro(both, batch)

    def start_from(self, params: Params) -> None:
        """Starts from weights, which are donated; those of a language model get a value head of zeros."""
        if _HEAD not in params:
            params = params | {_HEAD: jnp.zeros((self.model.d_model, 1), jnp.float32)}
        super().start_from(params)

    def _split(self, params: Any) -> tuple[Any, Any]:
        trained, frozen = super()._split(params)
        # Adapters alone are trained otherwise.
        if _HEAD in frozen:
            trained = trained | {_HEAD: frozen[_HEAD]}
            frozen = {name: leaf for name, leaf in frozen.items() if name != _HEAD}
        return trained, frozen


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
        return each_micro(
            lambda micro: last_scores(self.scores(params, micro)[0], micro.segment_ids)[..., 0],
            batch,
        )


class RewardModelLearner(ScoreLearner):
    """A reward or cost model in training."""

    @protocol(PER_TOKEN)
    def scores_of(self, batch: PackedBatch) -> jax.Array:
        """The score of each sequence on its last token, 0 elsewhere, float32 [U, M, R, T]."""
        return self.by_token(batch)

    def _outputs(
        self, params: Params, micro: Any, *, supervised: bool = False
    ) -> tuple[ScoreOutputs, Routing | None]:
        scores_RTS, routing = self.scores(params, micro)
        return ScoreOutputs(last_scores(scores_RTS, micro.segment_ids)[..., 0]), routing

    def _described(self, outputs: ScoreOutputs) -> Stats:
        return {}
