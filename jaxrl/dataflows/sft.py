"""Learning from examples: supervised fine-tuning, and pairs of answers with the losses for these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jaxrl.dataflows.experience import Metrics

Examples = TypeVar("Examples")
Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True)
class SupervisedStep(Generic[Examples, Batch]):
    """What a step of learning from examples is made of.

    Attributes:
      pack: lays a batch of examples out for the device; only responses are trained on.
      update: one optimiser update.
    """

    pack: Callable[[Examples], Batch]
    update: Callable[[Batch], Metrics]


def sft(step: SupervisedStep[Examples, Batch], examples: Iterator[Examples]) -> Metrics:
    """The next examples, and an update on them."""
    return step.update(step.pack(next(examples)))
