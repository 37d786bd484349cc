"""Training in two calls: gradients add up over batches, then one step of AdamW applies them.

    accumulate(batch, loss)  -> log-probabilities, loss    gradients += d loss / d weights
    forward(batch, loss)     -> the same                   nothing
    score(weights, batch)    -> log-probabilities,         nothing
                                top-k and drawn tokens
    apply(numbers)           -> norm of the gradient       weights, moments; the gradients are gone

A loss is a sum over tokens with explicit targets (`summed_losses`); nothing is divided. Every batch has
the same shape, whatever its sequences, and its empty microbatches are skipped at run time, so each loss
compiles once. `pack_targets` cuts a larger request into several batches. The optimiser's numbers are
arguments of its program.

The state holds what is trained: all weights, or the adapters alone. With adapters, `frozen` holds the weights
below them, which any number of states share, and an assignment to `trainee` exchanges the state.

Example of one sequence, trained on what follows "a b" (model input "a b c", target tokens "b c d"):

    tokens    a  b  c         targets   b  c  d
    weights   0  1  1         logprob   log p(b | a)   log p(c | a b)   log p(d | a b c)

M microbatches   K targets of a place   R rows   T tokens of a row
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from pydantic import Field

from jaxrl.algos.logprobs import at_places, log_softmax_entropy
from jaxrl.errors import UserError
from jaxrl.mesh.protocols import PER_TOKEN, protocol
from jaxrl.models import lora
from jaxrl.models.decoder import Decoder, Params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import micro_of
from jaxrl.roles.packing import (
    PackedShape,
    Packing,
    PrefixGroups,
    best_fit_decreasing,
    plan_packing,
)
from jaxrl.roles.policy import Actor
from jaxrl.types import PackedBatch
from jaxrl_tinker.summed_losses import SUMMED_LOSSES

# Random numbers are below it. Float32 holds every one of them, divided by it, exactly.
DRAW_NUMBERS = 1 << 24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetBatch(PackedBatch):
    """Packed sequences with explicit targets: entry t of the further fields is about what follows token t.

    Attributes:
      targets: int32 [1, M, K, R, T].
      inputs: arrays of a loss by name, float32 [1, M, K, R, T].
    """

    targets: jax.Array
    inputs: dict[str, jax.Array]


class Targets(NamedTuple):
    """One sequence with its targets, on the host.

    Attributes:
      tokens: int32 [T], input of the model.
      targets: int32 [T, K].
      inputs: arrays of a loss by name, float32 [T, K].
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


class AdamNumbers(NamedTuple):
    """The numbers of a step of AdamW; with `grad_clip_norm` 0 the gradient is not clipped."""

    # Bounds are those of bodies, and finite in float32, in which the program computes.
    learning_rate: Annotated[float, Field(ge=0, le=1e4)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1e30)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0


@dataclasses.dataclass(frozen=True)
class Trainee:
    """What a client trains.

    Attributes:
      state: its training state, without frozen weights; None before the first weights.
      gradients: sum of the gradients since the last step, of adapters after scaling; None for none.
      scale: factor of an adapter's output.
    """

    state: TrainState | None = None
    gradients: Params | None = None
    scale: float = 1.0


