"""Rows stored as JSON text: JSONL files, JSON lists and ArrayRecord files."""

from __future__ import annotations

import codecs
import itertools
import json
import mmap
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex, TypeVar

import grain
import numpy as np

from jaxrl.data.rows import COPY_AGAIN, WANTED, BadRow, Row, RowFile, object_of, one_line
from jaxrl.errors import UserError
from jaxrl.files import open_file, read_bytes

Parsed = TypeVar("Parsed")

# A JSON list is parsed as a whole, which takes up to ten times as much memory as the file.
_MAX_LIST_BYTES = 1 << 30


class JsonLines(RowFile):
    """One JSON object a line; blank lines are skipped.

    The file is mapped into memory, and a line is parsed whenever it is asked for.

    Args:
      path: The file, UTF-8.
      absent: The remedy in the message if there is no such file.
    """

    kind = "JSONL"

    def __init__(self, path: pathlib.Path, *, absent: str = WANTED):
        self._path = path
        self._content = _mapped(path, absent)
        # An array, because there may be millions of lines: (line number, start, end) of each.
        numbers = itertools.chain.from_iterable(_lines(self._content))
        self._lines = np.fromiter(numbers, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        _, start, end = self._lines[index].tolist()
        return object_of(self._content[start:end])

    def place(self, index: int) -> str:
        """File and line number."""
        return f"{self._path}:{self._lines[index][0]}"


def read_jsonl(
    path: str | pathlib.Path, parse: Callable[[dict[str, Any]], Parsed], *, wanted: str
) -> list[Parsed]:
    """Reads and parses all rows of a JSONL file.

    Args:
      path: The file, UTF-8.
      parse: Turns a JSON object into a row, or raises BadRow.
      wanted: An example of a line, for messages.

    Raises:
      UserError: The file is missing or empty, or a row is broken ("file:line: ...").
    """
    remedy = f"put one JSON object a line, such as {wanted} there"
    lines = JsonLines(pathlib.Path(path), absent=remedy)
    if not len(lines):
        raise UserError(f"{path} is empty; {remedy}")
    parsed = []
    for index in range(len(lines)):
        try:
            parsed.append(parse(lines[index]))
        except BadRow as error:
            raise UserError(f"{lines.place(index)}: {error}") from error
        except RecursionError as error:  # it was parsed, but is nested too deeply for a message
            raise UserError(f"{lines.place(index)}: nested too deeply; remove the line") from error
    return parsed


class JsonList(RowFile):
    """One JSON list of objects, parsed as a whole."""

    kind = "JSON"

    def __init__(self, path: pathlib.Path):
        try:
            content = read_bytes(path, absent=COPY_AGAIN, max_bytes=_MAX_LIST_BYTES)
            rows = json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is no JSON list ({error}); {COPY_AGAIN}") from error
        self._path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise BadRow(f"a JSON {type(row).__name__}; every entry must be an object")
        return row

    def place(self, index: int) -> str:
        """File and entry number, counted from 0."""
        return f"{self._path} entry {index}"


class ArrayRecords(RowFile):
    """An ArrayRecord file with one JSON object a record, read by Grain."""

    kind = "ArrayRecord"

    def __init__(self, path: pathlib.Path):
        if not hasattr(grain.sources, "ArrayRecordDataSource"):
            raise UserError(f"{path} needs the package array_record; pip install array_record")
        try:
            self._records = grain.sources.ArrayRecordDataSource(str(path))
            self._length = self._records.__len__()  # pyright: ignore[reportAttributeAccessIssue]
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{path} is no ArrayRecord ({one_line(error)}); {COPY_AGAIN}"
            ) from error
        self._path = path

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        try:
            record = self._records[range(len(self))[index]]
        except (RuntimeError, ValueError) as error:
            raise BadRow(f"cannot be read ({one_line(error)})") from error
        return object_of(record)

    def place(self, index: int) -> str:
        """File and record number, counted from 0."""
        return f"{self._path} record {index}"


def _mapped(path: pathlib.Path, absent: str) -> mmap.mmap | bytes:
    with open_file(path, absent=absent) as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _lines(content: mmap.mmap | bytes) -> Iterator[tuple[int, int, int]]:
    """Yields number, start and end of every line that is not blank."""
    start = len(codecs.BOM_UTF8) if content[:3] == codecs.BOM_UTF8 else 0
    for number in itertools.count(1):
        # Only line feeds end a line: str.splitlines also splits at characters that JSON allows in strings.
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if content[start:end].strip():
            yield number, start, end
        start = end + 1
        if start > len(content):
            return
