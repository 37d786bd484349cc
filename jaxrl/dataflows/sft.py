"""Learning from examples: supervised fine-tuning, and pairs of answers with the losses for these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jaxrl.dataflows.experience import Metrics

Examples = TypeVar("Examples")
Batch = TypeVar("Batch")