class AccumulatingActor(Actor):
    """A policy whose gradients add up until they are applied. Log-probabilities are at temperature 1.

    Attributes:
      frozen: weights below adapters, in the training layout; {} without adapters.
    """

    def __init__(self, model: ModelConfig, mesh: Mesh, **options: Any):
        """Args as for `Actor`, without those of sampling and of the optimiser."""
        # Of the optimiser's settings only the kind matters: its numbers come with each step.
        super().__init__(model, mesh, temperature=1.0, optim=OptimConfig(), **options)
        if (model.sigmoid_routing or model.scaled_layers) and not model.lora.rank:
            raise UserError(
                "this server trains all weights or adapters alone, and correction biases of routers or "
                "factors of layers of this model are never trained; train adapters (leave --full out)"
            )
        where = self.trained(self._gradient_shardings)
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        self._zeros = jax.jit(lambda: zeros(self.trained(self.shapes)), out_shardings=where)
        # Each compiles once per loss and K.
        self.accumulate_program = jax.jit(
            self._accumulate,
            static_argnames="loss",
            donate_argnums=0,
            out_shardings=(where, None, None),
        )
        self.forward_program = jax.jit(self._forward, static_argnames="loss")
        self.score_program = jax.jit(self._score, static_argnames=("top_k", "draws"))
        self.apply_program = jax.jit(
            self._apply, donate_argnums=0, out_shardings=(self.state_shardings(), None)
        )
        self.frozen: Params = {}
        self.trainee = Trainee()

    @property
    def trainee(self) -> Trainee:
        """What is trained now."""
        return Trainee(self._state, self._gradients, self._scale)

    @trainee.setter
    def trainee(self, trainee: Trainee) -> None:
        self._state, self._gradients = trainee.state, trainee.gradients
        self._scale = trainee.scale

    def _fresh_state(self, params: Params) -> TrainState:
        params, like = self.trained(params), self.trained(self.shapes)
        params = jax.tree.map(lambda x, like: x.astype(like.dtype), params, like)
        return TrainState(params, self._optimizer.init(params), jnp.int32(0))

    def state_shardings(self) -> Any:
        """A TrainState of shardings of what is trained."""
        where = super().state_shardings()
        return where.replace(params=self.trained(where.params))

    @protocol(PER_TOKEN)
    def accumulate(self, batch: TargetBatch, loss: str) -> tuple[jax.Array, jax.Array]:
        """Adds the gradient of a loss to the accumulated ones.

        Args:
          batch: the batch, with the arrays of the loss.
          loss: name of `SUMMED_LOSSES`.

        Returns:
          (log-probabilities [1, M, K, R, T] of the targets at every place, sum of the loss).
        """
        gradients = self._zeros() if self._gradients is None else self._gradients
        # The program consumes them even if it fails.
        self._gradients = None
        self._gradients, *found = self.accumulate_program(
            gradients, *self._weights(), batch, loss=loss
        )
        return found[0], found[1]

    @protocol(PER_TOKEN)
    def forward(self, batch: TargetBatch, loss: str) -> tuple[jax.Array, jax.Array]:
        """What `accumulate` returns, without a gradient."""
        return self.forward_program(*self._weights(), batch, loss=loss)

    def _weights(self) -> tuple[Params, Params, np.float32]:
        """What is trained, what is frozen, and the scale."""
        return self.for_training().params, self.frozen, np.float32(self._scale)

    def score(
        self,
        params: Params,
        batch: TargetBatch,
        *,
        top_k: int = 0,
        draws: int = 0,
        temperature: float = 1.0,
    ) -> tuple[jax.Array, ...]:
        """Log-probabilities under any weights on this mesh, in any layout.

        Args:
          params, batch: weights, sequences and targets. The last `draws` targets of a place are no
            tokens but random numbers below `DRAW_NUMBERS`.
          top_k: number of most probable tokens to return at every place.
          draws: number of tokens to draw at every place, at `temperature`.

        Returns:
          (log-probabilities [1, M, K, R, T] of the targets), with `top_k` the most probable tokens of
          every place, int32 [1, M, top_k, R, T], and their log-probabilities, and with `draws` the same of
          the drawn ones. All log-probabilities are at temperature 1.
        """
        return self.score_program(
            params, self.place(batch), np.float32(temperature), top_k=top_k, draws=draws
        )

    def apply(self, numbers: AdamNumbers) -> dict[str, float]:
        """Takes a step of AdamW with the accumulated gradients, which are gone afterwards.

        Returns:
          `grad_norm`, before clipping. Weights and moments stay as they are if it is not finite.
        """
        assert self._gradients is not None, "accumulate comes first"
        state, gradients = self.for_training(), self._gradients
        self._before_change()
        self._gradients = None
        self.num_updates += 1
        # Arrays, not constants: a step with other numbers compiles nothing.
        traced: Any = AdamNumbers(*map(np.float32, numbers))  # pyright: ignore[reportArgumentType]
        scale = np.float32(self._scale)
        self.state, grad_norm = self.apply_program(state, gradients, scale, traced)
        return {"grad_norm": float(grad_norm)}

    # Pure functions

    def _accumulate(
        self,
        gradients: Params,
        trained: Params,
        frozen: Params,
        scale: jax.Array,
        batch: TargetBatch,
        *,
        loss: str,
    ) -> tuple[Params, jax.Array, jax.Array]:
        trained = lora.scaled(trained, scale)
        place = functools.partial(
            jax.lax.with_sharding_constraint, shardings=self.trained(self._gradient_shardings)
        )
        # The backward pass adds to these in place, as in `gradient`.
        refs = jax.tree.map(jax.new_ref, place(gradients))

        def add(micro: TargetBatch) -> tuple[jax.Array, jax.Array]:
            pull_back: Any
            total, pull_back, logprob_KRT = jax.vjp(
                lambda trained: self._loss(lora.join(trained, frozen), micro, loss),
                trained,
                has_aux=True,
            )
            pull_back.with_refs(refs)(jnp.float32(1))
            return logprob_KRT, total

        logprobs, total = _over_microbatches(add, batch)
        return place(jax.tree.map(jax.freeze, refs)), logprobs, total

    def _forward(
        self, trained: Params, frozen: Params, scale: jax.Array, batch: TargetBatch, *, loss: str
    ) -> tuple[jax.Array, jax.Array]:
        params = lora.join(lora.scaled(trained, scale), frozen)
        return _over_microbatches(lambda micro: self._loss(params, micro, loss)[::-1], batch)

    def _score(
        self, params: Params, batch: TargetBatch, temperature: jax.Array, *, top_k: int, draws: int
    ) -> tuple[jax.Array, ...]:
        def further(logprobs_GCV: jax.Array, numbers_GCN: jax.Array) -> tuple[jax.Array, ...]:
            # Ids first: `top_k` returns the values first.
            found = jax.lax.top_k(logprobs_GCV, top_k)[::-1] if top_k else ()
            if draws:
                sums_GCV = jnp.cumsum(jax.nn.softmax(logprobs_GCV / temperature), axis=-1)
                # The whole sum, because it is not 1 exactly: no number may fall behind the last token.
                heights_GCN = sums_GCV[..., -1:] * (numbers_GCN.astype(jnp.float32) / DRAW_NUMBERS)
                is_below = sums_GCV[..., None, :] <= heights_GCN[..., None]
                ids_GCN = is_below.sum(axis=-1, dtype=jnp.int32)
                found += (ids_GCN, jnp.take_along_axis(logprobs_GCV, ids_GCN, axis=-1))
            return found

        K = batch.targets.shape[2] - draws
        found, _ = _over_microbatches(
            lambda micro: (self._target_logprobs(params, micro, K, further), jnp.float32(0)), batch
        )
        return found

    def _loss(self, params: Params, micro: TargetBatch, loss: str) -> tuple[jax.Array, jax.Array]:
        """(sum of the loss, log-probabilities [K, R, T]) of a microbatch."""
        (logprob_KRT,) = self._target_logprobs(params, micro)
        function, given = SUMMED_LOSSES[loss].function, micro.inputs
        if loss == "cross_entropy":
            loss_KRT = function(logprob_KRT, micro.segment_ids, **given)
        else:
            # Only cross entropy has several targets of a place.
            loss_KRT = function(
                logprob_KRT[0], micro.segment_ids, **{name: x[0] for name, x in given.items()}
            )
        return loss_KRT.sum(), jax.lax.stop_gradient(logprob_KRT)

    def _target_logprobs(
        self,
        params: Params,
        micro: TargetBatch,
        K: int | None = None,
        further: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]] = lambda *_: (),
    ) -> tuple[jax.Array, ...]:
        """Log-probabilities [K, R, T] of the targets, and `further` values [N, R, T] of all tokens'.

        `further` gets the log-probabilities [G, C, V] of a chunk, and what follows its first K targets.
        """
        model: Decoder = nnx.merge(self.graph, params)
        logits_of, hidden_BTD = self._head(model, self._run(model, micro).hidden_BTD, micro)

        def chunk(hidden_GCD: jax.Array, targets_GCK: jax.Array, needed: jax.Array):
            logprobs_GCV, _ = log_softmax_entropy(logits_of(hidden_GCD, needed))
            of_targets = jnp.take_along_axis(logprobs_GCV, targets_GCK[..., :K], axis=-1)
            return of_targets, *further(logprobs_GCV, targets_GCK[..., K:])

        found = at_places(
            chunk,
            hidden_BTD,
            jnp.moveaxis(micro.targets, 0, -1),
            micro.segment_ids > 0,
            **self._chunks(micro),
        )
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), found)

    @jax.named_scope("optimizer")
    def _apply(
        self, state: TrainState, gradients: Params, scale: jax.Array, numbers: AdamNumbers
    ) -> tuple[TrainState, jax.Array]:
        # The chain rule of `scaled`: JAX 0.10.2 cannot add the gradient of a product to a ref.
        gradients = lora.scaled(gradients, scale)
        trained, grad_norm = state.params, optax.tree.norm(gradients)
        _, beta1, beta2, eps, decay, most = (jnp.asarray(x) for x in numbers)
        # Padding of an adapter has no gradient, and 0 / 0 must not be its step.
        options: Any = {"b1": beta1, "b2": beta2, "eps": jnp.maximum(eps, 1e-30)}
        # Adam's bias correction raises a float to an int: optax relies on promotion.
        with jax.numpy_dtype_promotion("standard"):
            # `optimizer.build_optimizer` with traced numbers; its state is the same.
            optimizer = optax.chain(
                optax.clip_by_global_norm(jnp.where(most > 0, most, jnp.inf)),  # pyright: ignore
                optax.scale_by_adam(**options),
                optax.add_decayed_weights(decay),
            )
            direction, opt_state = optimizer.update(gradients, state.opt_state, trained)
        new = jax.tree.map(lambda p, d: p - numbers.learning_rate * d, trained, direction)
        # A gradient that is not finite would leave NaN in the moments forever.
        trained, opt_state = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(grad_norm), new, old),
            (new, opt_state),
            (trained, state.opt_state),
        )
        return TrainState(trained, opt_state, state.step + 1), grad_norm


