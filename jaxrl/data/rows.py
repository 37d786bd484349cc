"""Files of rows: reads each row as a dict, and writes rows.

    .jsonl .json              JSON, an object a line or one list of objects
    .parquet                  Parquet
    .arrow .feather           Arrow, streams and files
    folder with state.json    the Arrow files that `datasets.save_to_disk` writes; read without that package
    any other folder          all files in it, of one of these formats, sorted by name

A file that is broken as a whole is a UserError. A broken row is a BadRow, and its place is known
("train.jsonl:17", "train.parquet row 3"). Not supported: compressed JSONL.
"""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import decimal
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.errors import UserError
from jaxrl.files import open_file, read_json_object, read_text

Row: TypeAlias = dict[str, Any]
Parsed = TypeVar("Parsed")

MALFORMED = "malformed rows"

_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".feather")
_EXAMPLE = '{"problem": ..., "answer": ...}'
_AGAIN = "copy the published file again"
# Rows that are converted to Python objects at once.
_BATCH_ROWS = 1024
# Arrow's types whose values in Python are none of JSON's. To convert the rows of other files would take 10 us
# each, more than to read them.
_NOT_JSON = re.compile("date|time|duration|interval|decimal|binary|map|extension|halffloat")


class BadRow(ValueError):
    """A row cannot be used; the message says why.

    Attributes:
      reason: What such rows are counted as, "rows without a prompt" for instance.
    """

    def __init__(self, message: str, reason: str = MALFORMED):
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class RowFile:
    """The rows of one or more files; iterating yields (place, row), or (place, BadRow) for a broken row.

    Attributes:
      kind: Name of the format, for messages.
      path: The file or folder.
      files: The files, one after the other.
      example: An example of a row, for messages.
    """

    kind: str
    path: pathlib.Path
    files: tuple[pathlib.Path, ...]
    example: str = _EXAMPLE

    def __iter__(self) -> Iterator[tuple[str, Row | BadRow]]:
        is_empty = True
        for file in self.files:
            for located in _READERS[_kind_of(file, self.example)](file):
                is_empty = False
                yield located
        if is_empty:
            raise UserError(
                f"{self.path} is empty; put one JSON object a line there, such as {self.example}"
            )


def open_rows(path: str | pathlib.Path, *, example: str = _EXAMPLE) -> RowFile:
    """Finds the files of rows at a path and their format.

    Args:
      path: A file or a folder.
      example: An example of a row, for messages.

    Raises:
      UserError: There is no file, or files of several formats.
    """
    path = pathlib.Path(path)
    files = [path]
    if (path / "state.json").exists():
        state = read_json_object(path / "state.json", absent="")
        if state.get("_indices_data_files"):
            raise UserError(
                f"{path} holds a selection of rows by index; call flatten_indices() before save_to_disk"
            )
        files = [path / entry["filename"] for entry in state["_data_files"]]
    elif (path / "dataset_dict.json").exists():
        raise UserError(f"{path} holds several splits; name the folder of one, {path}/train")
    elif path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES]
        suffixes = {file.suffix for file in files}
        if len(suffixes) != 1:
            found = f"files of {len(suffixes)} kinds" if suffixes else "no file of rows"
            raise UserError(
                f"{path} has {found}; name a file ({', '.join(_SUFFIXES)}), or a folder with one kind of "
                "them"
            )
    kind = _kind_of(files[0], example)
    return RowFile(
        f"{kind}, {len(files)} files" if len(files) > 1 else kind, path, tuple(files), example
    )


def parse_rows(
    path: str | pathlib.Path, parse: Callable[[Row], Parsed], *, example: str
) -> tuple[Parsed, ...]:
    """Parses all rows of a file; UserError, with its place, for the first row that `parse` refuses."""
    parsed = []
    for place, row in open_rows(path, example=example):
        try:
            if isinstance(row, BadRow):
                raise row
            parsed.append(parse(row))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{place}: {error}") from error
    return tuple(parsed)


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | pathlib.Path) -> None:
    """Writes rows to a new JSONL or Parquet file, by the ending of its name. A failure leaves no file.

    Raises:
      UserError: The ending is unknown, the file exists, its folder cannot be written to, or a field has
        values of several types, which Parquet cannot hold.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path} is neither .jsonl nor .parquet; give the file one of these names")
    if path.exists():
        raise UserError(f"{path} exists; remove it, or name another file")
    # Renamed once it is whole: a failure must not leave a file that looks complete.
    unfinished = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            # A row may lack fields of others.
            names = list(dict.fromkeys(name for row in rows for name in row))
            table = pa.table({name: [row.get(name) for row in rows] for name in names})
            pq.write_table(table, unfinished, compression="zstd")
        else:
            with unfinished.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(unfinished, path)
    except pa.ArrowException as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(
            f"{path}: Parquet does not hold these rows ({one_line(error)}); name a .jsonl file"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error})") from error


def one_line(error: Exception) -> str:
    """The message of a library's error, on one line and cut to 160 characters."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def field_of(row: Row, name: str) -> Any:
    """Returns a field; BadRow, with the fields that the row has, if it is missing."""
    if name not in row:
        raise BadRow(f"no field {name!r}; the row has {', '.join(map(repr, row))}")
    return row[name]


