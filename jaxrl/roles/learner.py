"""What learns: weights, optimiser and the compiled update, whatever the loss.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from jaxrl.algos.aggregation import Aggregation, Counts, count
from jaxrl.algos.moments import Tally, add_tallies
from jaxrl.algos.segments import masked
from jaxrl.mesh.devices import platform_of
from jaxrl.mesh.groupings import ZERO, StateTables
from jaxrl.mesh.offload import at_host, check_host_memory, from_host, offload, onload, to_host
from jaxrl.mesh.protocols import METRICS, protocol
from jaxrl.mesh.rules import TRAIN_RULES, replicated, shardings, shards_of
from jaxrl.models import lora
from jaxrl.models.decoder import Params, init_params
from jaxrl.models.mixture import Routing, load_balancing_loss, routing_metrics
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.narrow_moments import optimizer_shardings
from jaxrl.roles.objective import Objective, Stats
from jaxrl.roles.optimizer import OptimConfig, build_optimizer, learning_rate
from jaxrl.roles.packed_model import PackedModel, micro_of
from jaxrl.roles.train_config import TrainConfig
from jaxrl.types import PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
    """What microbatches add up to.

    Attributes:
      means: of stats, divided as the loss is.
      shares: stats that are divided already.
      kept: counts of the tokens that were trained on.
      largest: stats that do not add up: the larger one stays.
      tally: of the correction inside the loss.
    """

    means: Stats
    shares: Stats
    kept: Counts
    largest: Stats
    tally: Tally

    def __add__(self, other: _Sums) -> _Sums:
        add = functools.partial(jax.tree.map, jnp.add)
        return _Sums(
            add(self.means, other.means),
            add(self.shares, other.shares),
            add(self.kept, other.kept),
            jax.tree.map(jnp.maximum, self.largest, other.largest),
            add_tallies(self.tally, other.tally),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything learning changes.

    Attributes:
      params: master weights, float32; what is frozen below adapters is in the type of activations.
      opt_state: optax state of the trained weights, in their layout.
      step: int32, finished steps.
    """

    params: Params
    opt_state: Any
    step: jax.Array

    def replace(self, **changes) -> TrainState:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


