"""The policy: the actor, which samples and learns, and the reference that it is compared with.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.mesh.resharding import Resharding
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.mesh.transfer import Transfer
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.logprobs import squared_probabilities
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.frozen import Frozen
from jaxrl.roles.learner import Learner, TrainState
from jaxrl.roles.objective import Objective, Stats
from jaxrl.roles.optim_config import OptimConfig
from jaxrl.roles.packed_model import PackedModel, each_micro
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import OnGroup, RolloutBackend, SamplingOptions
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.types import Completions, PackedBatch, Prompts, TrainBatch


class PolicyOutputs(NamedTuple):
    """What losses of a policy are made of.

    Attributes:
      logprob: [R, T], of each token given those of its sequence before it, temperature applied.
      entropy: [R, T], in nats, of the distribution that the token was drawn from.
      kl: [R, T], in nats, of that distribution to the reference's, over the whole vocabulary; 0 where the
        objective does not ask for it.
    """

    logprob: jax.Array
    entropy: jax.Array
    kl: jax.Array


class Actor(Learner):
    """A policy that learns on a mesh, and samples through a rollout backend on the same mesh or another.

    Its weights are in one of two places, or in both:

        for_training()    training layout, with the optimiser    before log-probabilities, updates, saving
        for_sampling()    generation layout, in the backend      before `generate` and `resume`

    Methods that need one of them call it themselves.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        optim: OptimConfig,
        temperature: float,
        seed: int,
        backend: RolloutBackend | None = None,
        compared: PackedModel | None = None,
        tables: StateTables = ZERO["FSDP"],
        offload: bool = False,
    ):
        """Builds the programs; `init` or an assignment to `state` gives the actor its weights.

        Args:
          model, mesh: what is trained, where.
          train, optim: how it learns.
          temperature: divides the logits wherever training takes a token's probability; that of sampling.
          seed: of random weights and of what an objective draws.
          backend: what it samples with; the actor's from now on. None for an actor that never samples.
          compared: model of the reference that an objective compares the policy with, on the same mesh; None
            is the policy's own, without adapters.
          tables: where weights, gradients and moments lie in training.
          offload: the training state waits in pinned host memory while the actor samples.
        """
        super().__init__(
            model, mesh, train=train, optim=optim, seed=seed, tables=tables, offload=offload
        )
        self._temperature = temperature
        self._backend = backend
        self._shares_mesh = backend is not None and backend.mesh == mesh
        if backend is not None:
            self.resharding = self._resharding_to(backend)
        # The backend has the current weights.
        self._can_sample = False
        self._sampler: concurrent.futures.ThreadPoolExecutor | None = None
        self._sampling: concurrent.futures.Future[Completions] | None = None
        self.logprobs_program = jax.jit(self._packed_logprobs, static_argnames="first_minibatch")
        self._reference_logprobs = jax.jit(self._logprobs_without_adapters)
        self._squared_probabilities = jax.jit(self._packed_squared_probabilities)
        self._compared = compared
        self._base_graph, _, _ = decoder_graph(lora.base_config(model))

    def _resharding_to(self, backend: RolloutBackend) -> Resharding | Transfer:
        generate = shardings(self.axes, self.shapes, GENERATE_RULES, backend.mesh)
        if not self._shares_mesh:
            return Transfer(generate, backend.dtype)
        # Master weights that sampling needs in a narrower type stay; equal ones are given up for it.
        donate = jnp.dtype(backend.dtype) == jnp.float32
        return Resharding(self.shapes, self.train_shardings, generate, backend.dtype, donate=donate)

    @property
    def backend(self) -> RolloutBackend:
        """What the actor samples with."""
        assert self._backend is not None, "this actor was built without a rollout backend"
        return self._backend

    def close(self) -> None:
        """Waits for what is being sampled, and ends the backend."""
        self._wait_for_sampler()
        if self._sampler is not None:
            self._sampler.shutdown()
        if self._backend is not None:
            self._backend.close()

    # Where the weights are

    @property
    def can_sample(self) -> bool:
        """The backend has the current weights: `generate` moves none."""
        return self._can_sample

    def for_training(self) -> TrainState:
        """The training state, where updates want it: what the backend or the host has comes back first."""
        if self._shares_mesh:
            self._wait_for_sampler()
        self._onload()
        if self._state is not None and self._state.params is None:
            assert isinstance(self.resharding, Resharding)
            params = self.resharding.to_train(self._unloaded())
            self._state = self._state.replace(params=params)
        return self.state

    def for_sampling(self) -> None:
        """The current weights, in the backend, and the training state offloaded if the role was asked to.

        Weights that are there already do not move. Where both layouts have one type the training copy is
        given up for it. What is still being sampled from weights of a while ago ends first.
        """
        if not self._can_sample:
            state = self.for_training()
            # Before the new ones are made: two copies need not fit.
            self._unloaded()
            self.backend.load(self.resharding.to_generate(state.params))
            if self.resharding.donate:
                self._state = state.replace(params=None)
            self._can_sample = True
        self.offload()

    def _before_change(self) -> None:
        self._can_sample = False
        # On the training mesh they may share buffers with the weights that an update consumes, and take the
        # memory that it needs. Elsewhere the sampler may still be at work with them.
        if self._shares_mesh:
            self._unloaded()

    def _unloaded(self) -> Params | None:
        self._wait_for_sampler()
        self._can_sample = False
        return self.backend.unload()

    # Sampling

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Samples responses to each prompt from the current weights; see `RolloutBackend.generate`."""
        self._prepare_sampling()
        return self.backend.generate(
            prompts, options, on_group=on_group, expected_tokens_N=expected_tokens_N
        )

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Rollout:
        """`generate` that goes on with unfinished groups and may leave some; see `RolloutBackend.resume`."""
        self._prepare_sampling()
        return self.backend.resume(
            prompts,
            options,
            unfinished=unfinished,
            on_group=on_group,
            expected_tokens_N=expected_tokens_N,
        )

    def start_generating(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        expected_tokens_N: np.ndarray | None = None,
    ) -> concurrent.futures.Future[Completions]:
        """`generate` beside whatever comes next, from the weights as they are now.

        Only with a backend on devices of its own does the actor learn meanwhile. Whatever else needs these
        devices, such as new weights for the backend, waits until this has ended.
        """
        self._prepare_sampling()
        if self._sampler is None:
            self._sampler = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._sampling = self._sampler.submit(
            self.backend.generate, prompts, options, expected_tokens_N=expected_tokens_N
        )
        return self._sampling

    def _prepare_sampling(self) -> None:
        self._wait_for_sampler()
        self.for_sampling()

    def _wait_for_sampler(self) -> None:
        """Returns when nothing is being sampled; what went wrong is raised where the future is read.

        Two threads must not dispatch to one mesh, whose devices would get the programs in different orders.
        """
        if self._sampling is not None:
            concurrent.futures.wait([self._sampling])
            self._sampling = None

    # Log-probabilities

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch, *, first_minibatch: int = 0) -> jax.Array:
        """Log-probability of every token under the current weights, float32 [U, M, R, T].

        Minibatches before `first_minibatch` are not computed, and hold 0.
        """
        params = self.for_training().params
        return self.logprobs_program(params, batch, first_minibatch=first_minibatch)

    @protocol(PER_TOKEN)
    def squared_probabilities(self, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        """`logprobs`, and the sum over the vocabulary of the squared probabilities there."""
        return self._squared_probabilities(self.for_training().params, batch)

    @protocol(PER_TOKEN)
    def reference_logprobs(self, batch: PackedBatch) -> jax.Array:
        """The same under the weights without their adapters: those the training started from."""
        assert self.model.lora.rank, "only a model with adapters holds its own reference"
        return self._reference_logprobs(self.for_training().params, batch)

    def _packed_logprobs(
        self, params: Params, batch: PackedBatch, *, first_minibatch: int = 0
    ) -> jax.Array:
        return each_micro(
            lambda micro: self._outputs(params, micro)[0].logprob,
            batch,
            first_minibatch=first_minibatch,
        )

    def _logprobs_without_adapters(self, params: Params, batch: PackedBatch) -> jax.Array:
        graph, base = self._base_graph, lora.split(params)[1]
        temperature = self._temperature
        return each_micro(
            lambda micro: self.policy(graph, base, micro, temperature=temperature)[0], batch
        )

    def _packed_squared_probabilities(
        self, params: Params, batch: PackedBatch
    ) -> tuple[jax.Array, jax.Array]:
        settings: Any = {"temperature": self._temperature, "statistics": squared_probabilities}
        return each_micro(
            lambda micro: self.policy(self.graph, params, micro, **settings)[:2], batch
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
        """`update` by an objective whose first minibatch takes its old log-probabilities from its own forward
        pass; returns metrics, and the batch with these, all still on the devices."""
        metrics, this_pass = self._learn(batch, objective, also, reference)
        first = {name: getattr(batch, name).at[0].set(x_MRT) for name, x_MRT in this_pass.items()}
        return metrics, batch.replace(**first)

    def _outputs(self, params: Params, micro: Any) -> tuple[PolicyOutputs, Routing | None]:
        logprob, entropy, routing = self.policy(
            self.graph, params, micro, temperature=self._temperature
        )
        return PolicyOutputs(logprob, entropy, jnp.zeros_like(logprob)), routing

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
        )
        return PolicyOutputs(*outputs), routing

    def _described(self, outputs: PolicyOutputs) -> Stats:
        return {"entropy": outputs.entropy, "mean_token_prob": jnp.exp(outputs.logprob)}


class Reference(Frozen):
    """The policy that training started from: what the KL penalty is measured against."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        temperature: float,
        tables: StateTables = ZERO["FSDP"],
        offload: bool = False,
    ):
        """Args as for `Frozen`; `temperature` is the actor's."""
        super().__init__(model, mesh, train=train, tables=tables, offload=offload)
        self._temperature = temperature
        self.logprobs_program = jax.jit(self._packed_logprobs)

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch) -> jax.Array:
        """Log-probability of every token, float32 [U, M, R, T]."""
        return self.logprobs_program(self.onloaded(), batch)

    def _packed_logprobs(self, params: Params, batch: PackedBatch) -> jax.Array:
        temperature = self._temperature
        return each_micro(
            lambda micro: self.policy(self.graph, params, micro, temperature=temperature)[0], batch
        )
