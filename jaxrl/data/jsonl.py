"""JSONL files, read and checked row by row; what is wrong with one is said as "file:line: ..."."""

from __future__ import annotations

import codecs
import json
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from jaxrl.errors import UserError
from jaxrl.files import read_bytes

Row = TypeVar("Row")


class BadRow(ValueError):
    """What is wrong with a row; `read_jsonl` adds the place."""


def read_jsonl(
    path: str | pathlib.Path, parse: Callable[[dict[str, Any]], Row], *, wanted: str
) -> list[Row]:
    """The rows of a JSONL file; blank lines are skipped.

    Args:
      path: the file, UTF-8.
      parse: makes a row of a JSON object, or raises BadRow.
      wanted: an example of a line, for messages.

    Raises:
      UserError: the file is missing or empty, or a row is broken ("file:line: ...").
    """
    remedy = f"put one JSON object a line, such as {wanted} there"
    rows = []
    # Bytes, because str.splitlines also splits at characters that JSON allows in strings.
    content = read_bytes(path, absent=remedy, max_bytes=None).removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(parse(object_of(line)))
        except BadRow as error:
            raise UserError(f"{path}:{number}: {error}") from error
        except RecursionError as error:  # read, but nested too deeply to be shown
            raise UserError(f"{path}:{number}: nested too deeply; remove the line") from error
    if not rows:
        raise UserError(f"{path} is empty; {remedy}")
    return rows


def field_of(row: dict[str, Any], name: str) -> Any:
    """The field of that name; BadRow, with those there are, if it is missing."""
    if name not in row:
        raise BadRow(f"no field {name!r}; the row has {', '.join(map(repr, row))}")
    return row[name]


def text_of(row: dict[str, Any], name: str) -> str:
    """A field that must be text and not empty."""
    return checked_text(field_of(row, name), f"field {name!r}")


def checked_text(value: Any, what: str) -> str:
    """The value, if it is text that a tokenizer can read and not empty; else BadRow.

    Args:
      value: from a row.
      what: it is, for the message.
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
    """A value in a message: its JSON, cut off where it gets long."""
    return json.dumps(value)[:60]


def object_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; BadRow if it is something else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
        raise BadRow(f"no valid JSON ({error}); fix or remove the line") from error
    if not isinstance(row, dict):
        raise BadRow(f"a JSON {type(row).__name__}; every line must be an object with named fields")
    return row