class Learner(PackedModel, abc.ABC):
    """A model that is trained on a mesh: its state and its update. Roles say what they compute of a batch."""

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
        """Builds the programs; `init` or an assignment to `state` gives weights.

        Args:
          model, mesh: what is trained, where.
          train, optim: how it learns.
          seed: of random weights.
          tables: where weights, gradients and moments lie.
          offload: the state waits in pinned host memory while the role is idle.
        """
        super().__init__(model, mesh, train=train, tables=tables)
        if optim.moments_on_host:
            check_host_memory(mesh, "optim.moments_on_host True", "False")
        self.moments_on_host = optim.moments_on_host
        self._optimizer = build_optimizer(optim, self.trained(self.axes))
        self._learning_rate = learning_rate(optim)
        self._gradient_shardings, self._moment_shardings = (
            shardings(self.axes, self.shapes, rules, mesh)
            for rules in (tables.gradients, tables.optimizer)
        )
        self._seed = seed
        self._may_offload = offload
        self._offloaded = False
        self._updates: dict[tuple[tuple[Objective, ...], int], Any] = {}
        self._state: TrainState | None = None
        self._num_updates = 0

    # What a role is

    @abc.abstractmethod
    def _outputs(self, params: Params, micro: Any) -> tuple[Any, Routing | None]:
        """A pytree of [R, T] arrays that losses are made of, and where tokens were routed."""

    def _outputs_against(
        self, params: Params, reference: Params, micro: Any
    ) -> tuple[Any, Routing | None]:
        """`_outputs`, with what objectives that need a reference are made of."""
        raise AssertionError("only a policy has a reference")

    @abc.abstractmethod
    def _described(self, outputs: Any) -> Stats:
        """What to report of the outputs whatever the loss, [R, T] each."""

    # State

    @property
    def state(self) -> TrainState:
        """Weights, optimiser and step; assigned to, initialised or trained, never changed in place.

        Reading it moves nothing: where it may be offloaded or lent to sampling, `for_training` comes first.
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

    @property
    def num_updates(self) -> int:
        """Updates that this object has begun: while it stays the same, so does the state."""
        return self._num_updates

    def for_training(self) -> TrainState:
        """The training state, brought back from wherever it waits."""
        self._onload()
        return self.state

    def offload(self) -> None:
        """Moves the state to the host's memory, if the role was asked to; `for_training` brings it back."""
        if self._may_offload and not self._offloaded:
            self._state = offload(self._state)
            self._offloaded = True

    def _onload(self) -> None:
        if self._offloaded:
            assert self._state is not None, "only a state is offloaded"
            where = self.state_shardings()
            lent = self._state.params is None
            self._state = onload(self._state, where.replace(params=None) if lent else where)
            self._offloaded = False

    def _before_change(self) -> None:
        """What else was made of the weights does not hold any more."""

    def state_shardings(self) -> Any:
        """A TrainState of shardings of the training state."""
        opt_shapes = jax.eval_shape(self._optimizer.init, self.trained(self.shapes))
        everywhere: Any = replicated(self.mesh)
        opt_state = optimizer_shardings(
            self._optimizer, opt_shapes, self.trained(self._moment_shardings), others=everywhere
        )
        opt_state = self._each_moment(at_host, opt_state, opt_shapes)
        return TrainState(self.train_shardings, opt_state, everywhere)

    def _each_moment(self, move: Callable[[Any], Any], tree: Any, shapes: Any) -> Any:
        """`tree`, of an optimiser's state, with `move` done to its moments if they are kept on the host."""
        if not self.moments_on_host:
            return tree
        # Counts stay: a program looks at them all the time, and there is nothing to win.
        return jax.tree.map(lambda x, shape: move(x) if shape.ndim else x, tree, shapes)

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the training state, nothing allocated."""
        shapes = jax.eval_shape(self._fresh_state, self.shapes)
        return _abstract(shapes, self.state_shardings())

    def abstract_gradients(self) -> Params:
        """Shapes and shardings of the gradients of what is trained, nothing allocated."""
        return _abstract(self.trained(self.shapes), self.trained(self._gradient_shardings))

    def _fresh_state(self, params: Params) -> TrainState:
        return TrainState(params, self._optimizer.init(self.trained(params)), jnp.int32(0))

    def trained(self, params: Any) -> Any:
        """The part of a tree of parameters that learns: its adapters, or all of it if it has none."""
        return self._split(params)[0]

    def _split(self, params: Any) -> tuple[Any, Any]:
        """(what is trained, what is frozen) of a tree of parameters; `lora.join` undoes it."""
        return lora.split(params) if self.model.lora.rank else (params, {})

    def init(self) -> None:
        """Random weights, born sharded."""
        make = jax.jit(
            lambda key: self._fresh_state(self._in_own_types(init_params(self.model, key))),
            out_shardings=self.state_shardings(),
        )
        self.state = make(jax.random.key(self._seed))

    def start_from(self, params: Params) -> None:
        """Takes over weights in the training layout (they are donated); optimiser and step start anew.

        Where the model has adapters and `params` has none, fresh ones are added.
        """

        def make(params: Params, key: jax.Array) -> TrainState:
            if self.model.lora.rank and not lora.split(params)[0]:
                params = lora.join(lora.fresh_adapters(self.model, key), params)
            return self._fresh_state(self._in_own_types(params))

        make = jax.jit(make, out_shardings=self.state_shardings(), donate_argnums=0)
        self.state = make(params, jax.random.key(self._seed))

    def _in_own_types(self, params: Params) -> Params:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), params, self.shapes)

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
          batch: what to learn from.
          objective: what to minimise.
          epochs: times that the minibatches are gone through, in their order, in one program.
          also: further batches, of as many minibatches, whose losses are added, such as a pretraining loss.
          reference: weights in the layout of this role's, for an objective that needs them; with adapters
            those below them are the reference, and none are given.
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
        """`update`; returns metrics, and the first minibatch's `objective.own`, [M, R, T] each."""
        batches, objectives = zip((batch, objective), *also, strict=True)
        given = reference is not None or bool(self.model.lora.rank)
        assert given or not objective.needs_reference, "the objective needs a reference's weights"
        assert epochs == 1 or not objective.has_own, (
            "a second epoch would take its own for the first's"
        )
        update = self.update_program(objectives, epochs=epochs)
        state = self.for_training()
        self._before_change()
        # Before, since an update that fails has consumed the state.
        self._num_updates += 1
        self.state, metrics, own = update(state, batches, reference)
        return metrics, own

    def update_program(self, objectives: tuple[Objective, ...], *, epochs: int = 1) -> Any:
        """The compiled `(state, batches, reference) -> (state, metrics, own)`; it consumes the state."""
        if (objectives, epochs) not in self._updates:
            self._updates[objectives, epochs] = jax.jit(
                lambda state, batches, reference: self._update(
                    state, batches, objectives, reference, epochs
                ),
                donate_argnums=0,
                out_shardings=(self.state_shardings(), None, None),
            )
        return self._updates[objectives, epochs]

    # Pure functions

    def _update(
        self,
        state: TrainState,
        batches: Sequence[Any],
        objectives: Sequence[Objective],
        reference: Params | None,
        epochs: int,
    ) -> tuple[TrainState, Stats, dict[str, jax.Array]]:
        lr = self._learning_rate(state.step)
        trained, frozen = self._split(state.params)
        beside = (frozen, frozen if self.model.lora.rank else reference)
        key = jax.random.fold_in(jax.random.key(self._seed), state.step)
        batches = [o.prepare(b, key) for b, o in zip(batches, objectives, strict=True)]

        staged = shards_of("layers", TRAIN_RULES, self.mesh) > 1
        changes_order = staged and platform_of(self.mesh) == "tpu"

        def minibatch(carry, u):
            params, opt_state = carry
            grads, stats, sums, own = self._gradient(params, beside, batches[0], u, objectives[0])
            for batch, objective in zip(batches[1:], objectives[1:], strict=True):
                more, *_ = self._gradient(params, beside, batch, u, objective)
                grads = jax.tree.map(jnp.add, grads, more)
            with jax.named_scope("optimizer"):
                grad_norm = optax.tree.norm(grads)
                opt_state = self._each_moment(from_host, opt_state, opt_state)
                # Adam's bias correction raises a float to an int: optax relies on promotion.
                with jax.numpy_dtype_promotion("standard"):
                    direction, new_opt_state = self._optimizer.update(grads, opt_state, params)
                new_params = jax.tree.map(lambda p, d: p - lr * d, params, direction)
                # A gradient that is not finite would poison the moments for good: skip it and count it.
                # So would Adam's momentum move weights for a minibatch that has nothing left to train on.
                useful = jnp.isfinite(grad_norm) & (stats.pop("tokens") > 0)
                keep = lambda new, old: jnp.where(useful, new, old)  # noqa: E731
                params = jax.tree.map(keep, new_params, params)
                opt_state = jax.tree.map(keep, new_opt_state, opt_state)
                opt_state = self._each_moment(to_host, opt_state, opt_state)
            stats |= {"grad_norm": grad_norm, "skipped_updates": (~useful).astype(jnp.float32)}
            if changes_order:
                params, opt_state = _as_stored((params, opt_state))
            return (params, opt_state), (stats, sums.largest, sums.tally, own)

        U = batches[0].tokens.shape[0]
        (trained, opt_state), (stats_U, largest_U, tally_U, own_U) = jax.lax.scan(
            minibatch, (trained, state.opt_state), jnp.tile(jnp.arange(U), epochs)
        )
        new_state = TrainState(lora.join(trained, frozen), opt_state, state.step + 1)
        metrics = {name: value_U.mean() for name, value_U in stats_U.items()}
        metrics |= {name: value_U.max() for name, value_U in largest_U.items()}
        # Before the first update the policy is still the one that the step began with.
        metrics |= {f"first_{name}": value_U[0] for name, value_U in largest_U.items()}
        if objectives[0].correction is not None:
            metrics |= objectives[0].correction.metrics(tally_U)
        first_kl = stats_U.get("ppo_kl", jnp.zeros(1))[0]
        metrics |= {"lr": lr, "first_ppo_kl": first_kl}
        return new_state, metrics, jax.tree.map(lambda x: x[0], own_U)

    def _gradient(self, params, beside, batch: Any, u, objective: Objective):
        """Gradient of one minibatch's loss, its mean stats, sums over all its microbatches, and their `own`.

        Every sum is divided once, by the minibatch's global count of trained tokens or sequences, so that
        neither microbatches nor packing nor the mesh can change it.
        """
        frozen, reference = beside
        _, M, _, T = batch.tokens.shape
        counts = count(batch.loss_mask[u].reshape(-1, T), batch.segment_ids[u].reshape(-1, T))
        num_tokens = jnp.maximum((batch.segment_ids[u] > 0).sum(dtype=jnp.float32), 1.0)
        correction = objective.correction
        ends_late = correction is not None and correction.ends_late
        # Where the loss itself says which tokens stay, the count is known only at the end.
        known = jax.tree.map(jnp.ones_like, counts) if ends_late else counts

        def micro_loss(params, m):
            micro = micro_of(batch, u, m)
            whole = lora.join(params, frozen)
            if objective.needs_reference:
                outputs, routing = self._outputs_against(whole, reference, micro)
            else:
                outputs, routing = self._outputs(whole, micro)
            own = jax.lax.stop_gradient(objective.own(outputs))
            # Before the first update the weights are those of the start of the step.
            micro = micro.replace(
                **{name: jnp.where(u == 0, x, getattr(micro, name)) for name, x in own.items()}
            )
            tally: Tally = {}
            if correction is not None:
                micro, tally = correction.apply(outputs, micro)
            # Tokens outside the mask are replaced before the loss sees them: whatever they hold, even
            # NaN, then has neither value nor gradient.
            outputs, micro = _inside((outputs, micro), micro.loss_mask)
            total, means = _weighed(objective, known, outputs, micro, self._described(outputs))
            shares: Stats = {}
            if routing is not None:
                # Routing is a matter of whole microbatches, so each weighs as its tokens do.
                share = (micro.segment_ids > 0).sum(dtype=jnp.float32) / num_tokens
                balance = share * load_balancing_loss(routing)
                total = total + self.train.load_balancing_coef * balance
                shares = {name: share * x for name, x in routing_metrics(routing).items()}
            largest = {
                name: masked(x, micro.loss_mask).max()
                for name, x in objective.largest(outputs, micro).items()
            }
            kept = count(micro.loss_mask, micro.segment_ids)
            sums = _Sums(means, shares, kept, largest, tally)
            return total, (jax.lax.stop_gradient(sums), own)

        place = functools.partial(
            jax.lax.with_sharding_constraint, shardings=self.trained(self._gradient_shardings)
        )
        # The backward pass adds to these in place, layer by layer: there is no gradient of a microbatch
        # beside the sum.
        grads = jax.tree.map(jax.new_ref, place(jax.tree.map(jnp.zeros_like, params)))

        def accumulate(m, total):
            pull_back: Any
            _, pull_back, (sums, own) = jax.vjp(lambda p: micro_loss(p, m), params, has_aux=True)
            pull_back.with_refs(grads)(jnp.float32(1))
            own_M = jax.tree.map(lambda x_M, x: x_M.at[m].set(x), total[1], own)
            return total[0] + sums, own_M

        _, (sums, own) = jax.eval_shape(micro_loss, params, 0)
        own_M = jax.tree.map(lambda x: jax.ShapeDtypeStruct((M, *x.shape), x.dtype), own)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, own_M))
        sums, own_M = jax.lax.fori_loop(0, batch.num_micro_U[u], accumulate, zeros)
        grads = place(jax.tree.map(jax.freeze, grads))
        stats = sums.means
        if correction is not None and ends_late:
            assert not self.train.load_balancing_coef, "a share of it would be divided twice"
            divisor = objective.aggregation.divisor(sums.kept) * correction.norm_factor(sums.tally)
            grads = jax.tree.map(lambda g: g / divisor, grads)
            of_stats = objective.stats.divisor(sums.kept)
            stats = {
                name: x / (divisor if name == "loss" else of_stats) for name, x in stats.items()
            }
        return grads, stats | sums.shares | {"tokens": sums.kept.tokens}, sums, own_M


