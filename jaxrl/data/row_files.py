"""Files of rows, read by index, whatever they are written in.

    .jsonl .json          an object a line, or one list of objects
    .parquet              pyarrow, a row group at a time
    .arrow .feather       pyarrow, mapped into memory: streams and files
    folder with state.json    what `datasets.save_to_disk` writes; read without that package
    .array_record         Grain, a JSON object a record
    any other folder      all files in it, of one of these kinds, by name

Each is a `grain.sources.RandomAccessDataSource`. A format is known by how a file begins rather than by its
name. A file that cannot be read as a whole is refused in one line; a row that cannot is a BadRow, and says
where it stands ("train.jsonl:17", "train.parquet row 3").

Not covered: compressed JSONL, TFRecord, and ArrayRecord of anything but JSON.
"""

from __future__ import annotations

import bisect
import codecs
import collections
import datetime
import decimal
import functools
import itertools
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import grain
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from jaxrl.data.jsonl import BadRow, object_of
from jaxrl.errors import UserError
from jaxrl.files import check_file, open_file, read_bytes, read_json_object

# Its functions are made while it is imported, which no type checker sees.
_COMPUTE: Any = pyarrow.compute

Row = dict[str, Any]

_REMEDY = "copy the published file again"
_WANTED = (
    'put one JSON object a line, such as {"problem": ..., "answer": ...}, or a Parquet, Arrow or '
    "ArrayRecord file there"
)
_LFS = b"version https://git-lfs"
# Rows that are turned from columns into objects at once, and the bytes that they may have together.
_ROWS_AT_ONCE = 256
_MAX_BLOCK_BYTES = 1 << 27
# Of a row group, which is read as a whole; texts that repeat count once.
_MAX_GROUP_BYTES = 1 << 29
# A list of objects is parsed as a whole, and takes up to ten times as much memory.
_MAX_LIST_BYTES = 1 << 30
# Bytes of a mapped file that are looked through for line ends at once.
_CHUNK_BYTES = 1 << 24


class RowFile(Protocol):
    """Rows by index."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        """A row, JSON's types only; BadRow if it cannot be read."""
        ...

    def place(self, index: int) -> str:
        """Where a row stands, for messages."""
        ...

    def keys(self, fields: Sequence[str]) -> Iterator[Hashable] | None:
        """Of every row, in order, what is equal only where these fields are equal.

        It is much cheaper than the rows: a file that repeats its rows need not be read as objects. None where
        the format, or the type of a field, does not allow it.
        """
        ...

    @property
    def kind(self) -> str:
        """The format, for people."""
        ...


def open_rows(path: str | pathlib.Path) -> RowFile:
    """The rows of a file or a folder.

    Raises:
      UserError: there is no such thing, it is empty, or it cannot be read as what it begins as.
    """
    path = pathlib.Path(path)
    rows = _open_folder(path) if os.path.isdir(path) else _open_file(path)
    if not len(rows):
        raise UserError(
            f"{path} is empty; put one JSON object a line there, such as "
            '{"problem": ..., "answer": ...}'
        )
    return rows


