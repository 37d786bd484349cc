"""Training state and the compiled update of a model, whatever the loss.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from jaxrl.mesh.devices import platform_of
from jaxrl.mesh.offload import offload, onload
from jaxrl.mesh.protocols import METRICS, protocol
from jaxrl.mesh.rules import TRAIN_RULES, replicated, shardings, shards_of, with_shardings
from jaxrl.models import lora
from jaxrl.models.decoder import Params, fitted, init_params
from jaxrl.models.mixture import Routing
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.eight_bit_moments import optimizer_shardings
from jaxrl.roles.gradient import MinibatchGradient, minibatch_gradient
from jaxrl.roles.losses import Objective, Stats
from jaxrl.roles.optimizer import OptimConfig, Schedule, build_optimizer, learning_rate
from jaxrl.roles.packed_model import PackedModel
from jaxrl.types import PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes.

    Attributes:
      params: master weights, float32; weights frozen below adapters have the dtype of activations, but for
        `exact` ones.
      opt_state: optax state of the trained weights, in their layout.
      step: int32, finished steps.
    """

    params: Params
    opt_state: Any
    step: jax.Array

    def replace(self, **changes) -> TrainState:
        return dataclasses.replace(self, **changes)


class Learner(PackedModel, abc.ABC):
    """A model that is trained on a mesh: its state and its update. Subclasses compute the outputs.

    Attributes:
      num_updates: number of updates started so far. The state changes only when it does.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        optim: OptimConfig,
        seed: int,
        offload: bool = False,
        **options: Any,
    ):
        """Builds the programs; `init` or an assignment to `state` gives weights.

        Args:
          model, mesh, options: as for `PackedModel`; the rules are those of gradients and moments too.
          optim: settings of the optimiser.
          seed: seed of random weights and of random choices of an objective.
          offload: keep the state in pinned host memory while the role is idle.
        """
        super().__init__(model, mesh, **options)
        self._optimizer = build_optimizer(optim, self.trained(self.axes))
        self.schedule = Schedule.of(optim)
        self._gradient_shardings, self._moment_shardings = (
            shardings(self.axes, self.shapes, rules, mesh)
            for rules in (self.state_rules.gradients, self.state_rules.optimizer)
        )
        self._seed = seed
        self._may_offload = offload
        self._offloaded = False
        self._updates: dict[tuple[tuple[Objective, ...], int], Any] = {}
        self._state: TrainState | None = None
        self.num_updates = 0

    # Subclasses

    @abc.abstractmethod
    def _outputs(
        self, params: Params, micro: Any, *, supervised: bool = False
    ) -> tuple[Any, Routing | None]:
        """The arrays [R, T] that losses read, as a pytree, and the routing of a mixture of experts.

        `supervised` is for objectives whose tokens are examples, not samples.
        """

    def _outputs_against(
        self, params: Params, reference: Params, micro: Any
    ) -> tuple[Any, Routing | None]:
        """`_outputs` with the comparison to a reference, for objectives that need one."""
        raise AssertionError("only a policy has a reference")

    @abc.abstractmethod
    def _described(self, outputs: Any) -> Stats:
        """Stats [R, T] of the outputs that are reported whatever the loss."""

    # State

    @property
    def state(self) -> TrainState:
        """Weights, optimiser and step. Never changed in place.

        Reading it moves nothing: call `for_training` first if the state may be offloaded or lent to sampling.
        """
        state = self._state
        assert state is not None, "init() or an assignment to `state` comes first"
        assert not self._offloaded and state.params is not None, (
            "the training state waits on the host, or sampling has its weights: call for_training()"
        )
        return state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._offloaded = False
        self._state = state
        self._before_change()

    def for_training(self) -> TrainState:
        """The training state, brought back to the training devices first if need be."""
        self._onload()
        return self.state

    def offload(self) -> None:
        """Moves the state to host memory if `offload` was set; `for_training` brings it back."""
        if self._may_offload and not self._offloaded:
            self._state = offload(self._state)
            self._offloaded = True

    def _onload(self) -> None:
        if self._offloaded:
            assert self._state is not None, "only a state is offloaded"
            where = self.state_shardings()
            # Weights that sampling holds are not on the host; `for_training` brings them back.
            lent = self._state.params is None
            self._state = onload(self._state, where.replace(params=None) if lent else where)
            self._offloaded = False

    def _before_change(self) -> None:
        """Invalidates everything derived from the weights."""

    def state_shardings(self) -> Any:
        """A TrainState of shardings of the training state."""
        opt_shapes = jax.eval_shape(self._optimizer.init, self.trained(self.shapes))
        everywhere: Any = replicated(self.mesh)
        opt_state = optimizer_shardings(
            self._optimizer, opt_shapes, self.trained(self._moment_shardings), others=everywhere
        )
        return TrainState(self.train_shardings, opt_state, everywhere)

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the training state, nothing allocated."""
        shapes = jax.eval_shape(self._fresh_state, self.shapes)
        return with_shardings(shapes, self.state_shardings())

    def abstract_gradients(self) -> Params:
        """Shapes and shardings of the gradients of what is trained, nothing allocated."""
        return with_shardings(self.trained(self.shapes), self.trained(self._gradient_shardings))

    def skip_update(self) -> None:
        """Counts a step without an update: its schedule goes on, weights and moments stay."""
        state = self.for_training()
        self.num_updates += 1
        self.state = state.replace(step=state.step + 1)

    def _fresh_state(self, params: Params) -> TrainState:
        params = fitted(params, self.shapes)
        params = jax.tree.map(lambda x, like: x.astype(like.dtype), params, self.shapes)
        return TrainState(params, self._optimizer.init(self.trained(params)), jnp.int32(0))

    def trained(self, params: Any) -> Any:
        """The trained part of a tree of parameters: its adapters; without adapters all but `lora.FROZEN`."""
        return self._split(params)[0]

    def _split(self, params: Any) -> tuple[Any, Any]:
        """(trained, frozen) parts of a tree of parameters; `lora.join` undoes it."""
        return (lora.split if self.model.lora.rank else lora.split_trained)(params)

    def init(self) -> None:
        """Random weights, born sharded."""
        # One program makes and places them: no device ever holds a whole weight.
        make = jax.jit(
            lambda key: self._fresh_state(init_params(self.model, key)),
            out_shardings=self.state_shardings(),
        )
        self.state = make(jax.random.key(self._seed))

    def start_from(self, params: Params) -> None:
        """Starts from weights in the training layout (they are donated) with a fresh optimiser and step 0.

        Adds fresh adapters if the model has adapters and `params` has none.
        """

        def make(params: Params, key: jax.Array) -> TrainState:
            if self.model.lora.rank and not lora.split(params)[0]:
                params = lora.join(lora.fresh_adapters(self.model, key), params)
            return self._fresh_state(params)

        make = jax.jit(make, out_shardings=self.state_shardings(), donate_argnums=0)
        self.state = make(params, jax.random.key(self._seed))

    # Learning

    @protocol(METRICS)
    def update(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        epochs: int = 1,
        also: Sequence[tuple[PackedBatch, Objective]] = (),
        reference: Params | None = None,
    ) -> dict[str, jax.Array]:
        """One step of training: epochs * U optimiser updates; returns metrics, still on the device.

        Args:
          batch: the packed batch.
          objective: the loss to minimise.
          epochs: passes over the minibatches, in their order, in one program.
          also: further batches with as many minibatches, whose losses are added, such as a pretraining loss.
          reference: weights in this role's layout, for an objective that needs them. None with adapters: the
            frozen weights below them are the reference.
        """
        return self._learn(batch, objective, also, reference, epochs)[0]

    def _learn(
        self,
        batch: PackedBatch,
        objective: Objective,
        also: Sequence[tuple[PackedBatch, Objective]],
        reference: Params | None,
        epochs: int = 1,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """`update`; returns metrics, and the first minibatch's `objective.this_pass`, [M, R, T] each."""
        batches, objectives = zip((batch, objective), *also, strict=True)
        given = reference is not None or bool(self.model.lora.rank)
        assert given or not objective.needs_reference, "the objective needs a reference's weights"
        assert epochs == 1 or not objective.uses_this_pass, (
            "the first minibatch of a second epoch no longer has the policy that the step began with"
        )
        update = self.update_program(objectives, epochs=epochs)
        state = self.for_training()
        self._before_change()
        # Count first: an update that fails has consumed the state all the same.
        self.num_updates += 1
        self.state, metrics, this_pass = update(state, batches, reference, self.schedule)
        return metrics, this_pass

    def update_program(self, objectives: tuple[Objective, ...], *, epochs: int = 1) -> Any:
        """The compiled `(state, batches, reference, schedule) -> (state, metrics, this_pass)`.

        The state is donated.
        """
        # Kept: `jax.jit` of another function object would compile the same program again.
        if (objectives, epochs) not in self._updates:
            self._updates[objectives, epochs] = jax.jit(
                functools.partial(self._update, objectives=objectives, epochs=epochs),
                donate_argnums=0,
                # Sharded like the old state: its donated buffers fit, and the next step compiles nothing.
                out_shardings=(self.state_shardings(), None, None),
            )
        return self._updates[objectives, epochs]

    # Pure functions

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
        lr = learning_rate(schedule, state.step)
        trained, frozen = self._split(state.params)
        # The weights below the adapters are those that training started from.
        reference = frozen if self.model.lora.rank and reference is None else reference
        # From seed and step alone, so that a resumed run selects the tokens that the original would.
        key = jax.random.fold_in(jax.random.key(self._seed), state.step)
        batches = [o.prepare(b, key) for b, o in zip(batches, objectives, strict=True)]
        # On TPUs with pipeline stages XLA chooses another memory layout for the state in the loop over
        # minibatches, to suit its matmuls, and copies all of it: 13 of 42 GB for 7B on two stages of v5p.
        # There the layout is pinned to the one between programs. Elsewhere XLA keeps that, and pinning does
        # harm: the same model took 29 GB instead of 25 with FSDP alone, and twice as much on H100.
        staged = shards_of("layers", TRAIN_RULES, self.mesh) > 1
        changes_layout = staged and platform_of(self.mesh) == "tpu"

        def minibatch(carry, u):
            params, opt_state = carry
            first, *others = (
                self._gradient(params, frozen, reference, batch, u, objective)
                for batch, objective in zip(batches, objectives, strict=True)
            )
            grads = first.grads
            for other in others:
                grads = jax.tree.map(jnp.add, grads, other.grads)
            # A further batch, such as that of pretraining, has a loss whatever the advantages of the first.
            has_gradient = (first.sums.trained.tokens > 0) & (first.has_signal | bool(others))
            carry, stats = self._optimizer_step(params, opt_state, grads, lr, has_gradient)
            if changes_layout:
                carry = jax.tree.map(
                    lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), carry
                )
            return carry, (first.stats | stats, first.sums, first.this_pass)

        U = batches[0].tokens.shape[0]
        # All passes in one scan: a pass more compiles nothing larger.
        (trained, opt_state), (stats_U, sums_U, this_pass_U) = jax.lax.scan(
            minibatch, (trained, state.opt_state), jnp.tile(jnp.arange(U), epochs)
        )
        new_state = TrainState(lora.join(trained, frozen), opt_state, state.step + 1)
        skipped_U = stats_U.pop("skipped_updates")
        metrics = {"skipped_updates": skipped_U.mean()}
        some_U = sums_U.trained.tokens > 0
        metrics |= {name: _mean_where(some_U, value_U) for name, value_U in stats_U.items()}
        for name, value_U in sums_U.maxima.items():
            # Before its first update the policy is still the one that the step began with.
            metrics |= {name: value_U.max(), f"first_{name}": value_U[0]}
        if objectives[0].correction is not None:
            metrics |= objectives[0].correction.metrics(sums_U.correction)
        metrics |= {"first_ppo_kl": stats_U.get("ppo_kl", jnp.zeros(1))[0], "lr": lr}
        return new_state, metrics, jax.tree.map(lambda x: x[0], this_pass_U)

    def _gradient(
        self,
        trained: Params,
        frozen: Params,
        reference: Params | None,
        batch: Any,
        u: jax.Array,
        objective: Objective,
    ) -> MinibatchGradient:
        """The gradient of what is trained; `reference` has the weights for objectives that need them."""

        def forward(trained: Params, micro: Any) -> tuple[Any, Routing | None]:
            params = lora.join(trained, frozen)
            if objective.needs_reference:
                assert reference is not None, "the objective needs a reference's weights"
                return self._outputs_against(params, reference, micro)
            return self._outputs(params, micro, supervised=objective.supervised)

        return minibatch_gradient(
            trained,
            batch,
            u,
            objective,
            forward=forward,
            describe=self._described,
            load_balancing_coef=self.train.load_balancing_coef,
            place=functools.partial(
                jax.lax.with_sharding_constraint, shardings=self.trained(self._gradient_shardings)
            ),
            # On CPU the barrier costs a copy of the embedding.
            in_loop=platform_of(self.mesh) not in (None, "cpu"),
        )

    @jax.named_scope("optimizer")
    def _optimizer_step(
        self, params: Params, opt_state: Any, grads: Params, lr: jax.Array, has_gradient: jax.Array
    ) -> tuple[tuple[Params, Any], Stats]:
        """((new weights, new optimiser state), stats); both stay as they are if the update is skipped."""
        grad_norm = optax.tree.norm(grads)
        # Adam's bias correction raises a float to an int: optax relies on promotion.
        with jax.numpy_dtype_promotion("standard"):
            direction, new_opt_state = self._optimizer.update(grads, opt_state, params)
        new_params = jax.tree.map(lambda p, d: p - lr * d, params, direction)
        # A gradient that is not finite would leave NaN in the moments forever: skip the update and count it.
        # A minibatch without a gradient is skipped too: Adam's momentum would still move the weights.
        useful = jnp.isfinite(grad_norm) & has_gradient
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(useful, new, old),
            (new_params, new_opt_state),
            (params, opt_state),
        )
        stats = {"grad_norm": grad_norm, "skipped_updates": (~useful).astype(jnp.float32)}
        return (params, opt_state), stats


def _mean_where(some_U: jax.Array, value_U: jax.Array) -> jax.Array:
    """The mean over the minibatches with trained tokens; over all if none has any, whose means are 0."""
    some_U = some_U | ~some_U.any()
    return jnp.mean(value_U, where=some_U)
