"""Where a stream's prompts come from, one source each: what is in memory, and what is made as it is drawn.

A source is walked through turn by turn, and a turn is all that has to be known to find a prompt again. Which
turns are passed over hangs on the seed, the turn, and what is known of its problem by then.
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

# Problems of a made source that may be left out one after the other.
_MOST_LEFT_OUT = 1000


class ShuffledPrompts:
    """Prompts in memory, in a new order each epoch, of which a curriculum passes some over.

    Args:
      prompts: at least one.
      seed: of the order, and of what is passed over.
      curriculum: how problems are drawn; None draws every one.

    Attributes:
      pass_rates: of each prompt; None without a curriculum.
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
        """What a saved turn is held against."""
        return [len(self._prompts), checksum(self._prompts.tokens)]

    def prompt(self, turn: int) -> Prompts:
        """The prompt of a turn."""
        return self._prompts.take([self._row(turn)])

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """The first prompt from a turn on that is drawn, and its own turn."""
        # Where a whole epoch's worth is passed over, the next one is taken, whatever it is.
        end, row = turn + len(self), self._row(turn)
        while turn < end and not self._is_drawn(row, turn):
            turn += 1
            row = self._row(turn)
        return turn, self._prompts.take([row])

    def learn(self, turn: int, num_right: int, num_graded: int) -> None:
        """Takes in how the answers to the prompt of a turn were graded."""
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
    """Prompts of problems that are made as they are drawn.

    Args:
      problems: by their numbers, which are the source's turns.
      encode: the prompt of a problem; None where it does not fit.
      first: prompts of the first problems, by which another run knows that they are made in the same way.
      name: of the source, for messages.
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
        self._told = ""

    @property
    def identity(self) -> list[Any]:
        """What a saved turn is held against."""
        return ["made", checksum(self._first.tokens)]

    def prompt(self, turn: int) -> Prompts | None:
        """The prompt of a problem, or None where it is left out; UserError where it cannot be made."""
        try:
            prompt = self._encode(self._problems.problem(turn))
        except Unusable as error:
            self._tell(f"{error} ({error.reason})")
            return None
        if prompt is None:
            self._tell(f"{self._problems.place(turn)}: longer than data.max_prompt_tokens")
        return prompt

    def draw(self, turn: int) -> tuple[int, Prompts]:
        """The first prompt from a turn on that is not left out, and its own turn.

        Raises:
          UserError: too many are left out one after the other, or one cannot be made.
        """
        for later in range(turn, turn + _MOST_LEFT_OUT):
            prompt = self.prompt(later)
            if prompt is not None:
                return later, prompt
        raise UserError(
            f"{_MOST_LEFT_OUT} problems in succession are left out, the last one being {self._told}; "
            "make others, raise data.max_prompt_tokens, or use another grader"
        )

    def _tell(self, told: str) -> None:
        self._told = f"{self._name}, {told}"
        if self._num_named < NUM_NAMED:
            self._num_named += 1
            logger.warning("left out, and counted in data/made_problems_left_out: %s", self._told)
