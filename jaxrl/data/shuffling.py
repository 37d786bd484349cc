"""Endless batches of examples in memory, in a shuffled order whose position can be saved.

Grain shuffles the row numbers, anew each epoch. There are no worker processes, and nothing is prefetched. The
order depends only on the seed and the number of rows. A saved state is the number of rows taken so far
({"next_index": 48}), with a checksum that tells whether a checkpoint belongs to other data.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import grain
import numpy as np

from jaxrl.errors import UserError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


def shuffled(num_rows: int, seed: int) -> grain.MapDataset[int]:
    """Endless row numbers: every row once an epoch, in a new order each epoch."""
    return grain.MapDataset.range(num_rows).shuffle(seed=seed).repeat()


def check_same_data(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises UserError if a saved position belongs to other data than that of this run."""
    if theirs != ours:
        raise UserError(
            f"the checkpoint's place is in other data: it has {theirs}, this run has {ours}. Give back the "
            "data, weights, template, tokenizer, length limit and data seed of that run, or start a new run "
            "from its weights"
        )


class ShuffledExamples(Generic[Item]):
    """Endless batches of examples, every one once an epoch, in a new order each epoch.

    Args:
      examples: Examples in memory, at least one.
      examples_per_batch: Length of each batch.
      seed: Seed of the order, below 2**32.
      checksum: `checksum` of the examples; a state is restored for the same examples only.
    """

    def __init__(
        self, examples: Sequence[Item], *, examples_per_batch: int, seed: int, checksum: int
    ):
        self._examples = examples
        self._examples_per_batch = examples_per_batch
        self._identity = {"num_rows": len(examples), "seed": seed, "checksum": checksum}
        self._order = shuffled(len(examples), seed)
        self._next_index = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Item]:
        start = self._next_index
        self._next_index += self._examples_per_batch
        rows = (self._order[i] for i in range(start, self._next_index))
        return [self._examples[row] for row in rows if row is not None]

    def state(self) -> dict[str, Any]:
        """The position in the stream, for `restore`; plain JSON."""
        return {**self._identity, "next_index": self._next_index}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`. `examples_per_batch` may differ from the one it was saved with.

        Raises:
          UserError: The state belongs to other examples or to another seed.
        """
        check_same_data({name: state.get(name) for name in self._identity}, self._identity)
        self._next_index = state["next_index"]


def drop_overlong(lengths: np.ndarray, limit: int, *, what: str, setting: str) -> np.ndarray:
    """Returns the numbers of the rows that fit, int64, and logs how many do not.

    Args:
      lengths: Number of tokens of each row.
      limit: Largest number of tokens of a row.
      what, setting: Names of the rows and of the limit, for messages.

    Raises:
      UserError: No row fits.
    """
    kept = np.flatnonzero(lengths <= limit)
    if not len(kept):
        raise UserError(
            f"all {len(lengths)} {what} are longer than {setting} {limit}, the shortest has "
            f"{lengths.min()} tokens; raise {setting} or use another data set"
        )
    if len(kept) < len(lengths):
        logger.warning(
            "%d of %d %s dropped: longer than %s %d (the longest has %d tokens)",
            len(lengths) - len(kept),
            len(lengths),
            what,
            setting,
            limit,
            lengths.max(),
        )
    return kept


def checksum(arrays: Iterable[np.ndarray]) -> int:
    """A CRC-32 of the arrays' bytes, in order, and of their lengths."""
    value = 0
    for array in arrays:
        # Without the lengths, [1, 2], [3] and [1], [2, 3] would have one checksum.
        value = zlib.crc32(array.tobytes(), zlib.crc32(len(array).to_bytes(8, "little"), value))
    return value
