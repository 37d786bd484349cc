"""Files of rows: reads each row as a dict, and writes rows.

    .jsonl .json              JSON, an object a line or one list of objects
    .csv .tsv                 a line of names, then a row a line; every value is the text that stands there
    .jsonl.gz .csv.zst ...    these, compressed by gzip, bzip2, xz, zstd or lz4
    .parquet                  Parquet
    .arrow .feather           Arrow, streams and files
    folder with state.json    the Arrow files that `datasets.save_to_disk` writes; read without that package
    any other folder          all files in it, of one of these formats, sorted by name

A file that is broken as a whole is a UserError. A broken row is a BadRow, and its place is known
("train.jsonl:17", "train.parquet row 3").
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import functools
import hashlib
import io
import json
import lzma
import os
import pathlib
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.errors import UserError
from jaxrl.files import open_file, read_json_object

Row: TypeAlias = dict[str, Any]
Parsed = TypeVar("Parsed")

MALFORMED = "malformed rows"

_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
# The first bytes of a compressed file, and pyarrow's name of the compression.
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    # Of the standard library: pyarrow has none.
    b"\xfd7zX": "xz",
    b"\x5d\x00\x00": "xz",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".lz4")
_BROKEN = (OSError, EOFError, lzma.LZMAError)
# The first bytes of what is no file of rows, what it is, and what to do.
_OTHERS = {
    rb"version https://git-lfs": "a pointer of Git LFS; get the file that it stands for by: git lfs pull",
    rb"/annex/objects/": "a pointer of git-annex; get the file that it stands for by: git annex get",
    rb"(\xef\xbb\xbf)?\s*<(?i:!doctype|html|head|body|\?xml|error)": "a web page, often of an error; "
    "download the file again (on the hub by its address with /resolve/)",
    rb"PK\x03\x04|PK\x05\x06": "a zip archive or an Excel workbook; unpack it, or save its sheet as CSV",
    rb"\xd0\xcf\x11\xe0": "an Excel workbook; save its sheet as CSV",
    rb"7z\xbc\xaf|Rar!|.{257}ustar": "an archive; unpack it, and name a file or the folder",
    rb"\x1f\x9d|\xff\x06\0\0sNaPpY": "compressed in a way that is not read here; unpack it",
    rb"\xff\xfe|\xfe\xff|.?\0": "text in UTF-16 or no text; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    rb"\x80[\x02-\x05]|\x93NUMPY|\x89HDF|SQLite format 3\0|ORC[^ -~]|Obj\x01|FEA1\0|%PDF": "no file of rows; "
    "write them as JSONL or Parquet, for instance by pandas",
}
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

    @property
    def stem(self) -> str:
        """Its name without the endings of format and compression."""
        is_packed = self.path.suffix.lower() in _COMPRESSED
        return (self.path.with_suffix("") if is_packed else self.path).stem

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
        files = [file for file in sorted(path.iterdir()) if _suffix(file) in _SUFFIXES]
        suffixes = {_suffix(file) for file in files}
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
            f"{what} has bytes that are no UTF-8, or half a surrogate pair ({error}), which no tokenizer "
            "reads; save the file as UTF-8, or fix or remove the line"
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
    absent = f"put one JSON object a line, such as {example}, or a CSV, Parquet or Arrow file there"
    suffix = _suffix(path)
    with _opened(path, absent=absent) as file:
        try:
            start = file.read(512)
        except _BROKEN as error:
            raise UserError(f"{path} is broken ({one_line(error)}); {_AGAIN}") from error
        is_compressed = not isinstance(file.raw, io.FileIO)
    is_table = start.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"))
    if is_compressed and (is_table or suffix in (".parquet", ".arrow", ".feather")):
        raise UserError(
            f"{path} is a compressed table; unpack it, since Parquet and Arrow are read in parts"
        )
    for first, told in {} if is_table else _OTHERS.items():
        if re.match(first, start, re.DOTALL):
            raise UserError(f"{path} is {told}")
    if start.startswith(b"PAR1") or suffix == ".parquet":
        return "Parquet"
    # A stream of Arrow begins with four bytes of ones.
    if is_table or suffix in (".arrow", ".feather"):
        return "Arrow"
    if suffix in (".csv", ".tsv"):
        return suffix[1:].upper()
    # A file that begins with a list may also be JSONL with a wrong first line.
    is_list = start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return "JSON" if is_list and suffix == ".json" else "JSONL"


def _suffix(path: pathlib.Path) -> str:
    """The ending of a name that says the format, without that of a compression."""
    path = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return path.suffix.lower()


def _opened(path: pathlib.Path, *, absent: str = _AGAIN) -> io.BufferedReader:
    """The content of a file, unpacked if its first bytes are those of a compression."""
    with open_file(path, absent=absent) as file:
        start = file.read(4)
    found = (name for first, name in _COMPRESSIONS.items() if start.startswith(first))
    if (name := next(found, None)) is None:
        return path.open("rb")
    if name == "xz":
        return io.BufferedReader(typing.cast("Any", lzma.LZMAFile(path)))
    packed: Any = pa.CompressedInputStream(pa.OSFile(str(path)), name)
    return io.BufferedReader(packed)


def _separated(separator: str, path: pathlib.Path) -> Iterator[tuple[str, Row | BadRow]]:
    """The rows of a CSV file: texts, since "007", "1.0", "true" and "NA" may be prompts and truths."""
    file = _opened(path)
    names_line = file.peek().partition(b"\n")[0].decode("latin-1")
    if separator not in names_line:
        # Excel writes semicolons where numbers have decimal commas.
        separator = next(filter(names_line.__contains__, ",;\t|"), separator)
    # Bytes that are no UTF-8 spoil their own row alone: `checked_text` refuses half of a surrogate pair.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    # A prompt may be long; Python's limit is 128 KiB a value.
    csv.field_size_limit(2**31 - 1)
    with text:
        reader = csv.reader(text, delimiter=separator, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            # A line for Excel alone.
            names = [name.strip() for name in next(reader, [])] if names[:1] == ["sep="] else names
        except csv.Error as error:
            raise UserError(f"{path} has no line of names that can be read ({error})") from error
        if len(set(filter(None, names))) < sum(map(bool, names)):
            raise UserError(f"{path} has two columns of one name in {names}; give each its own")
        while True:
            # A value may go over several lines; the place of a row is the first one.
            place = f"{path}:{reader.line_num + 1}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield place, BadRow(f"quotes that do not match ({error}); fix or remove the line")
                continue
            if len(values) == len(names):
                # A column without a name numbers the rows, as those that pandas writes.
                yield place, {name: x for name, x in zip(names, values, strict=True) if name}
            elif values:
                yield place, BadRow(f"{len(values)} values, and {len(names)} columns have names")


def _unpacked(
    read: Callable[[pathlib.Path], Iterator[tuple[str, Row | BadRow]]], path: pathlib.Path
) -> Iterator[tuple[str, Row | BadRow]]:
    """The rows of a file that may be compressed, and cut off."""
    try:
        yield from read(path)
    except _BROKEN as error:
        raise UserError(f"{path} is broken ({one_line(error)}); {_AGAIN}") from error


def _json_lines(path: pathlib.Path) -> Iterator[tuple[str, Row | BadRow]]:
    with _opened(path) as file:
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
    try:
        with _opened(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
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
    open_file(path, absent=_AGAIN).close()  # Arrow would wait for the other end of a pipe
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
    """Converts to JSON's types: times and decimals become text; bytes, such as pictures, their digest."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        # No text, which could pass for a prompt or a truth.
        return {"sha256": hashlib.sha256(value).hexdigest()}
    return value if isinstance(value, str | int | float | None) else str(value)


_READERS = {
    "JSONL": functools.partial(_unpacked, _json_lines),
    "JSON": functools.partial(_unpacked, _json_list),
    "CSV": functools.partial(_unpacked, functools.partial(_separated, ",")),
    "TSV": functools.partial(_unpacked, functools.partial(_separated, "\t")),
    "Parquet": functools.partial(
        _table_rows,
        lambda path: pq.ParquetFile(path, memory_map=True).iter_batches(batch_size=_BATCH_ROWS),
    ),
    "Arrow": functools.partial(_table_rows, _arrow_batches),
}
