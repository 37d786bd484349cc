"""The objective of an update: a loss per token, and its aggregation over a minibatch.

R rows   T tokens of a row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jaxrl.algos.aggregation import Aggregation, token_mean
from jaxrl.algos.moments import RunningMoments

Stats: TypeAlias = dict[str, jax.Array]
# (outputs of the role for a microbatch, the microbatch) -> (loss, stats), all [R, T].
TokenLoss: TypeAlias = Callable[[Any, Any], tuple[jax.Array, Stats]]


def _unchanged(batch: Any, key: jax.Array) -> Any:
    del key
    return batch


def _nothing(*_: Any) -> Stats:
    return {}


@dataclasses.dataclass(frozen=True)
class InnerCorrection:
    """A correction inside the loss: changes to a microbatch that depend on the policy being trained.

    Attributes:
      apply: (outputs, microbatch) -> (microbatch, moments). Multiplies weights in, removes rejected tokens
        from the mask, and returns running statistics.
      norm_factor: (moments of a minibatch) -> a divisor of its gradient, besides the count.
      metrics: (moments of each minibatch, along the first axis) -> metrics of the step.
      defers_normalizer: the divisor of the loss is known only at the end of the minibatch, because tokens may
        be rejected or `norm_factor` is not 1.
    """

    apply: Callable[[Any, Any], tuple[Any, RunningMoments]]
    norm_factor: Callable[[RunningMoments], jax.Array | float]
    metrics: Callable[[RunningMoments], Stats]
    defers_normalizer: bool


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of an update. Pass the same object at each step: another one compiles another program.

    Attributes:
      loss: (outputs, microbatch) -> (loss, stats) per token. Outputs are those of the role, such as
        `PolicyOutputs`. Everything outside the mask is set to 0 before the loss sees it.
      aggregation: sum and divisor that turn token losses into the loss of a minibatch.
      stats: the same for stats.
      prepare: (batch, key) -> batch, called before the first update of a step, for decisions over whole
        minibatches.
      correction: correction inside the loss; None for none.
      maxima: (outputs, microbatch) -> stats [R, T], at least 0; their largest values are reported.
      this_pass: (outputs) -> batch fields [R, T] that describe the policy at the start of the step. In the
        first minibatch of a step the policy is unchanged, so these values replace the fields.
      needs_advantage: the loss has no gradient where the advantage is 0. Microbatches at the end of a
        minibatch without any other advantage then have no backward pass.
      needs_reference: the outputs compare the policy with a reference, whose weights `update` is given.
      supervised: the tokens are examples. Limits of sampling do not apply to their log-probabilities.
    """

    loss: TokenLoss
    aggregation: Aggregation = dataclasses.field(default_factory=token_mean)
    stats: Aggregation = dataclasses.field(default_factory=token_mean)
    prepare: Callable[[Any, jax.Array], Any] = _unchanged
    correction: InnerCorrection | None = None
    maxima: Callable[[Any, Any], Stats] = _nothing
    this_pass: Callable[[Any], dict[str, jax.Array]] = _nothing
    needs_advantage: bool = False
    needs_reference: bool = False
    supervised: bool = False

    @property
    def uses_this_pass(self) -> bool:
        """Whether the first minibatch replaces fields of the batch by its own outputs."""
        return self.this_pass is not _nothing
