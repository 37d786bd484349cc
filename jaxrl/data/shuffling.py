"""Endless shuffled order over rows in memory, with a position that can be saved.

    Grain: shuffle anew each epoch, repeat, number, batch -> row numbers

Rows are in memory, so Grain shuffles row numbers and reads them in the calling thread: no worker
processes, nothing prefetched, nothing to lose. The order depends on the seed and on the number of
rows only. The state is what Grain keeps, the number of rows taken so far ({"next_index": 48}), plus
enough to notice that a checkpoint belongs to other data.
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


class ShuffledRows:
    """Endless batches of (place in the stream [N], row number [N]), both int64.

    Args:
      num_rows: rows of an epoch.
      rows_per_batch: N.
      seed: of the order, below 2**32.
      checksum: of the rows, as `checksum` makes it; a state is taken back by the same rows only.

    Raises:
      UserError: an argument breaks its rule.
    """

    def __init__(self, num_rows: int, *, rows_per_batch: int, seed: int, checksum: int):
        check_order(rows_per_batch, seed)
        self._identity: dict[str, Any] = {
            "num_rows": num_rows,
            "seed": seed,
            "checksum": checksum,
        }
        self._iterator = iter(
            shuffled(num_rows, seed)
            .map_with_index(lambda place, row: (place, row))
            # Everything is in memory: threads would only wait for each other.
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            # Batched last, so that the position counts rows and N may change on restart.
            .batch(rows_per_batch, batch_fn=lambda pairs: np.array(pairs, np.int64).T)
        )

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        places, rows = next(self._iterator)
        return places, rows

    def state(self) -> dict[str, Any]:
        """Where the order stands, for `restore`; plain JSON."""
        return {**self._identity, **self._iterator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. Another `rows_per_batch` is allowed.

        Raises:
          UserError: the state belongs to other rows or to another seed.
        """
        position = dict(state)
        check_same_data({name: position.pop(name, None) for name in self._identity}, self._identity)
        self._iterator.set_state(position)


def shuffled(num_rows: int, seed: int) -> grain.MapDataset[int]:
    """Row numbers without end, by their place: every row once an epoch, in a new order each epoch."""
    return grain.MapDataset.range(num_rows).shuffle(seed=seed).repeat()


def check_order(rows_per_batch: int, seed: int) -> None:
    """Raises UserError for a batch that holds nothing, or a seed that Grain does not take."""
    if rows_per_batch < 1:
        raise UserError(f"a batch of {rows_per_batch} holds nothing; use at least 1")
    if not 0 <= seed < 2**32:
        raise UserError(f"data seed {seed} is out of range; use one from 0 to {2**32 - 1}")


def check_same_data(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises UserError unless a saved place is in the data that there are."""
    if theirs != ours:
        raise UserError(
            f"the checkpoint's place is in other data: it has {theirs}, this run has {ours}. Give back the "
            "data, weights, template, tokenizer, length limit and data seed of that run, or start a new run "
            "from its weights"
        )


class ShuffledExamples(Generic[Item]):
    """Endless batches of examples, every one once an epoch, in a new order each epoch.

    Args:
      examples: in memory, at least one.
      examples_per_batch, seed, checksum: as for `ShuffledRows`.
    """

    def __init__(
        self, examples: Sequence[Item], *, examples_per_batch: int, seed: int, checksum: int
    ):
        self._examples = examples
        self._order = ShuffledRows(
            len(examples), rows_per_batch=examples_per_batch, seed=seed, checksum=checksum
        )

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        return len(self._examples)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Item]:
        _, rows = next(self._order)
        return [self._examples[row] for row in rows]

    def state(self) -> dict[str, Any]:
        """Where the stream stands, for `restore`; plain JSON."""
        return self._order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken; see `ShuffledRows.restore`."""
        self._order.restore(state)


def drop_overlong(lengths: np.ndarray, limit: int, *, what: str, setting: str) -> np.ndarray:
    """The rows that fit, int64; says once how many do not.

    Args:
      lengths: tokens of each row.
      limit: the most a row may have.
      what, setting: names of the rows and of the limit, for messages.

    Raises:
      UserError: no row fits.
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
    """Of the arrays' bytes, in order, and of where one ends and the next begins."""
    value = 0
    for array in arrays:
        # The length too, or the same tokens cut elsewhere would look alike.
        value = zlib.crc32(array.tobytes(), zlib.crc32(len(array).to_bytes(8, "little"), value))
    return value