class JsonLines:
    """An object a line; blank lines are skipped. The file is mapped, and a line read when it is asked for."""

    kind = "JSONL"

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._content = _mapped(path)
        # Three numbers a line, in an array: there may be millions of lines.
        numbers = itertools.chain.from_iterable(_lines(self._content))
        self._spans = np.fromiter(numbers, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        _, start, end = self._spans[index].tolist()
        return object_of(self._content[start:end])

    def keys(self, fields: Sequence[str]) -> None:
        """None: a line has no fields before it is read."""

    def place(self, index: int) -> str:
        """File and line."""
        return f"{self._path}:{self._spans[index][0]}"


class JsonList:
    """One JSON list of objects."""

    kind = "JSON"

    def __init__(self, path: pathlib.Path):
        try:
            content = read_bytes(path, absent=_REMEDY, max_bytes=_MAX_LIST_BYTES)
            rows = json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is no JSON list ({error}); {_REMEDY}") from error
        self._path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise BadRow(f"a JSON {type(row).__name__}; every entry must be an object")
        return row

    def keys(self, fields: Sequence[str]) -> None:
        """None: everything is in memory."""

    def place(self, index: int) -> str:
        """File and entry, counted from 0."""
        return f"{self._path} entry {index}"


class Tables:
    """Columns in pieces, of which one at a time is turned into rows.

    Args:
      path: for messages.
      kind: the format.
      lengths: rows of each piece.
      load: reads a piece.
    """

    def __init__(
        self,
        path: pathlib.Path,
        kind: str,
        lengths: Sequence[int],
        load: Callable[[int], pa.Table],
    ):
        self.kind = kind
        self._path = path
        self._starts = [0, *itertools.accumulate(lengths)]
        # One piece, and some rows of it: in order, everything is read once.
        self._piece = functools.lru_cache(maxsize=1)(load)
        self._rows = functools.lru_cache(maxsize=1)(self._load_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        index = range(len(self))[index]
        piece = bisect.bisect_right(self._starts, index) - 1
        block, row = divmod(index - self._starts[piece], _ROWS_AT_ONCE)
        value = self._rows(piece, block)[row]
        if isinstance(value, BadRow):
            raise value
        return _plain(value)

    def keys(self, fields: Sequence[str]) -> Iterator[Hashable] | None:
        """The values of the columns, if all are text, numbers, or single messages."""
        if not len(self) or any(_leaves(self._load_piece(0), field) is None for field in fields):
            return None
        return self._keys(fields)

    def _keys(self, fields: Sequence[str]) -> Iterator[Hashable]:
        for piece in range(len(self._starts) - 1):
            rows = self._load_piece(piece).num_rows
            for block in range(math.ceil(rows / _ROWS_AT_ONCE)):
                table = self._load_block(piece, block)
                columns = _columns(table, fields)
                if columns is None:  # unlike the first piece: no row is known to equal another
                    yield from (object() for _ in range(table.num_rows))
                else:
                    yield from zip(*columns, strict=True)

    def place(self, index: int) -> str:
        """File and row, counted from 0."""
        return f"{self._path} row {index}"

    def _load_piece(self, piece: int) -> pa.Table:
        try:
            return self._piece(piece)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(
                f"{self._path} is broken from row {self._starts[piece]} on ({_short(error)}); {_REMEDY}"
            ) from error

    def _load_block(self, piece: int, block: int) -> pa.Table:
        """Some rows of a piece, if they are not too large to be made objects of."""
        table = self._load_piece(piece).slice(block * _ROWS_AT_ONCE, _ROWS_AT_ONCE)
        size = sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks)
        if size > _MAX_BLOCK_BYTES:
            raise UserError(
                f"{self._path} has {size:,} bytes of text in {table.num_rows} rows from row "
                f"{self._starts[piece] + block * _ROWS_AT_ONCE} on; at most {_MAX_BLOCK_BYTES:,} are read: "
                "shorten the rows, or leave out columns that are not needed"
            )
        return table

    def _load_rows(self, piece: int, block: int) -> list[Row | BadRow]:
        first = self._starts[piece] + block * _ROWS_AT_ONCE
        try:
            return _row_by_row(_in_microseconds(self._load_block(piece, block)))
        except pa.ArrowException as error:
            raise UserError(
                f"{self._path} is broken from row {first} on ({_short(error)}); {_REMEDY}"
            ) from error


class ArrayRecords:
    """A JSON object a record."""

    kind = "ArrayRecord"

    def __init__(self, path: pathlib.Path):
        if not hasattr(grain.sources, "ArrayRecordDataSource"):
            raise UserError(f"{path} needs the package array_record; pip install array_record")
        try:
            self._records = grain.sources.ArrayRecordDataSource(str(path))
            self._length = self._records.__len__()  # pyright: ignore[reportAttributeAccessIssue]
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{path} is no ArrayRecord ({_short(error)}); {_REMEDY}") from error
        self._path = path

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        try:
            record = self._records[range(len(self))[index]]
        except (RuntimeError, ValueError) as error:
            raise BadRow(f"cannot be read ({_short(error)})") from error
        return object_of(record)

    def keys(self, fields: Sequence[str]) -> None:
        """None: a record has no fields before it is read."""

    def place(self, index: int) -> str:
        """File and record, counted from 0."""
        return f"{self._path} record {index}"


class Joined:
    """Several files one after the other."""

    def __init__(self, files: Sequence[RowFile]):
        self._files = files
        self._starts = [0, *itertools.accumulate(len(file) for file in files)]
        self.kind = f"{files[0].kind}, {len(files)} files" if len(files) > 1 else files[0].kind

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        file, row = self._find(range(len(self))[index])
        return file[row]

    def keys(self, fields: Sequence[str]) -> Iterator[Hashable] | None:
        """Those of its files, if all have them."""
        keys = [file.keys(fields) for file in self._files]
        known = [of_file for of_file in keys if of_file is not None]
        return itertools.chain.from_iterable(known) if len(known) == len(keys) else None

    def place(self, index: int) -> str:
        """Its file's."""
        file, row = self._find(index)
        return file.place(row)

    def _find(self, index: int) -> tuple[RowFile, int]:
        number = bisect.bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


# Which format


_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".feather", ".array_record", ".arrayrecord")


