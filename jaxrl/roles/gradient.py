"""The gradient of one minibatch: microbatch after microbatch, divided once by the minibatch's count.

A microbatch passes through `MicrobatchLoss`:

    forward           outputs [R, T]: log-probabilities and entropy of a policy, values of a critic
    this pass         in the first minibatch of a step the outputs stand in for the old log-probabilities
    correction        importance weights; rejected tokens leave the mask
    mask              every float outside the mask becomes 0, so that not even a NaN there has a gradient
    loss              per token, summed by the objective's aggregation, divided by the minibatch's count
    loss beside       of the values of an actor-critic, by an aggregation of its own
    load balancing    of a mixture of experts, weighted by the microbatch's share of the tokens

`minibatch_gradient` adds the microbatches up. With M = 3, of which the last is empty:

    microbatch 0    6 trained tokens, losses sum to 3.0    3.0 / 10 = .3
    microbatch 1    4 trained tokens, losses sum to 1.0    1.0 / 10 = .1
    microbatch 2    no tokens                              not computed
    minibatch      10 trained tokens                       loss .4, the mean over its tokens

The result does not depend on how the tokens are split over microbatches, rows and devices.

U minibatches   M microbatches   R rows   T tokens of a row
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.aggregation import Aggregation, Counts, count
from jaxrl.algos.moments import RunningMoments, add_moments
from jaxrl.algos.segments import masked
from jaxrl.models.decoder import Params
from jaxrl.models.mixture import Routing, load_balancing_loss, routing_metrics
from jaxrl.roles.losses import Objective, Stats
from jaxrl.roles.packed_model import micro_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Statistics of microbatches, which `+` combines.

    Attributes:
      means: stats that are divided by the same count as the loss.
      shares: stats that are weighted by the microbatch's share of the tokens.
      trained: counts of the tokens and sequences in the mask.
      maxima: stats of which the largest value stays.
      correction: statistics of the correction inside the loss.
    """

    means: Stats
    shares: Stats
    trained: Counts
    maxima: Stats
    correction: RunningMoments

    def __add__(self, other: Sums) -> Sums:
        add = functools.partial(jax.tree.map, jnp.add)
        return Sums(
            add(self.means, other.means),
            add(self.shares, other.shares),
            add(self.trained, other.trained),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            add_moments(self.correction, other.correction),
        )


@dataclasses.dataclass(frozen=True)
class MicrobatchLoss:
    """The loss of any microbatch of minibatch u.

    Attributes:
      forward: (trained weights, microbatch) -> (outputs, routing); routing is None without experts.
      describe: (outputs) -> stats [R, T] that are reported whatever the loss.
      objective: the loss per token, how it adds up, and what surrounds it.
      load_balancing_coef: weight of the load-balancing loss.
      u: index of the minibatch in its step.
      counts: trained tokens and sequences of the minibatch, by which the loss is divided; ones where the
        objective's normaliser is deferred.
      num_tokens: tokens of the minibatch outside padding, at least 1.
    """

    forward: Callable[[Params, Any], tuple[Any, Routing | None]]
    describe: Callable[[Any], Stats]
    objective: Objective
    load_balancing_coef: float
    u: jax.Array
    counts: Counts
    num_tokens: jax.Array

    def __call__(self, params: Params, micro: Any) -> tuple[jax.Array, tuple[Sums, Stats]]:
        """The microbatch's part of the loss, its sums, and its outputs under the names of batch fields."""
        objective = self.objective
        outputs, routing = self.forward(params, micro)
        this_pass = jax.lax.stop_gradient(objective.this_pass(outputs))
        # Before the first update of a step the weights are those that the step began with.
        first = self.u == 0
        micro = micro.replace(
            **{name: jnp.where(first, x, getattr(micro, name)) for name, x in this_pass.items()}
        )
        correction: RunningMoments = {}
        if objective.correction is not None:
            micro, correction = objective.correction.apply(outputs, micro)
        mask_RT = micro.loss_mask
        outputs, micro = jax.tree.map(
            lambda x: (
                masked(x, mask_RT)
                if x.shape == mask_RT.shape and jnp.issubdtype(x.dtype, jnp.floating)
                else x
            ),
            (outputs, micro),
        )

        def share_of(aggregation: Aggregation, x_RT: jax.Array) -> jax.Array:
            total = aggregation.total(x_RT, micro.loss_mask, micro.segment_ids)
            return total / aggregation.divisor(self.counts)

        loss_RT, stats = objective.loss(outputs, micro)
        loss = share_of(objective.aggregation, loss_RT)
        stats = self.describe(outputs) | stats
        means = {"loss": loss}
        if objective.beside is not None:
            beside_RT, of_beside = objective.beside(outputs, micro)
            loss, stats = loss + share_of(objective.stats, beside_RT), stats | of_beside
        means |= {name: share_of(objective.stats, x) for name, x in stats.items()}
        shares: Stats = {}
        if routing is not None:
            # Routing is known per microbatch, not per token: each microbatch weighs as its tokens do.
            share = (micro.segment_ids > 0).sum(dtype=jnp.float32) / self.num_tokens
            balance = share * load_balancing_loss(routing)
            shares = {name: share * x for name, x in routing_metrics(routing).items()}
            loss = loss + self.load_balancing_coef * balance
        maxima = objective.maxima(outputs, micro).items()
        # They are at least 0, so the 0 of masked tokens cannot win.
        maxima = {name: masked(x, micro.loss_mask).max() for name, x in maxima}
        trained = count(micro.loss_mask, micro.segment_ids)
        sums = Sums(means, shares, trained, maxima, correction)
        return loss, (jax.lax.stop_gradient(sums), this_pass)