def _over_microbatches(function: Any, batch: TargetBatch) -> Any:
    """Calls `function(microbatch) -> (values [K, R, T], number)` for each that holds tokens.

    Returns:
      (values [1, M, K, R, T], 0 in empty microbatches; the sum of the numbers).
    """
    M = batch.tokens.shape[1]
    values, number = jax.eval_shape(lambda: function(micro_of(batch, 0, 0)))
    zeros = jax.tree.map(lambda x: jnp.zeros((1, M, *x.shape), x.dtype), values)

    def one(m, carry):
        values, number = function(micro_of(batch, 0, m))
        put = lambda x_M, x: x_M.at[0, m].set(x)  # noqa: E731
        return jax.tree.map(put, carry[0], values), carry[1] + number

    total = jnp.zeros((), number.dtype)
    return jax.lax.fori_loop(0, batch.num_micro_U[0], one, (zeros, total))


@dataclasses.dataclass(frozen=True)
class PackedTargets:
    """A batch of some of the given sequences.

    Attributes:
      batch: the batch, on the host.
      indices: index of each of its sequences among those given.
      packing: where they are.
    """

    batch: TargetBatch
    indices: tuple[int, ...]
    packing: Packing

    def unpack(self, values: Any) -> Iterator[tuple[int, np.ndarray]]:
        """(index of a sequence, its values [T, K]) from values [1, M, K, R, T]."""
        values = np.asarray(values)
        of_k = [self.packing.unpack(values[:, :, k]) for k in range(values.shape[2])]
        for i, each in zip(self.indices, zip(*of_k, strict=True), strict=True):
            yield i, np.stack(each, axis=-1)


