"""An actor whose updates are steps of TRPO (Schulman et al. 2015, arXiv 1502.05477, algorithm 1).

    g        gradient of the loss over the packed batch
    F v      product of the Fisher matrix with a vector: the Hessian of the mean KL to the policy itself,
             differentiated forwards through its gradient, microbatch by microbatch
    x        F x = g by conjugate gradients
    step     -sqrt(2 max_kl / x^T F x) x, halved until the loss falls and the KL is at most max_kl

The KL is exact, a sum over the vocabulary, and its mean is over trained tokens. All of it is one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl.algos.aggregation import count
from jaxrl.algos.natural_gradient import combined, conjugate_gradients, line_search, step_length
from jaxrl.algos.segments import masked
from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.decoder import Params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.gradient import MicrobatchLoss
from jaxrl.roles.learner import TrainState
from jaxrl.roles.losses import Objective, Stats
from jaxrl.roles.optimizer import Schedule
from jaxrl.roles.packed_model import micro_of
from jaxrl.roles.policy import Actor

# Multiple of the identity that is added to the Fisher matrix. With more of it the step is smaller and turns
# towards the plain gradient.
DAMPING = 0.1
# Products of the Fisher matrix in a step (appendix C of the paper uses 10), and halvings of the line search.
ITERATIONS = 10
TRIES = 10


def kl_to_itself(logprobs: jax.Array) -> jax.Array:
    """KL(p || q) [...] of log-probabilities [..., V], with p = q held fixed.

    Its value and gradient are 0, and its Hessian is the Fisher matrix.
    """
    possible = logprobs > -jnp.inf
    logprobs = masked(logprobs, possible)
    old = jax.lax.stop_gradient(logprobs)
    return jnp.sum(masked(jnp.exp(old), possible) * (old - logprobs), axis=-1)


class TrustRegionActor(Actor):
    """An `Actor` that takes one step of TRPO per batch instead of optimiser updates."""

    # The kernels have no second derivative.
    attention_kernel = "xla"

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        max_kl: float,
        damping: float = DAMPING,
        **options: Any,
    ):
        """Args.

        model, mesh, options: as for `Actor`. The optimiser and its learning rate are not used.
        max_kl: bound on the mean KL of a step, in nats per token.
        damping: multiple of the identity that is added to the Fisher matrix.

        Raises:
          UserError: settings whose programs cannot be differentiated twice.
        """
        if model.num_experts:
            raise UserError(
                "the Fisher matrix of a trust region is a second derivative, and there is none of a "
                f"mixture of {model.num_experts} experts; take a dense model"
            )
        super().__init__(model, mesh, **options)
        # No moments: the step follows from the batch alone.
        self._optimizer = optax.identity()
        self._max_kl = max_kl
        self._damping = damping

    def _update(
        self,
        state: TrainState,
        batches: Sequence[Any],
        reference: Params | None,
        schedule: Schedule,
        *,
        objectives: Sequence[Objective],
        epochs: int,
    ) -> tuple[TrainState, Stats, dict[str, jax.Array]]:
        (batch,), (objective,) = batches, objectives
        assert epochs == 1 and batch.tokens.shape[0] == 1, "a trust region has one step per batch"
        params, frozen = self._split(state.params)
        batch = objective.prepare(batch, jax.random.fold_in(jax.random.key(self._seed), state.step))
        gradient = self._gradient(params, frozen, reference, batch, jnp.int32(0), objective)

        x, fisher_x = conjugate_gradients(
            lambda vector: combined(
                self._fisher_product(params, frozen, batch, vector), self._damping, vector
            ),
            gradient.grads,
            iterations=ITERATIONS,
        )
        length = step_length(x, fisher_x, max_kl=self._max_kl)

        def moved(fraction: jax.Array) -> Params:
            return combined(params, -fraction * length, x)

        def measure(fraction: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = moved(fraction)
            loss = self._loss(new, frozen, batch, objective)
            return loss, self._kl(params, new, frozen, batch)

        loss = gradient.stats["loss"]
        found = line_search(measure, loss, max_kl=self._max_kl, tries=TRIES)
        # Without an accepted step the direction may not be finite, and 0 times that is NaN.
        accepted = found.fraction > 0
        params = jax.tree.map(
            lambda new, old: jnp.where(accepted, new, old), moved(found.fraction), params
        )
        metrics = gradient.stats | {
            "grad_norm": optax.tree.norm(gradient.grads),
            "skipped_updates": (~accepted).astype(jnp.float32),
            "trust_region_kl": found.kl,
            "trust_region_gain": loss - found.loss,
            "line_search_tries": found.tried.astype(jnp.float32),
        }
        new_state = state.replace(params=lora.join(params, frozen), step=state.step + 1)
        return new_state, metrics, {}

    def _fisher_product(self, params: Params, frozen: Params, batch: Any, vector: Params) -> Params:
        """F v, without damping, in the layout of the gradients."""

        def product(micro: Any) -> Params:
            def kl(params: Params) -> jax.Array:
                _, kl_RT, *_ = self.policy(
                    self.graph,
                    lora.join(params, frozen),
                    micro,
                    temperature=self._temperature,
                    statistic=kl_to_itself,
                )
                return masked(kl_RT, micro.loss_mask).sum()

            # Forward over reverse: the product with a Hessian that is never built.
            return jax.jvp(jax.grad(kl), (params,), (vector,))[1]

        return jax.lax.with_sharding_constraint(
            _mean_over_tokens(product, batch), self.trained(self._gradient_shardings)
        )

    def _kl(self, old: Params, new: Params, frozen: Params, batch: Any) -> jax.Array:
        """Mean KL(old || new) over trained tokens."""

        def kl(micro: Any) -> jax.Array:
            # The new policy is the "reference" here: KL(policy || reference) is then KL(old || new).
            _, _, kl_RT, _ = self.policy_and_kl(
                self.graph,
                lora.join(old, frozen),
                self,
                self.graph,
                lora.join(new, frozen),
                micro,
                temperature=self._temperature,
            )
            return masked(kl_RT, micro.loss_mask).sum()

        return _mean_over_tokens(kl, batch)

    def _loss(self, params: Params, frozen: Params, batch: Any, objective: Objective) -> jax.Array:
        T = batch.tokens.shape[-1]
        mask, segment_ids = (x[0].reshape(-1, T) for x in (batch.loss_mask, batch.segment_ids))
        loss = MicrobatchLoss(
            lambda params, micro: self._outputs(lora.join(params, frozen), micro),
            self._described,
            objective,
            self.train.load_balancing_coef,
            jnp.int32(0),
            counts=count(mask, segment_ids),
            num_tokens=jnp.maximum((segment_ids > 0).sum(dtype=jnp.float32), 1.0),
        )
        return _total(lambda micro: loss(params, micro)[0], batch)


def _total(function: Callable[[Any], Any], batch: Any) -> Any:
    """The sum of a function of microbatches over those of the one minibatch."""
    shapes = jax.eval_shape(lambda: function(micro_of(batch, 0, 0)))
    return jax.lax.fori_loop(
        0,
        batch.num_micro_U[0],
        lambda m, total: jax.tree.map(jnp.add, total, function(micro_of(batch, 0, m))),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    )


def _mean_over_tokens(function: Callable[[Any], Any], batch: Any) -> Any:
    """`_total`, divided by the number of trained tokens."""
    num_tokens = jnp.maximum(batch.loss_mask.sum(), 1.0)
    return jax.tree.map(lambda x: x / num_tokens, _total(function, batch))
