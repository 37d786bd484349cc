"""Endless shuffled batches with a position that can be saved: of examples, and of prompts of several sources.

    records --encode_prompts--> Prompts of one source         --+
    problems by number --when drawn--> GeneratedPrompts       --+--PromptStream--> batches of N

The batches mix the sources by weight. Prompts in memory are tokenised once, before training, so a step takes
rows that are ready. A generated prompt is tokenised when it is drawn.

The position in a source is its turn, a number that only grows and that alone identifies the prompt.

Grain shuffles the row numbers, anew each epoch. There are no worker processes, and nothing is prefetched. The
order depends only on the seed and the number of rows. A saved state has a checksum that tells whether a
checkpoint belongs to other data.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import grain
import numpy as np

from jaxrl.data.row_layouts import Record
from jaxrl.data.rows import BadRow
from jaxrl.errors import UserError
from jaxrl.types import Prompts

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
        # Random access: a position is one number, and to restore it replays nothing.
        self._order = shuffled(len(examples), seed)
        self._next_index = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Item]:
        start = self._next_index
        self._next_index += self._examples_per_batch
        rows = (self._order[i] for i in range(start, self._next_index))
        # Grain types an entry as one that a filter may have left out; this order has none.
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
    """Returns the numbers of the rows that fit, int64, and logs how many do not; UserError if none does.

    Args:
      lengths: Number of tokens of each row.
      limit: Largest number of tokens of a row.
      what, setting: Names of the rows and of the limit, for messages.
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


def checksum_of_problems(prompts: Prompts) -> int:
    """The checksum of whole problems: several may have one prompt, and differ in truths or other fields."""
    rest = zip(prompts.answers, prompts.extras, strict=True)
    texts = (json.dumps(each, sort_keys=True).encode() for each in rest)
    return checksum(itertools.chain(prompts.tokens, (np.frombuffer(t, np.uint8) for t in texts)))


# Messages about generated problems that are left out, for each source.
_NUM_NAMED = 3
# Limit for generated problems that are left out in succession: some source may have none that fits.
_MOST_LEFT_OUT = 1000


class ShuffledPrompts:
    """Prompts in memory, at least one, in a new order each epoch."""

    def __init__(self, prompts: Prompts, seed: int):
        self._prompts = prompts
        self._rows = shuffled(len(prompts), seed)

    @property
    def identity(self) -> list[Any]:
        """Identifies the data; a saved turn is only valid for the same identity."""
        return [len(self._prompts), checksum_of_problems(self._prompts)]

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """Returns the prompt of a turn, with the turn."""
        row = self._rows[turn]
        assert row is not None, "an order has a row at every turn"
        return turn, self._prompts.take([row])


class GeneratedPrompts:
    """Prompts of problems that are generated when drawn. Turn n draws problem n.

    Args:
      problems: Generates the problem of a number; raises BadRow if it is left out.
      encode: Encodes a problem; returns no prompt if it does not fit.
      first: Prompts of the first problems. A resumed run compares them with its own.
      name: Name of the source, for messages.
    """

    def __init__(
        self,
        problems: Callable[[int], Record],
        encode: Callable[[Record], Prompts],
        *,
        first: Prompts,
        name: str,
    ):
        self._problems = problems
        self._encode = encode
        self._first = first
        self._name = name
        self._num_named = 0
        self._last_fault = ""

    @property
    def identity(self) -> list[Any]:
        """Identifies the data; a saved turn is only valid for the same identity."""
        # The first problems stand for all, which have no end.
        return ["made", checksum_of_problems(self._first)]

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """Returns the first prompt from a turn on that is not left out, with its turn.

        Raises:
          UserError: Too many problems in succession are left out, or one cannot be generated.
        """
        for later in range(turn, turn + _MOST_LEFT_OUT):
            try:
                record = self._problems(later)
                prompt = self._encode(record)
                if len(prompt):
                    return later, prompt
                fault = f"{record.place}: longer than data.max_prompt_tokens"
            except BadRow as error:
                fault = f"{error} ({error.reason})"
            self._last_fault = f"{self._name}, {fault}"
            if self._num_named < _NUM_NAMED:
                self._num_named += 1
                logger.warning(
                    "left out, and counted in data/made_problems_left_out: %s", self._last_fault
                )
        raise UserError(
            f"{_MOST_LEFT_OUT} problems in succession are left out, the last one being {self._last_fault}; "
            "make others, raise data.max_prompt_tokens, or use another grader"
        )


class PromptStream:
    """Endless batches of `Prompts`, every prompt in memory once an epoch, in a new order each epoch.

    `Prompts.ids_N` are unique in the whole stream; with one source in memory they are 0, 1, 2, ...
    A batch may cross the end of an epoch, and may be larger than the data set.

    Args:
      sources: The prompts of each source, in memory or generated.
      weights: The relative shares of the sources, kept in every stretch of the stream. Epochs of the
        sources end independently.
      prompts_per_batch: N, the number of prompts of a batch.
      seed: Seed of the order, below 2**32.
    """

    def __init__(
        self,
        sources: Sequence[Prompts | GeneratedPrompts],
        *,
        prompts_per_batch: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
    ):
        assert len(sources) == len(weights), "every source has a weight"
        # With one seed, sources of equal length would get the same order.
        states = (np.random.SeedSequence((seed, n)).generate_state(1) for n in range(len(sources)))
        seeds = [seed] if len(sources) == 1 else [int(state[0]) for state in states]
        self._sources = [
            ShuffledPrompts(source, own) if isinstance(source, Prompts) else source
            for source, own in zip(sources, seeds, strict=True)
        ]
        self._prompts_per_batch = prompts_per_batch
        self._weights = tuple(weights)
        identities = [source.identity for source in self._sources]
        self._identity = {"seed": seed, "sources": identities, "weights": list(weights)}
        # For each source its next turn, and the number of drawn prompts; smaller if problems were left out.
        self._turns = [0] * len(sources)
        self._num_drawn = [0] * len(sources)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompts:
        prompts = []
        for _ in range(self._prompts_per_batch):
            # The source that is furthest behind its share; the first one of several. Not by chance: so every
            # stretch keeps the shares, and the counts alone are the position.
            due = [(n + 1) / w for n, w in zip(self._num_drawn, self._weights, strict=True)]
            number = due.index(min(due))
            turn, prompt = self._sources[number].draw(self._turns[number])
            self._turns[number] = turn + 1
            self._num_drawn[number] += 1
            # Unique in the whole stream, and the turn itself for a single source.
            prompt_id = turn * len(self._sources) + number
            prompts.append(dataclasses.replace(prompt, ids_N=np.array([prompt_id], np.int64)))
        return Prompts.concatenate(prompts)

    def state(self) -> dict[str, Any]:
        """The position in the stream, for `restore`; plain JSON."""
        # Copies, since the lists change with the next prompt.
        turns, num_drawn = list(self._turns), list(self._num_drawn)
        return {**self._identity, "turns": turns, "num_drawn": num_drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`. `prompts_per_batch` may differ.

        Raises:
          UserError: The state belongs to other prompts, other weights or another seed.
        """
        check_same_data({name: state.get(name) for name in self._identity}, self._identity)
        self._turns, self._num_drawn = list(state["turns"]), list(state["num_drawn"])

    def counts(self) -> dict[str, int]:
        """Numbers of generated problems left out since the stream began, as metrics."""
        found = {}
        for source, turn, drawn in zip(self._sources, self._turns, self._num_drawn, strict=True):
            if isinstance(source, GeneratedPrompts):
                name = "data/made_problems_left_out"
                found[name] = found.get(name, 0) + turn - drawn
        return found