def _open_folder(folder: pathlib.Path) -> RowFile:
    if (folder / "state.json").exists():
        return _open_saved(folder)
    splits = folder / "dataset_dict.json"
    if splits.exists():
        names = read_json_object(splits, absent="").get("splits", [])
        raise UserError(
            f"{folder} holds the splits {', '.join(map(str, names))}; name the folder of one, such as "
            f"{folder / str(names[0] if names else 'train')}"
        )
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _SUFFIXES]
    suffixes = {file.suffix for file in files}
    if len(suffixes) != 1:
        found = f"files of {len(suffixes)} kinds" if suffixes else "no file of rows"
        raise UserError(
            f"{folder} has {found}; name a file ({', '.join(_SUFFIXES)}), or a folder with one kind of them"
        )
    return Joined([_open_file(file) for file in files])


def _open_saved(folder: pathlib.Path) -> RowFile:
    """A data set as `datasets` saves it: Arrow streams, named in state.json in their order."""
    state = read_json_object(folder / "state.json", absent="")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{folder}/state.json names no data files; {_REMEDY}")
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder} holds a selection of rows by index; call flatten_indices() before save_to_disk"
        )
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(name, str) and pathlib.Path(name).name == name for name in names):
        raise UserError(f"{folder}/state.json names files outside its folder; {_REMEDY}")
    missing = [name for name in names if not os.path.exists(folder / str(name))]
    if missing:
        raise UserError(f"{folder} has no {missing[0]}, which its state.json names; {_REMEDY}")
    return Joined([_open_arrow(folder / str(name)) for name in names])


def _open_file(path: pathlib.Path) -> RowFile:
    with open_file(path, absent=_WANTED) as file:
        start = file.read(64)
    if start.startswith(_LFS):
        raise UserError(
            f"{path} is a pointer of Git LFS and not the file itself; run git lfs pull where it lies"
        )
    if start.startswith(b"\x1f\x8b"):
        raise UserError(f"{path} is compressed; unpack it first: gunzip {path}")
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return _open_parquet(path)
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or path.suffix in (".arrow", ".feather"):
        return _open_arrow(path)
    if path.suffix in (".array_record", ".arrayrecord"):
        return ArrayRecords(path)
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    # A line of JSONL may be a list too, by mistake; the name decides.
    if text.startswith(b"[") and path.suffix == ".json":
        return JsonList(path)
    return JsonLines(path)


def _open_parquet(path: pathlib.Path) -> RowFile:
    try:
        metadata = pq.read_metadata(path, memory_map=True)
        _check_names(metadata.schema.to_arrow_schema(), path)
        lengths = [_check_group(metadata, i, path) for i in range(metadata.num_row_groups)]
        # A text that repeats is kept once, as in the file: a megabyte there may be gigabytes of rows.
        texts = [
            column.path
            for column in map(metadata.schema.column, range(metadata.num_columns))
            if column.physical_type == "BYTE_ARRAY"
        ]
        file = pq.ParquetFile(path, memory_map=True, read_dictionary=texts, metadata=metadata)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole Parquet file ({_short(error)}); {_REMEDY}") from error
    return Tables(path, "Parquet", lengths, file.read_row_group)


def _check_group(metadata: pq.FileMetaData, number: int, path: pathlib.Path) -> int:
    """The rows of a row group; UserError if it is too large to be read."""
    group, size = metadata.row_group(number), 0
    for i in range(group.num_columns):
        column = group.column(i)
        # Values that repeat take no room in the file, and their own in memory.
        width = max(8, metadata.schema.column(i).length or 0)
        size += max(column.total_uncompressed_size, column.num_values * width)
    if size > _MAX_GROUP_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes in row group {number} of {metadata.num_row_groups}; at most "
            f"{_MAX_GROUP_BYTES:,} are read at once: write it again with smaller ones, such as "
            "pyarrow.parquet.write_table(table, file, row_group_size=10_000)"
        )
    return group.num_rows


def _open_arrow(path: pathlib.Path) -> RowFile:
    check_file(path, absent=_WANTED)
    try:
        source = pa.memory_map(str(path))
        try:
            batches = list(pa.ipc.open_stream(source))
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole Arrow file ({_short(error)}); {_REMEDY}") from error
    for batch in batches[:1]:  # all have one schema
        _check_names(batch.schema, path)
    lengths = [batch.num_rows for batch in batches]
    return Tables(path, "Arrow", lengths, lambda i: pa.Table.from_batches([batches[i]]))


def _check_names(schema: pa.Schema, path: pathlib.Path) -> None:
    twice = [name for name, times in collections.Counter(schema.names).items() if times > 1]
    if twice:
        raise UserError(f"{path} has several columns named {twice[0][:80]!r}; rename all but one")