def checked_text(value: Any, what: str) -> str:
    """Returns the value if it is text, not empty and valid for a tokenizer; else BadRow, with name `what`."""
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


# Files and formats


def _kind_of(path: pathlib.Path, example: str) -> str:
    """The format of a file, by its first bytes; its name decides what these leave open."""
    absent = f"put one JSON object a line, such as {example}, or a Parquet or Arrow file there"
    with open_file(path, absent=absent) as file:
        start = file.read(64)
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return "Parquet"
    # A stream of Arrow begins with four bytes of ones.
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or path.suffix in (".arrow", ".feather"):
        return "Arrow"
    # A file that begins with a list may also be JSONL with a wrong first line.
    is_list = start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return "JSON" if is_list and path.suffix == ".json" else "JSONL"


def _json_lines(path: pathlib.Path) -> Iterator[tuple[str, Row | BadRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            # Programs on Windows write a byte-order mark, which no JSON begins with.
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deeply
                row = BadRow(f"no valid JSON ({error}); fix or remove the line")
            yield f"{path}:{number}", _object(row)


def _json_list(path: pathlib.Path) -> Iterator[tuple[str, Row | BadRow]]:
    text = read_text(path, absent=_AGAIN).removeprefix("\ufeff")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON list ({error}); {_AGAIN}") from error
    yield from ((f"{path} entry {index}", _object(row)) for index, row in enumerate(rows))


def _object(row: Any) -> Row | BadRow:
    if isinstance(row, dict | BadRow):
        return row
    return BadRow(f"a JSON {type(row).__name__}; every line must be an object with named fields")


def _table_rows(
    batches: Callable[[pathlib.Path], Iterator[pa.RecordBatch]], path: pathlib.Path
) -> Iterator[tuple[str, Row | BadRow]]:
    index = 0
    try:
        for batch in batches(path):
            for row in _python_rows(batch):
                yield f"{path} row {index}", row
                index += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is broken from row {index} on ({one_line(error)}); {_AGAIN}"
        ) from error


def _arrow_batches(path: pathlib.Path) -> Iterator[pa.RecordBatch]:
    source = pa.memory_map(str(path))
    try:
        yield from pa.ipc.open_stream(source)
        return
    except pa.ArrowInvalid:  # a file, unless the stream is broken later on
        source.seek(0)
    file = pa.ipc.open_file(source)
    yield from map(file.get_batch, range(file.num_record_batches))


def _python_rows(batch: pa.RecordBatch) -> list[Row | BadRow]:
    # Python's times have no nanoseconds.
    for i, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            times = batch.column(i).cast(pa.timestamp("us", field.type.tz), safe=False)
            batch = batch.set_column(i, field.name, times)
    is_plain = not any(_NOT_JSON.search(str(kind)) for kind in batch.schema.types)
    try:
        rows = batch.to_pylist()
        return rows if is_plain else [_plain(row) for row in rows]
    except (ValueError, OverflowError) as error:
        # Text that is not UTF-8 and times out of Python's range spoil their own row alone.
        if batch.num_rows == 1:
            return [BadRow(f"a value that cannot be read ({one_line(error)})")]
    return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]


def _plain(value: Any) -> Any:
    """Converts to JSON's types: times and decimals become text; bytes, such as pictures, become None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    return value if isinstance(value, str | int | float | None) else None


_READERS = {
    "JSONL": _json_lines,
    "JSON": _json_list,
    "Parquet": functools.partial(
        _table_rows,
        lambda path: pq.ParquetFile(path, memory_map=True).iter_batches(batch_size=_BATCH_ROWS),
    ),
    "Arrow": functools.partial(_table_rows, _arrow_batches),
}
