"""The sources of a prompt stream: prompts in memory, and prompts generated when drawn.

A stream walks through a source turn by turn. The number of a turn alone identifies its prompt. Whether a
curriculum skips a turn depends on the seed, the turn, and the pass rate of its problem at that time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxrl.data.generated_problems import GeneratedProblems
from jaxrl.data.pass_rates import Curriculum, PassRates, is_drawn
from jaxrl.data.records import Record
from jaxrl.data.row_records import Unusable
from jaxrl.data.shuffling import checksum, shuffled
from jaxrl.data.sources import NUM_NAMED
from jaxrl.errors import UserError
from jaxrl.types import Prompts

logger = logging.getLogger(__name__)

# Limit for generated problems that are left out in succession.
_MOST_LEFT_OUT = 1000


class ShuffledPrompts:
    """Prompts in memory, in a new order each epoch; a curriculum skips some of them.

    Args:
      prompts: Prompts of the source, at least one.
      seed: Seed of the order and of the skipped turns.
      curriculum: Draws problems by their pass rates; None draws every problem.

    Attributes:
      pass_rates: The pass rate of each prompt; None without a curriculum.
    """

    def __init__(self, prompts: Prompts, seed: int, curriculum: Curriculum | None):
        self._prompts = prompts
        self._seed = seed
        self._rows = shuffled(len(prompts), seed)
        self.pass_rates = None if curriculum is None else PassRates(len(prompts), curriculum)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def identity(self) -> list[Any]:
        """Identifies the data; a saved turn is only valid for the same identity."""
        return [len(self._prompts), checksum(self._prompts.tokens)]

    def prompt(self, turn: int) -> Prompts:
        """The prompt of a turn."""
        return self._prompts.take([self._row(turn)])

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """Returns the first prompt from a turn on that is not skipped, with its turn."""
        # After a whole epoch of skipped turns the next prompt is drawn in any case.
        end, row = turn + len(self), self._row(turn)
        while turn < end and not self._is_drawn(row, turn):
            turn += 1
            row = self._row(turn)
        return turn, self._prompts.take([row])

    def learn(self, turn: int, num_right: int, num_graded: int) -> None:
        """Updates the pass rate of the prompt of a turn with its graded answers."""
        if self.pass_rates is not None:
            self.pass_rates.learn(self._row(turn), num_right, num_graded)

    def _row(self, turn: int) -> int:
        row = self._rows[turn]
        assert row is not None, "an order has a row at every turn"
        return row

    def _is_drawn(self, row: int, turn: int) -> bool:
        if self.pass_rates is None:
            return True
        return is_drawn(self.pass_rates.chance(row), self._seed, turn)


class GeneratedPrompts:
    """Prompts of problems that are generated when drawn. The number of a problem is its turn.

    Args:
      problems: Endless problems.
      encode: Encodes a problem; returns None if it does not fit.
      first: Prompts of the first problems. A resumed run compares them with its own.
      name: Name of the source, for messages.
    """

    def __init__(
        self,
        problems: GeneratedProblems,
        encode: Callable[[Record], Prompts | None],
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

    def prompt(self, turn: int) -> Prompts | None:
        """The prompt of a turn; None if its problem is left out, UserError if it cannot be generated."""
        try:
            prompt = self._encode(self._problems.problem(turn))
        except Unusable as error:
            self._log(f"{error} ({error.reason})")
            return None
        if prompt is None:
            self._log(f"{self._problems.place(turn)}: longer than data.max_prompt_tokens")
        return prompt

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """Returns the first prompt from a turn on that is not left out, with its turn.

        Raises:
          UserError: Too many problems in succession are left out, or one cannot be generated.
        """
        for later in range(turn, turn + _MOST_LEFT_OUT):
            prompt = self.prompt(later)
            if prompt is not None:
                return later, prompt
        raise UserError(
            f"{_MOST_LEFT_OUT} problems in succession are left out, the last one being {self._last_fault}; "
            "make others, raise data.max_prompt_tokens, or use another grader"
        )

    def _log(self, message: str) -> None:
        self._last_fault = f"{self._name}, {message}"
        if self._num_named < NUM_NAMED:
            self._num_named += 1
            logger.warning(
                "left out, and counted in data/made_problems_left_out: %s", self._last_fault
            )