def _as_stored(state: Any) -> Any:
    """A state in the order in which its arrays lie in memory between programs.

    On TPUs with stages the loop over minibatches takes the order that its products like, and with it a copy
    of the whole state: 13 of 42 GB for 7B on two stages of v5p. Elsewhere XLA keeps the order by itself and
    is better not told: the same model took 29 GB instead of 25 with FSDP alone, and twice as much on H100.
    """
    return jax.tree.map(
        lambda x: with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))), state
    )


def _weighed(
    objective: Objective, counts: Counts, outputs: Any, micro: Any, described: Stats
) -> tuple[jax.Array, Stats]:
    """A microbatch's share of the minibatch's loss, and of the means of its stats."""
    loss_RT, stats = objective.loss(outputs, micro)

    def share(aggregation: Aggregation, x_RT: jax.Array) -> jax.Array:
        total = aggregation.total(x_RT, micro.loss_mask, micro.segment_ids)
        return total / aggregation.divisor(counts)

    total = share(objective.aggregation, loss_RT)
    means = {name: share(objective.stats, x) for name, x in (described | stats).items()}
    return total, means | {"loss": total}


def _inside(tree: Any, mask_RT: jax.Array) -> Any:
    """Floats [R, T] of a tree, 0 outside the mask."""

    def one(x: jax.Array) -> jax.Array:
        per_token = x.shape == mask_RT.shape and jnp.issubdtype(x.dtype, jnp.floating)
        return masked(x, mask_RT) if per_token else x

    return jax.tree.map(one, tree)


def _abstract(shapes: Any, where: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        where,
    )
