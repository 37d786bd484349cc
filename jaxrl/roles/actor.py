"""The actor: the policy that samples and learns.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.protocols import ONE_TO_ALL, PER_TOKEN, protocol
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.mesh.transfer import Transfer
from jaxrl.mesh.transition import Transition
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.logprobs import squared_probabilities
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import Learner, Stats, TrainState
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig, each_micro
from jaxrl.rollout.driver import Enough, Options, rollout, sample
from jaxrl.rollout.engine import Engine, EngineConfig
from jaxrl.rollout.samples import Carry, Rollout
from jaxrl.types import Completions, PackedBatch, Prompts


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
    """A policy on a mesh: it samples from the generation layout and learns in the training layout."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        train: TrainConfig,
        optim: OptimConfig,
        engine: EngineConfig,
        temperature: float,
        seed: int,
        tables: StateTables = ZERO["FSDP"],
        park: bool = False,
        rollout_mesh: Mesh | None = None,
        sampler: Callable[..., Completions] = sample,
    ):
        """Builds the programs; `init` or an assignment to `state` gives the actor its weights.

        Args:
          model, mesh: what is trained, where.
          train, optim, engine: how it learns and how it samples.
          temperature: divides the logits wherever a token's probability is taken, in training too.
          seed: of weights and sampling.
          tables: where weights, gradients and moments lie in training.
          park: the training state waits in pinned host memory while the actor samples.
          rollout_mesh: other devices to sample on; None samples on those of `mesh`.
          sampler: what drives the engine, `rollout.driver.sample` or another of its arguments and result.
        """
        super().__init__(model, mesh, train=train, optim=optim, seed=seed, tables=tables, park=park)
        self._temperature = temperature
        sampling_mesh = mesh if rollout_mesh is None else rollout_mesh
        self.generate_shardings = shardings(self.axes, self.shapes, GENERATE_RULES, sampling_mesh)
        if rollout_mesh is None:
            # Master weights that sampling needs in a narrower type stay; equal ones are given up for it.
            self.transition = Transition(
                self.shapes,
                self.train_shardings,
                self.generate_shardings,
                engine.dtype,
                donate=jnp.dtype(engine.dtype) == jnp.float32,
            )
        else:
            self.transition = Transfer(self.generate_shardings, engine.dtype)
        self.engine = Engine(model, self.graph, sampling_mesh, engine)
        self._sampler = sampler
        self._rollout_params: Params | None = None
        self._logprobs = jax.jit(self._packed_logprobs)
        self._reference_logprobs = jax.jit(self._logprobs_without_adapters)
        self._squared_probabilities = jax.jit(self._packed_squared_probabilities)
        self._base_graph, _, _ = decoder_graph(lora.base_config(model))

    @property
    def state(self) -> TrainState:
        """Weights, optimiser and step; assigned to, initialised or trained, never changed in place.

        Reading it ends sampling: what sampling has taken from the state comes back first.
        """
        state = super().state
        if state.params is None:
            assert isinstance(self.transition, Transition)
            params, self._rollout_params = self._rollout_params, None
            state = self._state = state.replace(params=self.transition.to_train(params))
        return state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._rollout_params = None
        Learner.state.fset(self, state)  # pyright: ignore[reportOptionalCall]

    def _taken_state(self) -> TrainState:
        state = self.state
        # They may share buffers with the training weights, which the update consumes.
        self._rollout_params = None
        return state

    # Sampling

    def load_rollout(self) -> None:
        """Brings the current weights into the generation layout, for `generate` to use.

        Where both layouts have one type the training copy is given up for it.
        """
        state = self.state
        self._rollout_params = None
        self._rollout_params = self.transition.to_generate(state.params)
        if self.transition.donate:
            self._state = state.replace(params=None)
        self.rest()

    @property
    def rollout_params(self) -> Params | None:
        """The current weights in the generation layout; None until they are loaded."""
        return self._rollout_params

    @protocol(ONE_TO_ALL)
    def generate(
        self, prompts: Prompts, decode_text: Callable[[np.ndarray], str], **options: Any
    ) -> Completions:
        """Samples responses to each prompt from the current weights; arguments as for `sample`.

        They are brought into the generation layout first, unless `load_rollout` has done so.
        """
        return self.sample(self._loaded_params(), prompts, decode_text, **options)

    @protocol(ONE_TO_ALL)
    def roll_out(
        self,
        prompts: Prompts,
        decode_text: Callable[[np.ndarray], str],
        *,
        carry: Carry | None,
        enough: Enough,
        expected_tokens_N: np.ndarray | None = None,
        **options: Any,
    ) -> Rollout:
        """`generate` that ends when there is enough, and goes on with what it left the last time.

        Arguments as for `rollout.driver.rollout`, and `options` as for `sample`.
        """
        return rollout(
            self.engine,
            self._loaded_params(),
            prompts,
            decode_text,
            Options(**self._sampling(**options)),
            carry=carry,
            enough=enough,
            expected_tokens_N=expected_tokens_N,
        )

    def sample(
        self,
        params: Params,
        prompts: Prompts,
        decode_text: Callable[[np.ndarray], str],
        *,
        expected_tokens_N: np.ndarray | None = None,
        **options: Any,
    ) -> Completions:
        """Samples from weights in the generation layout, such as `rollout_params` of a while ago.

        Args:
          params: the weights.
          prompts: N prompts.
          decode_text: token ids to text.
          expected_tokens_N: how long responses are thought to become; see `rollout.driver.rollout`.
          options: fields of `rollout.driver.Options`. The seed is the actor's, and so is the temperature
            unless another is given.
        """
        return self._sampler(
            self.engine,
            params,
            prompts,
            decode_text,
            expected_tokens_N=expected_tokens_N,
            **self._sampling(**options),
        )

    def _sampling(self, **options: Any) -> dict[str, Any]:
        return {"seed": self._seed, "temperature": self._temperature, **options}

    def _loaded_params(self) -> Params:
        if self._rollout_params is None:
            self.load_rollout()
        return self._rollout_params

    # Log-probabilities

    @protocol(PER_TOKEN)
    def logprobs(self, batch: PackedBatch) -> jax.Array:
        """Log-probability of every token under the current weights, float32 [U, M, R, T]."""
        return self._logprobs(self.state.params, batch)

    @protocol(PER_TOKEN)
    def squared_probabilities(self, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        """`logprobs`, and the sum over the vocabulary of the squared probabilities there."""
        return self._squared_probabilities(self.state.params, batch)

    @protocol(PER_TOKEN)
    def reference_logprobs(self, batch: PackedBatch) -> jax.Array:
        """The same under the weights without their adapters: those the training started from."""
        assert self.model.lora.rank, "only a model with adapters holds its own reference"
        return self._reference_logprobs(self.state.params, batch)

    def _packed_logprobs(self, params: Params, batch: PackedBatch) -> jax.Array:
        return each_micro(lambda micro: self._outputs(params, micro)[0].logprob, batch)

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
            self._base_graph,
            reference,
            micro,
            temperature=self._temperature,
        )
        return PolicyOutputs(*outputs), routing

    def _described(self, outputs: PolicyOutputs) -> Stats:
        return {"entropy": outputs.entropy, "mean_token_prob": jnp.exp(outputs.logprob)}
