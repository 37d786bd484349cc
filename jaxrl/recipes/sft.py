"""Supervised fine-tuning: the warm start before reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import numpy as np

from jaxrl.types import TrainBatch

Examples = list[tuple[np.ndarray, np.ndarray]]
Metrics = dict[str, jax.Array]


def sft(
    stream: Iterable[Examples],
    *,
    pack: Callable[[Examples], TrainBatch],
    update: Callable[[TrainBatch], Metrics],
    hooks: Callable[[TrainBatch, Metrics], bool],
) -> None:
    """Trains until `hooks` returns False or the stream ends.

    Args:
      stream: batches of (prompt tokens, response tokens).
      pack: lays a batch out for the device; only responses are trained on.
      update: one optimiser update on the mean negative log-likelihood of response tokens.
      hooks: log and save; says whether to go on.
    """
    for examples in stream:
        batch = pack(examples)
        metrics = update(batch)
        if not hooks(batch, metrics):
            break
