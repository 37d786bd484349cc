"""Rows of a layout as problems: prompt, truth, solution and the rest, or why a row cannot be used."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.messages import as_context
from jaxrl.data.records import Record
from jaxrl.data.row_layouts import RowLayout, question_in, value_at, without
from jaxrl.data.rows import BadRow, checked_text, shown

MALFORMED = "malformed rows"
NO_PROMPT = "rows without a prompt"
NO_TRUTH = "rows without a truth"
UNREADABLE = "ground truths that the grader cannot read"
DUPLICATES = "duplicates"
CONTRADICTIONS = "rows of problems with contradicting answers"
HELD_OUT = "prompts of the evaluation"


class Unusable(Exception):
    """A row cannot be used.

    Attributes:
      reason: under which such rows are counted.
    """

    def __init__(self, reason: str, told: str):
        """Args: the reason, and what is said about this row, its place included."""
        super().__init__(told)
        self.reason = reason


def record_of(
    read: Callable[[], Mapping[str, Any]],
    layout: RowLayout,
    settings: SourceConfig,
    place: str,
    *,
    needs_truth: bool = True,
) -> Record:
    """The problem of a row.

    Args:
      read: the row, or BadRow.
      layout: of it.
      settings: of its source.
      place: where it stands, for messages.
      needs_truth: False makes the answer "" where the row has none.

    Raises:
      Unusable: it is no row, or has no prompt or, where it needs one, no truth.
    """
    reason = MALFORMED
    try:
        row = read()
        reason = NO_PROMPT
        what = f"field {layout.prompt!r}"
        prompt = layout.prompt_of(question_in(as_context(value_at(row, layout.prompt), what)))
        reason = NO_TRUTH
        answer = _truth(row, layout, needed=needs_truth)
        reason = MALFORMED
        solution = _solution(row, layout, named=bool(settings.solution_field))
    except BadRow as error:
        raise Unusable(reason, f"{place}: {error}") from error
    except RecursionError as error:  # read, but nested too deeply to be looked at
        raise Unusable(MALFORMED, f"{place}: nested too deeply; remove the line") from error
    extra = without(row, (layout.prompt, layout.answer, layout.solution))
    return Record(prompt, answer, _source_of(row, layout, settings), solution, extra)


def _truth(row: Mapping[str, Any], layout: RowLayout, *, needed: bool) -> str:
    if layout.answer is None:
        return ""
    try:
        return _answer(layout.answer_of(value_at(row, layout.answer)), layout.answer)
    except BadRow:
        if needed:
            raise
        return ""


def _answer(value: Any, name: str) -> str:
    if isinstance(value, str):
        return checked_text(value, f"field {name!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"field {name!r} is {shown(value)}; an answer must be text or a number")
    # A whole number may be longer than a float holds.
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"field {name!r} is {value}; an answer must be a finite number")
    return str(int(value)) if value == int(value) else str(value)


def _solution(row: Mapping[str, Any], layout: RowLayout, *, named: bool) -> str | None:
    if layout.solution is None:
        return None
    if named:
        what = f"field {layout.solution!r}"
        return checked_text(value_at(row, layout.solution), what)
    value = row.get(layout.solution)
    return value if isinstance(value, str) and value.strip() else None


def _source_of(row: Mapping[str, Any], layout: RowLayout, settings: SourceConfig) -> str:
    if settings.source:
        return settings.source
    named = row.get(layout.source) if layout.source else None
    if isinstance(named, str) and named.strip():
        return named
    if settings.has_function:
        return settings.path.rpartition(":")[2]
    return pathlib.Path(settings.path).stem
