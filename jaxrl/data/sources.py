"""Sources of problems: the problems of a file, a task or a function, and an account of the rows left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.generated_problems import Check, GeneratedProblems
from jaxrl.data.records import Record, disjoint, normalised
from jaxrl.data.row_records import HELD_OUT, UNREADABLE
from jaxrl.data.rows import shown
from jaxrl.errors import UserError

Validate: TypeAlias = Callable[[str, Mapping[str, Any], str], str | None]
"""(answer, extra, source) -> the grader's objection to the ground truth; None if it can be read."""

NUM_NAMED = 3
"""Rows that are named in messages, of all those left out for one reason."""


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Rows left out for one reason.

    Attributes:
      count: Number of rows.
      named: The first few, as "file:line: fault".
    """

    count: int = 0
    named: tuple[str, ...] = ()

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.count + other.count, (self.named + other.named)[:NUM_NAMED])


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of problems after reading.

    Attributes:
      name: Name of its setting, such as "data.train" or "data.sources.gsm8k".
      settings: Its settings.
      origin: A description for messages: a file with its format and layout, or a task.
      num_rows: Number of rows that were read.
      records: The usable problems.
      places: The place of each problem in the file, for messages; () if the problems are not from a file.
      dropped: The rows that were left out, by reason.
      notes: Further remarks for the data card.
      own_template: The words that the file has around every problem, as a template; "" for none.
      generated: The problems of an endless source; None otherwise. `records` and `dropped` then hold the
        first few.
    """

    name: str
    settings: SourceConfig
    origin: str
    num_rows: int
    records: tuple[Record, ...]
    places: tuple[str, ...] = ()
    dropped: Mapping[str, Dropped] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    own_template: str = ""
    generated: GeneratedProblems | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the data sets in it; metrics are kept under them."""
        return tuple(dict.fromkeys(record.source for record in self.records))

    def with_readable_truths(self, validate: Validate, *, refuse: bool) -> Self:
        """Returns the source without rows whose ground truth the grader cannot read.

        Args:
          validate: The grader's check.
          refuse: Whether a single such row is an error.

        Raises:
          UserError: A row is refused, or no row is left.
        """

        def check(record: Record) -> tuple[str, str] | None:
            fault = validate(record.answer, record.extra, record.source)
            return None if fault is None else (UNREADABLE, fault)

        return self._filtered(check, UNREADABLE, refuse=refuse)

    def without_prompts_of(self, evaluation: Sequence[Record]) -> Self:
        """Returns the source without the problems of the evaluation; UserError if no problem is left."""
        disjoint(self.records, evaluation)  # logs their number, and raises if no problem is left
        held_out = {normalised(record.prompt) for record in evaluation}

        def check(record: Record) -> tuple[str, str] | None:
            known = normalised(record.prompt) in held_out
            return (HELD_OUT, shown(record.prompt)) if known else None

        return self._filtered(check, HELD_OUT, refuse=False)

    def _filtered(self, check: Check, reason: str, *, refuse: bool) -> Self:
        """The source without the rows that fail a check; later problems of an endless source get it too."""
        faults: dict[int, str] = {}
        for row, record in enumerate(self.records):
            fault = check(record)
            if fault is not None:
                place = self.places[row] if self.places else f"{self.origin} problem {row}"
                faults[row] = f"{place}: {fault[1]}"
                if refuse:
                    raise UserError(f"{self.name}: {faults[row]}")
        generated = self.generated and self.generated.checked(check)
        if not faults:
            return dataclasses.replace(self, generated=generated)
        named = tuple(faults.values())[:NUM_NAMED]
        if len(faults) == len(self.records):
            raise UserError(
                f"{self.name} has no row left: all {len(faults)} are {reason}; {named[0]}"
            )
        kept = [row for row in range(len(self.records)) if row not in faults]
        dropped = self.dropped.get(reason, Dropped()) + Dropped(len(faults), named)
        return dataclasses.replace(
            self,
            records=tuple(self.records[row] for row in kept),
            places=tuple(self.places[row] for row in kept) if self.places else (),
            dropped={**self.dropped, reason: dropped},
            generated=generated,
        )
