"""The policy: the actor, which samples and learns, and its frozen reference.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrl.algos.logprobs import squared_probabilities
from jaxrl.algos.truncation import Truncation, kept_tokens
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.handover import Handover
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import generation_shardings
from jaxrl.models import lora
from jaxrl.models.decoder import Decoder, Params, decoder_graph, weight_types
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import Learner, TrainState
from jaxrl.roles.losses import Objective, PolicyOutputs, Stats
from jaxrl.roles.packed_model import Frozen, PackedModel, each_micro, micro_of
from jaxrl.roles.redraw import Draws, counted_tokens, same_token_fraction
from jaxrl.rollout.backend import RolloutBackend, SamplingOptions
from jaxrl.rollout.group_loop import GroupLoop
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.types import Completions, PackedBatch, Prompts, TrainBatch


class Actor(Learner):
    """A policy that learns on a mesh, and samples through a rollout backend on the same mesh or another.

    Its weights are in one of two places, or in both:

        for_training()    training layout, with the optimiser    before log-probabilities, updates, saving
        for_sampling()    generation layout, in the backend      before `generate` and `resume`

    Methods call the one that they need.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        temperature: float,
        truncation: Truncation | None = None,
        backend: RolloutBackend | None = None,
        compared: PackedModel | None = None,
        **options: Any,
    ):
        """Builds the programs; `init` or an assignment to `state` gives the actor its weights.

        Args:
          model, mesh: shape of the model, and its training mesh.
          temperature: sampling temperature. It also divides the logits wherever training computes a
            probability.
          truncation: limits of sampling, as scalars. Losses then see log-probabilities among the tokens that
            these keep, as the sampler's are. None for those of the whole vocabulary.
          backend: rollout backend, which the actor closes in the end. None for an actor that never samples.
          compared: model of the reference that an objective compares the policy with, on the same mesh; None
            is the policy's own, without adapters.
          options: other arguments of `Learner`. With `offload`, the training state is in pinned host memory
            while the actor samples.
        """
        super().__init__(model, mesh, **options)
        if self.train.replay_routes and not model.num_experts:
            raise UserError(
                "train.replay_routes needs a mixture of experts, and this model is dense; set it to False"
            )
        self.replays_routes = self.train.replay_routes
        self._temperature = temperature
        self.truncation = truncation
        self._backend = backend
        self._shares_mesh = backend is not None and backend.mesh == mesh
        if backend is not None:
            self.resharding = self._resharding_to(backend)
        # Whether the backend has the current weights, so that `generate` moves none.
        self.can_sample = False
        self.logprobs_program = jax.jit(
            functools.partial(
                self.packed_logprobs, self.graph, temperature=temperature, truncation=truncation
            ),
            static_argnames="first_minibatch",
        )
        self._reference_logprobs = jax.jit(self._logprobs_without_adapters)
        self._squared_probabilities = jax.jit(self._packed_squared_probabilities)
        self._log_kept_mass = jax.jit(self._packed_log_kept_mass)
        self._same_tokens = jax.jit(self._packed_same_tokens)
        self._compared = compared
        self._base_graph, _, _ = decoder_graph(lora.base_config(model))

    def _resharding_to(self, backend: RolloutBackend) -> Resharding | Handover:
        generate = generation_shardings(self.axes, self.model_shapes, backend.mesh)
        types = weight_types(self.model, backend.dtype, backend.weights_dtype)
        ends: Any = (self.shapes, self.train_shardings, generate, types)
        if not self._shares_mesh:
            return Handover(*ends, generate_shapes=self.model_shapes)
        # Float32 weights can move to the sampler and back without loss, so no second copy is kept. A narrower
        # copy could not restore the master weights, which then stay.
        donate = jnp.dtype(backend.dtype) == jnp.float32 and not backend.weights_dtype
        return Resharding(*ends, generate_shapes=self.model_shapes, donate=donate)

    @property
    def backend(self) -> RolloutBackend:
        assert self._backend is not None, "this actor was built without a rollout backend"
        return self._backend

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    # Where the weights are

    def for_training(self) -> TrainState:
        """The training state on its devices; first brings weights back from the backend or the host."""
        self._onload()
        if self._state is not None and self._state.params is None:
            assert isinstance(self.resharding, Resharding)
            params = self.resharding.to_train(self._unloaded())
            self._state = self._state.replace(params=params)
        return self.state

    def for_sampling(self) -> None:
        """Moves the current weights to the backend; then offloads the training state if `offload` was set.

        Does not move weights that are there already. If both layouts have the same type, the training copy
        becomes the generation copy.
        """
        if not self.can_sample:
            state = self.for_training()
            # Drop the old generation copy before the new one is made: both together may not fit.
            self._unloaded()
            self.backend.load(self.resharding.to_generate(state.params))
            if self.resharding.donate:
                # The buffers of the training copy have become those of the generation copy.
                self._state = state.replace(params=None)
            self.can_sample = True
        self.offload()

    def freeze(self, name: str, params: Params) -> None:
        """Gives the backend, one of agents, weights of roles that do not learn; consumes `params`.

        Args:
          name: name in `rollout.frozen_roles`.
          params: weights in the training layout.
        """
        backend: Any = self.backend
        backend.freeze(name, self.resharding.to_generate(params))

    def _before_change(self) -> None:
        self.can_sample = False
        # On the training mesh the backend's weights may share buffers with those that an update donates, and
        # they take memory that the update needs. On its own mesh the sampler may still be using them.
        if self._shares_mesh:
            self._unloaded()

    def _unloaded(self) -> Params | None:
        self.can_sample = False
        return self.backend.unload()

    # Sampling

    def generate(self, prompts: Prompts, options: SamplingOptions, **further: Any) -> Completions:
        """Samples with the current weights; arguments as for `RolloutBackend.generate`."""
        self.for_sampling()
        return self.backend.generate(prompts, options, **further)

    def resume(self, prompts: Prompts, options: SamplingOptions, **further: Any) -> Rollout:
        """Continues unfinished groups, and may leave some; arguments as for `RolloutBackend.resume`."""
        self.for_sampling()
        return self.backend.resume(prompts, options, **further)

    def continuous(
        self,
        options: SamplingOptions,
        unfinished: UnfinishedGroups | None = None,
        *,
        members: Sequence[int] | None = None,
    ) -> GroupLoop:
        """Sampling that outlives changes of the weights; the backend must have its own devices.

        Args: as for `OfflineBackend.continuous`.
        """
        assert not self._shares_mesh, "updates take the weights of a sampler on the same devices"
        # Settings with backends that have no such method are refused.
        backend: Any = self.backend
        return backend.continuous(options, unfinished, members=members)

    # Log-probabilities

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch, *, first_minibatch: int = 0) -> jax.Array:
        """Log-probability of every token under the current weights, float32 [U, M, R, T].

        Tokens that a truncation does not keep have -inf. Minibatches before `first_minibatch` are skipped;
        their values are 0.
        """
        params = self.for_training().params
        return self.logprobs_program(params, batch, first_minibatch=first_minibatch)

    @protocol(PER_TOKEN)
    def squared_probabilities(self, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        """`logprobs`, and for every token the sum over the vocabulary of the squared probabilities."""
        return self._squared_probabilities(self.for_training().params, batch)

    @protocol(PER_TOKEN)
    def log_kept_mass(self, batch: PackedBatch) -> jax.Array:
        """Log of the probability that the kept tokens have together, at every token, float32 [U, M, R, T]."""
        return self._log_kept_mass(self.for_training().params, batch)

    @protocol(PER_TOKEN)
    def reference_logprobs(self, batch: PackedBatch) -> jax.Array:
        """Log-probability of every token without the adapters, that is under the initial weights."""
        assert self.model.lora.rank, "only a model with adapters holds its own reference"
        return self._reference_logprobs(self.for_training().params, batch)

    def _logprobs_without_adapters(self, params: Params, batch: PackedBatch) -> jax.Array:
        base = lora.split(params)[1]
        # A reference chooses its experts itself.
        batch = batch.replace(routes=None)
        return self.packed_logprobs(self._base_graph, base, batch, temperature=self._temperature)

    def _packed_squared_probabilities(
        self, params: Params, batch: PackedBatch
    ) -> tuple[jax.Array, jax.Array]:
        settings: Any = {"temperature": self._temperature, "truncation": self.truncation}
        settings["statistic"] = squared_probabilities
        return each_micro(
            lambda micro: self.policy(self.graph, params, micro, **settings)[:2], batch
        )

    def _packed_log_kept_mass(self, params: Params, batch: PackedBatch) -> jax.Array:
        truncation = self.truncation
        assert truncation is not None, "without a truncation all tokens are kept"
        settings: Any = {"temperature": self._temperature}
        settings["statistic"] = lambda logprobs: kept_tokens(logprobs, truncation).log_mass[..., 0]
        return each_micro(
            lambda micro: self.policy(self.graph, params, micro, **settings)[1], batch
        )

    def same_tokens(self, batch: PackedBatch, draws: Draws) -> jax.Array | None:
        """Fraction of the trained tokens of a microbatch that the trainer draws again: `redraw`. Collective.

        The microbatch is the first one that has such tokens; None if none has.
        """
        # The numbers follow from the batch alone, so the host does not wait for a model.
        num_UM = hosts.fetch(_num_counted(batch, draws))
        if not num_UM.any():
            return None
        u, m = np.unravel_index(np.flatnonzero(num_UM)[0], num_UM.shape)
        where = np.int32(u), np.int32(m)
        return self._same_tokens(self.for_training().params, batch, draws, *where)

    def _packed_same_tokens(
        self, params: Params, batch: PackedBatch, draws: Draws, u: jax.Array, m: jax.Array
    ) -> jax.Array:
        model: Decoder = nnx.merge(self.graph, params)
        micro = micro_of(batch, u, m)
        return same_token_fraction(
            *self._head(model, self._run(model, micro).hidden_BTD, micro),
            micro,
            draws,
            temperature=self._temperature,
            **self._chunks(micro),
        )

    # Learning

    @protocol(PER_TOKEN)
    def update_and_logprobs(
        self,
        batch: TrainBatch,
        objective: Objective,
        *,
        also: Sequence[tuple[PackedBatch, Objective]] = (),
        reference: Params | None = None,
    ) -> tuple[dict[str, jax.Array], TrainBatch]:
        """`update` in which the first minibatch takes its old log-probabilities from its own forward pass.

        Returns:
          (metrics, batch with these log-probabilities), still on the devices.
        """
        metrics, this_pass = self._learn(batch, objective, also, reference)
        first = {name: _with_first(getattr(batch, name), x) for name, x in this_pass.items()}
        return metrics, batch.replace(**first)

    def _outputs(
        self, params: Params, micro: Any, *, supervised: bool = False
    ) -> tuple[PolicyOutputs, Routing | None]:
        # The limits of sampling may forbid a token of an example.
        truncation = None if supervised else self.truncation
        settings: Any = {"temperature": self._temperature, "truncation": truncation}
        logprob, entropy, routing, value = self.policy(self.graph, params, micro, **settings)
        # No KL here: `_outputs_against` measures it, with twice the work.
        return PolicyOutputs(logprob, entropy, jnp.zeros_like(logprob), value), routing

    def _outputs_against(
        self, params: Params, reference: Params, micro: Any
    ) -> tuple[PolicyOutputs, Routing | None]:
        *outputs, routing = self.policy_and_kl(
            self.graph,
            params,
            self if self._compared is None else self._compared,
            self._base_graph if self._compared is None else self._compared.graph,
            reference,
            micro,
            temperature=self._temperature,
            truncation=self.truncation,
        )
        return PolicyOutputs(*outputs), routing

    def _described(self, outputs: PolicyOutputs) -> Stats:
        return {"entropy": outputs.entropy, "mean_token_prob": jnp.exp(outputs.logprob)}


@jax.jit
def _num_counted(batch: PackedBatch, draws: Draws) -> jax.Array:
    """The number of tokens of each microbatch that `redraw` counts, int32 [U, M]."""
    return counted_tokens(batch, draws).sum((-2, -1), dtype=jnp.int32)


# Compiled: by itself, a second such scatter into an array of other processes' devices alone ends the
# process (jax 0.10.2).
@jax.jit
def _with_first(x_UMRT: jax.Array, first_MRT: jax.Array) -> jax.Array:
    return x_UMRT.at[0].set(first_MRT)


class Reference(Frozen):
    """The policy that training started from. The KL penalty is measured against it."""

    def __init__(self, model: ModelConfig, mesh: Mesh, *, temperature: float, **options: Any):
        """Args as for `Frozen`; `temperature` is the actor's."""
        super().__init__(model, mesh, **options)
        self.logprobs_program = jax.jit(
            functools.partial(self.packed_logprobs, self.graph, temperature=temperature)
        )

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch) -> jax.Array:
        """Log-probability of every token, float32 [U, M, R, T]."""
        return self.logprobs_program(self.onloaded(), batch)