# Rows


def _mapped(path: pathlib.Path) -> mmap.mmap | bytes:
    with open_file(path, absent=_WANTED) as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _lines(content: mmap.mmap | bytes) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of every line that is not blank; only line feeds end one, as in JSON."""
    start = len(codecs.BOM_UTF8) if content[:3] == codecs.BOM_UTF8 else 0
    for number, end in enumerate(_line_ends(content), start=1):
        # Long lines are not blank: a look at their beginning is enough.
        if content[start : min(end, start + 64)].strip() or content[start:end].strip():
            yield number, start, end
        start = end + 1


def _line_ends(content: mmap.mmap | bytes) -> Iterator[int]:
    for start in range(0, len(content), _CHUNK_BYTES):
        chunk = np.frombuffer(content[start : start + _CHUNK_BYTES], np.uint8)
        yield from (start + np.flatnonzero(chunk == ord("\n"))).tolist()
    yield len(content)


def _row_by_row(table: pa.Table) -> list[Row | BadRow]:
    """The rows of a table; a text that is not UTF-8, or a time beyond Python's, spoils its own row alone."""
    try:
        return table.to_pylist()
    except (ValueError, OverflowError) as error:
        if isinstance(error, pa.ArrowException):
            raise
        if table.num_rows == 1:
            is_text = isinstance(error, UnicodeDecodeError)
            kind = "text that is not UTF-8" if is_text else "a value that cannot be read"
            return [BadRow(f"{kind} ({_short(error)})")]
    half = table.num_rows // 2
    return _row_by_row(table.slice(0, half)) + _row_by_row(table.slice(half))


def _in_microseconds(table: pa.Table) -> pa.Table:
    """A table without nanoseconds, which Python's times do not have."""
    fields = [field.with_type(_without_nanoseconds(field.type)) for field in table.schema]
    schema = pa.schema(fields)
    return table if schema.equals(table.schema) else table.cast(schema, safe=False)


def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_nanoseconds(field.type)) for field in kind])
    for is_kind, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_without_nanoseconds(kind.value_type)))
    return kind


def _text_bytes(array: pa.Array) -> int:
    """The bytes of all texts in an array, at any depth, each as often as it stands there."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = _COMPUTE.binary_length(array.dictionary) if _is_binary(kind.value_type) else None
        return 0 if lengths is None else _COMPUTE.sum(lengths.take(array.indices)).as_py() or 0
    if _is_binary(kind):
        return _COMPUTE.sum(_COMPUTE.binary_length(array)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_text_bytes, array.flatten()))
    if pa.types.is_map(kind):
        # Its columns know nothing of a slice.
        entries = slice(array.offsets[0].as_py(), array.offsets[-1].as_py())
        return _text_bytes(array.keys[entries]) + _text_bytes(array.items[entries])
    lists = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
    )
    return _text_bytes(array.flatten()) if any(is_kind(kind) for is_kind in lists) else 0


def _is_binary(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )


def _columns(table: pa.Table, fields: Sequence[str]) -> list[list[Any]] | None:
    """The values of all columns that some fields come to; None if they cannot be told."""
    leaves = [_leaves(table, field) for field in fields]
    known = [of_field for of_field in leaves if of_field is not None]
    if len(known) < len(leaves):
        return None
    try:
        # Arrow makes Python's texts of a dictionary much more slowly than of an array.
        return [
            (leaf.dictionary_decode() if pa.types.is_dictionary(leaf.type) else leaf).to_pylist()
            for of_field in known
            for leaf in of_field
        ]
    except UnicodeDecodeError:
        return None


def _leaves(table: pa.Table, field: str) -> list[pa.Array] | None:
    """The columns that a dotted field comes to; None if they are not one plain value a row."""
    top, *inner = [field] if field in table.column_names else field.split(".")
    if top not in table.column_names:
        return None
    column = table.column(top).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of a table without rows
        return None
    for name in inner:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = column.flatten()[column.type.get_field_index(name)]
    if pa.types.is_list(column.type) and pa.types.is_struct(column.type.value_type):
        if column.null_count or (column.value_lengths().to_numpy() != 1).any():
            return None
        column = column.flatten()
    leaves = column.flatten() if pa.types.is_struct(column.type) else [column]
    return leaves if all(_is_plain(leaf.type) for leaf in leaves) else None


def _is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    plain = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_integer,
        pa.types.is_floating,
    )
    return any(is_kind(kind) for is_kind in plain)


def _plain(value: Any) -> Any:
    """In JSON's types: times and decimals as text; bytes, such as pictures, are left out."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    return value if isinstance(value, str | int | float | None) else None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