@dataclasses.dataclass(frozen=True)
class MinibatchGradient:
    """The contribution of one minibatch to an update.

    Attributes:
      has_signal: whether any microbatch had a backward pass.
      grads: gradients of the trained weights.
      stats: means over the minibatch, scalars; "loss" among them.
      sums: sums over its microbatches.
      this_pass: the objective's `this_pass`, [M, R, T] each.
    """

    has_signal: jax.Array
    grads: Params
    stats: Stats
    sums: Sums
    this_pass: Stats


def minibatch_gradient(
    params: Params,
    batch: Any,
    u: jax.Array,
    objective: Objective,
    *,
    forward: Callable[[Params, Any], tuple[Any, Routing | None]],
    describe: Callable[[Any], Stats],
    load_balancing_coef: float,
    place: Callable[[Params], Params],
    in_loop: bool = False,
) -> MinibatchGradient:
    """The gradient of minibatch u of a packed batch.

    Args:
      params: the trained weights.
      batch: fields [U, M, R, T].
      u: which minibatch, an int32 scalar.
      objective: what is minimised.
      forward, describe, load_balancing_coef: as in `MicrobatchLoss`.
      place: constrains gradients to their shardings.
      in_loop: prepare the weights anew for each microbatch. Else XLA makes what follows from them alone
        before the loop and keeps it, such as the whole embedding on every device: 1 GB for 7B on v5p.
    """
    T = batch.tokens.shape[-1]
    segment_ids = batch.segment_ids[u]
    counts = count(batch.loss_mask[u].reshape(-1, T), segment_ids.reshape(-1, T))
    correction = objective.correction
    deferred = correction is not None and correction.defers_normalizer
    loss = MicrobatchLoss(
        forward,
        describe,
        objective,
        load_balancing_coef,
        u,
        counts=jax.tree.map(jnp.ones_like, counts) if deferred else counts,
        num_tokens=jnp.maximum((segment_ids > 0).sum(dtype=jnp.float32), 1.0),
    )
    # A load-balancing loss has a gradient whatever the advantages.
    if objective.needs_advantage and not load_balancing_coef:
        num_backward = num_with_advantage(batch.advantage[u], batch.loss_mask[u])
    else:
        num_backward = batch.num_micro_U[u]
    grads, sums, this_pass = _accumulate(
        *(loss, params, batch, num_backward, place), in_loop=in_loop
    )
    stats = sums.means
    if correction is not None and deferred:
        assert not load_balancing_coef, "the load-balancing loss would be divided twice"
        # The count of kept tokens and the mean weight are known only now, after the loss.
        divisor = objective.aggregation.divisor(sums.trained)
        divisor = divisor * correction.norm_factor(sums.correction)
        of_stats = objective.stats.divisor(sums.trained)
        stats = {k: x / (divisor if k == "loss" else of_stats) for k, x in stats.items()}
        grads = jax.tree.map(lambda g: g / divisor, grads)
    return MinibatchGradient(num_backward > 0, grads, stats | sums.shares, sums, this_pass)


def num_with_advantage(advantage_MRT: jax.Array, mask_MRT: jax.Array) -> jax.Array:
    """Number of first microbatches, int32, that hold all trained tokens with an advantage."""
    some_M = ((advantage_MRT != 0) & (mask_MRT > 0)).any(axis=(1, 2))
    return jnp.where(some_M, jnp.arange(1, len(some_M) + 1), 0).max()


def _accumulate(
    loss: MicrobatchLoss,
    params: Params,
    batch: Any,
    num_backward: jax.Array,
    place: Callable[[Params], Params],
    *,
    in_loop: bool,
) -> tuple[Params, Sums, Stats]:
    """Gradients of the first `num_backward` microbatches; sums and `this_pass` of all that hold tokens."""
    u, M = loss.u, batch.tokens.shape[1]
    # The backward pass adds to these in place, layer by layer. The gradient of one microbatch never exists
    # as a second copy beside their sum.
    grads = jax.tree.map(jax.new_ref, place(jax.tree.map(jnp.zeros_like, params)))

    def add(m, total: tuple[Sums, Stats]):
        pull_back: Any
        here = params
        if in_loop:
            # With the number of the microbatch inside it, the barrier cannot be moved out of the loop.
            here, m = jax.lax.optimization_barrier((params, m))
        _, pull_back, (sums, this_pass) = jax.vjp(
            lambda p: loss(p, micro_of(batch, u, m)), here, has_aux=True
        )
        pull_back.with_refs(grads)(jnp.float32(1))
        return with_sums(m, total, (sums, this_pass))

    def with_sums(m, total: tuple[Sums, Stats], new: tuple[Sums, Stats]):
        this_pass_M = jax.tree.map(lambda x_M, x: x_M.at[m].set(x), total[1], new[1])
        return total[0] + new[0], this_pass_M

    # Shapes alone, for the zeros that the loop begins with.
    _, (sums, this_pass) = jax.eval_shape(lambda p: loss(p, micro_of(batch, u, 0)), params)
    this_pass_M = jax.tree.map(lambda x: jax.ShapeDtypeStruct((M, *x.shape), x.dtype), this_pass)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, this_pass_M))
    totals = jax.lax.fori_loop(0, num_backward, add, zeros)
    if loss.objective.needs_advantage:
        # The rest has no gradient but counts in the metrics, so its forward pass runs all the same.
        totals = jax.lax.fori_loop(
            *(num_backward, batch.num_micro_U[u]),
            lambda m, total: with_sums(m, total, loss(params, micro_of(batch, u, m))[1]),
            totals,
        )
    sums, this_pass_M = totals
    return place(jax.tree.map(jax.freeze, grads)), sums, this_pass_M
