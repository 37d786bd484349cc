"""Turns a row of a known layout into a problem, or says why it cannot be used."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl.data.data_config import SourceConfig
from jaxrl.data.messages import as_context
from jaxrl.data.records import Record
from jaxrl.data.row_layouts import RowLayout, unwrapped_question, value_at, without
from jaxrl.data.rows import BadRow, RowFile, checked_text, shown

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
      reason: The reason that such rows are counted under.
    """

    def __init__(self, reason: str, message: str):
        """Args: the reason, and the message about this row with its place."""
        super().__init__(message)
        self.reason = reason


def record_of(
    rows: RowFile, index: int, layout: RowLayout, settings: SourceConfig, *, needs_truth: bool
) -> Record:
    """Reads the problem of a row.

    Args:
      rows: Rows of the source.
      index: Index of the row.
      layout: Layout of the rows.
      settings: Settings of the source.
      needs_truth: Whether the row needs a ground truth; if not, a missing answer is "".

    Raises:
      Unusable: The row is broken, or lacks a prompt or a needed ground truth.
    """
    place = rows.place(index)
    reason = MALFORMED
    try:
        row = rows[index]
        reason = NO_PROMPT
        what = f"field {layout.prompt!r}"
        prompt = layout.prompt_of(
            unwrapped_question(as_context(value_at(row, layout.prompt), what))
        )
        reason = NO_TRUTH
        answer = _truth(row, layout, needed=needs_truth)
        reason = MALFORMED
        solution = _solution(row, layout, named=bool(settings.solution_field))
    except BadRow as error:
        raise Unusable(reason, f"{place}: {error}") from error
    except RecursionError as error:  # it was parsed, but is nested too deeply to be checked
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
    # math.isfinite converts to float, and an int may be too large for that.
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
