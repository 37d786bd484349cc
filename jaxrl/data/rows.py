"""Rows of data files: the interface of a file, and checks on the values of a row."""

from __future__ import annotations

import bisect
import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

Row = dict[str, Any]

COPY_AGAIN = "copy the published file again"
"""The remedy for a broken file."""

WANTED = (
    'put one JSON object a line, such as {"problem": ..., "answer": ...}, or a Parquet, Arrow or '
    "ArrayRecord file there"
)
"""The remedy for a missing file."""


class BadRow(ValueError):
    """A row is broken; the message says how, and the reader of the file adds the place."""


class RowFile(Protocol):
    """Rows by index, a `grain.sources.RandomAccessDataSource`.

    Attributes:
      kind: Name of the format, for messages.
    """

    kind: str

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        """Returns a row with JSON's types only; BadRow if it cannot be read."""
        ...

    def place(self, index: int) -> str:
        """The place of a row for messages, such as "train.jsonl:17"."""
        ...

    def keys(self, fields: Sequence[str]) -> Iterator[Hashable] | None:
        """A cheap key for every row, in order; rows with equal keys have equal values in these fields.

        Keys cost much less than rows. With them a file that repeats its rows a hundred times, such as
        DAPO-Math-17k, is parsed once. None if the format or the type of a field has no keys.
        """
        return None


def locate(starts: Sequence[int], index: int) -> tuple[int, int]:
    """Returns (part, index in the part) of a row; `starts` holds the first row of each part, then the end."""
    part = bisect.bisect_right(starts, index) - 1
    return part, index - starts[part]


def one_line(error: Exception) -> str:
    """The message of a library's error, on one line and cut to 160 characters."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def field_of(row: dict[str, Any], name: str) -> Any:
    """Returns a field; BadRow, with the fields that the row has, if it is missing."""
    if name not in row:
        raise BadRow(f"no field {name!r}; the row has {', '.join(map(repr, row))}")
    return row[name]


def text_of(row: dict[str, Any], name: str) -> str:
    """Returns a field that must be text and not empty; BadRow otherwise."""
    return checked_text(field_of(row, name), f"field {name!r}")


def checked_text(value: Any, what: str) -> str:
    """Returns the value if it is text, not empty and valid for a tokenizer; BadRow otherwise.

    Args:
      value: A value of a row.
      what: Its name in the message.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{what} is {shown(value)}; it must be text and not empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{what} has half a surrogate pair ({error}), which no tokenizer reads; "
            "fix or remove the line"
        ) from error
    if "\0" in value:
        raise BadRow(f"{what} has a NUL character; fix or remove the line")
    return value


def shown(value: Any) -> str:
    """The value as JSON for a message, cut to 60 characters."""
    return json.dumps(value)[:60]


def object_of(line: bytes) -> dict[str, Any]:
    """Parses a JSON object; BadRow if the line is anything else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
        raise BadRow(f"no valid JSON ({error}); fix or remove the line") from error
    if not isinstance(row, dict):
        raise BadRow(f"a JSON {type(row).__name__}; every line must be an object with named fields")
    return row
