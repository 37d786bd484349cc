"""Learning from examples: supervised fine-tuning, and preference pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jaxrl.dataflows.experience import Metrics

Examples = TypeVar("Examples")
Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True)
class SupervisedStep(Generic[Examples, Batch]):
    """The functions of a supervised step.

    Attributes:
      pack: packs a batch of examples for the device; only responses are trained on.
      update: runs one optimiser update.
    """

    pack: Callable[[Examples], Batch]
    update: Callable[[Batch], Metrics]


def sft(step: SupervisedStep[Examples, Batch], examples: Iterator[Examples]) -> Metrics:
    """Runs one update on the next examples."""
    return step.update(step.pack(next(examples)))