def pack_targets(
    sequences: Sequence[Targets], shape: PackedShape, *, shards: int = 1
) -> Iterator[PackedTargets]:
    """Packs sequences into as many batches of one shape as they need.

    Args:
      sequences: sequences with the same K and the same names of inputs, none longer than a row.
      shape: shape of a batch, with one minibatch.
      shards: number of devices that split the rows of a microbatch.
    """
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    everyone = np.arange(len(lengths))
    groups = PrefixGroups(everyone, np.zeros_like(everyone))
    rows = best_fit_decreasing(everyone, lengths, groups, shape.tokens)
    most = shape.microbatches * shape.rows
    for first in range(0, len(rows), most):
        # Best-fit finds the same rows for these sequences alone.
        indices = sorted(i for row in rows[first : first + most] for i in row)
        chosen = [sequences[i] for i in indices]
        packing = plan_packing(lengths[indices].tolist(), shape, shards=shards)

        def pack(arrays: Sequence[np.ndarray], dtype: Any, packing: Packing = packing) -> Any:
            of_k = [
                packing.pack([x[:, k] for x in arrays], dtype) for k in range(arrays[0].shape[1])
            ]
            return np.stack(of_k, axis=2)

        places = packing.fields()
        batch = TargetBatch(
            tokens=packing.pack([x.tokens for x in chosen], np.int32),  # pyright: ignore
            # Every token has log-probabilities to return; weights and advantages say which ones count.
            loss_mask=(places["segment_ids"] > 0).astype(np.float32),  # pyright: ignore
            targets=pack([x.targets for x in chosen], np.int32),
            inputs={
                name: pack([x.inputs[name] for x in chosen], np.float32)
                for name in chosen[0].inputs
            },
            **places,
        )
        yield PackedTargets(batch, tuple(indices), packing)
