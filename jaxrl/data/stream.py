"""An endless stream of prompts from several sources, with a position that can be saved.

    records --encode_prompts--> Prompts of one source         --+
    GeneratedProblems --when drawn--> GeneratedPrompts        --+--PromptStream--> batches of N

The batches mix the sources by weight. Prompts in memory are tokenised once, before training, so a step takes
rows that are ready. A generated prompt is tokenised when it is drawn.

The position in a source is its turn, a number that only grows and that alone identifies the prompt.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.generated_problems import GeneratedProblems
from jaxrl.data.row_layouts import Record
from jaxrl.data.rows import BadRow
from jaxrl.data.shuffling import check_same_data, checksum, shuffled
from jaxrl.errors import UserError
from jaxrl.types import Prompts

logger = logging.getLogger(__name__)

# Messages about generated problems that are left out, for each source.
_NUM_NAMED = 3
# Limit for generated problems that are left out in succession.
_MOST_LEFT_OUT = 1000


class ShuffledPrompts:
    """Prompts in memory, at least one, in a new order each epoch."""

    def __init__(self, prompts: Prompts, seed: int):
        self._prompts = prompts
        self._rows = shuffled(len(prompts), seed)

    @property
    def identity(self) -> list[Any]:
        """Identifies the data; a saved turn is only valid for the same identity."""
        return [len(self._prompts), checksum(self._prompts.tokens)]

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """Returns the prompt of a turn, with the turn."""
        row = self._rows[turn]
        assert row is not None, "an order has a row at every turn"
        return turn, self._prompts.take([row])


class GeneratedPrompts:
    """Prompts of problems that are generated when drawn. Turn n draws problem n.

    Args:
      problems: Endless problems.
      encode: Encodes a problem; returns no prompt if it does not fit.
      first: Prompts of the first problems. A resumed run compares them with its own.
      name: Name of the source, for messages.
    """

    def __init__(
        self,
        problems: GeneratedProblems,
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
        # "made" is in the checkpoints of earlier runs.
        return ["made", checksum(self._first.tokens)]

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """Returns the first prompt from a turn on that is not left out, with its turn.

        Raises:
          UserError: Too many problems in succession are left out, or one cannot be generated.
        """
        for later in range(turn, turn + _MOST_LEFT_OUT):
            try:
                record = self._problems.problem(later)
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
        seeds = (
            [seed]
            if len(sources) == 1
            else [
                int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
                for number in range(len(sources))
            ]
        )
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
        return Prompts.concatenate([self._draw() for _ in range(self._prompts_per_batch)])

    def state(self) -> dict[str, Any]:
        """The position in the stream, for `restore`; plain JSON."""
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

    def _draw(self) -> Prompts:
        """The next prompt."""
        # The source that is furthest behind its share; the first one of several.
        due = [(n + 1) / w for n, w in zip(self._num_drawn, self._weights, strict=True)]
        number = due.index(min(due))
        turn, prompt = self._sources[number].draw(self._turns[number])
        self._turns[number] = turn + 1
        self._num_drawn[number] += 1
        prompt_id = turn * len(self._sources) + number
        return dataclasses.replace(prompt, ids_N=np.array([prompt_id], np.int64))
