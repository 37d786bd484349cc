"""What an update minimises: a loss per token, and how its values add up.

R rows   T tokens of a row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jaxrl.algos.aggregation import Aggregation, token_mean
from jaxrl.algos.moments import Tally

Stats: TypeAlias = dict[str, jax.Array]
# (what the role computes of a microbatch, the microbatch) -> (loss, stats), all [R, T].
TokenLoss: TypeAlias = Callable[[Any, Any], tuple[jax.Array, Stats]]


def _as_it_is(batch: Any, key: jax.Array) -> Any:
    del key
    return batch


def _nothing(outputs: Any, micro: Any) -> Stats:
    del outputs, micro
    return {}


def _none(outputs: Any) -> dict[str, jax.Array]:
    del outputs
    return {}


@dataclasses.dataclass(frozen=True)
class InnerCorrection:
    """What is changed in a microbatch that only the policy being trained can tell.

    Attributes:
      apply: (outputs, microbatch) -> (microbatch, tally): the same with other weights, and without the tokens
        that are to be left out of everything; and statistics, which are added up.
      norm_factor: (tally of a minibatch) -> what its gradient is divided by besides the count.
      metrics: (tally of each minibatch, along the first axis) -> metrics of the step.
      ends_late: tokens may be left out, or the factor is not 1: what the loss is divided by is known only at
        the end of the minibatch.
    """

    apply: Callable[[Any, Any], tuple[Any, Tally]]
    norm_factor: Callable[[Tally], jax.Array | float]
    metrics: Callable[[Tally], Stats]
    ends_late: bool


@dataclasses.dataclass(frozen=True)
class Objective:
    """What an update minimises. The same object must come back each step, or it is compiled again.

    Attributes:
      loss: (outputs, microbatch) -> (loss, stats) per token. Outputs are what the role computes, such as
        `PolicyOutputs`; outside the mask everything is 0 before the loss sees it.
      aggregation: how token losses add up to the loss of a minibatch.
      stats: how stats do.
      prepare: (batch, key) -> batch, before the first update of a step: what looks at whole minibatches.
      correction: inside the loss; None has none.
      largest: (outputs, microbatch) -> stats [R, T], at least 0, of which the largest value is reported.
      own: (outputs) -> fields of the batch, [R, T], that say what the policy was at the start of the step. In
        the first minibatch of a step it still is that policy, whose outputs then stand in for these fields.
      needs_reference: the outputs compare the policy with a reference, whose weights `update` is given.
    """

    loss: TokenLoss
    aggregation: Aggregation = dataclasses.field(default_factory=token_mean)
    stats: Aggregation = dataclasses.field(default_factory=token_mean)
    prepare: Callable[[Any, jax.Array], Any] = _as_it_is
    correction: InnerCorrection | None = None
    largest: Callable[[Any, Any], Stats] = _nothing
    own: Callable[[Any], dict[str, jax.Array]] = _none
    needs_reference: bool = False

    @property
    def has_own(self) -> bool:
        """Something of the batch comes from the first minibatch's own outputs."""
        return self.own is not _none
