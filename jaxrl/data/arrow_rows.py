"""Rows stored as columns: Parquet and Arrow files, read by pyarrow one row group at a time.

A record batch of an Arrow file counts as a row group here.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, SupportsIndex

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from pyarrow import types

from jaxrl.data.rows import COPY_AGAIN, WANTED, BadRow, Row, RowFile, locate, one_line
from jaxrl.errors import UserError
from jaxrl.files import check_file

# pyarrow creates the functions of this module when it is imported, so type checkers do not know them.
_COMPUTE: Any = pyarrow.compute

# Rows that are converted to Python objects at once, and the limit for their texts.
_ROWS_AT_ONCE = 256
_MAX_BLOCK_BYTES = 1 << 27
# Limit for a row group, which is read as a whole. Repeated texts count once.
_MAX_GROUP_BYTES = 1 << 29

_BINARY_TYPES = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
_LIST_TYPES = (types.is_list, types.is_large_list, types.is_fixed_size_list)
_KEY_TYPES = (types.is_string, types.is_large_string, types.is_integer, types.is_floating)


class Tables(RowFile):
    """A file of columns, of which one row group at a time is in memory.

    Args:
      path: The file, for messages.
      kind: Name of the format.
      lengths: Number of rows of each row group.
      load: Reads a row group.
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
        # The last row group and the last block of its rows: reading in order loads everything once.
        self._group = functools.lru_cache(maxsize=1)(load)
        self._rows = functools.lru_cache(maxsize=1)(self._load_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        group, offset = locate(self._starts, range(len(self))[index])
        block, row = divmod(offset, _ROWS_AT_ONCE)
        value = self._rows(group, block)[row]
        if isinstance(value, BadRow):
            raise value
        return _plain(value)

    def keys(self, fields: Sequence[str]) -> Iterator[Hashable] | None:
        """The values of the fields, if all are text, numbers, or lists with a single message."""
        if not len(self) or any(_leaves(self._load_group(0), field) is None for field in fields):
            return None
        return self._keys(fields)

    def _keys(self, fields: Sequence[str]) -> Iterator[Hashable]:
        for group in range(len(self._starts) - 1):
            rows = self._load_group(group).num_rows
            for block in range(math.ceil(rows / _ROWS_AT_ONCE)):
                table = self._load_block(group, block)
                columns = _columns(table, fields)
                if columns is None:  # unlike the first group: keys that equal no other
                    yield from (object() for _ in range(table.num_rows))
                else:
                    yield from zip(*columns, strict=True)

    def place(self, index: int) -> str:
        """File and row number, counted from 0."""
        return f"{self._path} row {index}"

    def _load_group(self, group: int) -> pa.Table:
        try:
            return self._group(group)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._broken(self._starts[group], error) from error

    def _load_block(self, group: int, block: int) -> pa.Table:
        """Some rows of a row group; UserError if their texts exceed the limit."""
        table = self._load_group(group).slice(block * _ROWS_AT_ONCE, _ROWS_AT_ONCE)
        size = sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks)
        if size > _MAX_BLOCK_BYTES:
            raise UserError(
                f"{self._path} has {size:,} bytes of text in {table.num_rows} rows from row "
                f"{self._starts[group] + block * _ROWS_AT_ONCE} on; at most {_MAX_BLOCK_BYTES:,} are read: "
                "shorten the rows, or leave out columns that are not needed"
            )
        return table

    def _load_rows(self, group: int, block: int) -> list[Row | BadRow]:
        try:
            return _row_by_row(_in_microseconds(self._load_block(group, block)))
        except pa.ArrowException as error:
            raise self._broken(self._starts[group] + block * _ROWS_AT_ONCE, error) from error

    def _broken(self, row: int, error: Exception) -> UserError:
        return UserError(
            f"{self._path} is broken from row {row} on ({one_line(error)}); {COPY_AGAIN}"
        )


def open_parquet(path: pathlib.Path) -> Tables:
    """Opens a Parquet file; UserError if it is broken or a row group is too large."""
    try:
        metadata = pq.read_metadata(path, memory_map=True)
        _check_names(metadata.schema.to_arrow_schema(), path)
        lengths = [_check_group(metadata, i, path) for i in range(metadata.num_row_groups)]
        # Dictionary columns hold a repeated text once, as the file does: a megabyte may be gigabytes of rows.
        texts = [
            column.path
            for column in map(metadata.schema.column, range(metadata.num_columns))
            if column.physical_type == "BYTE_ARRAY"
        ]
        file = pq.ParquetFile(path, memory_map=True, read_dictionary=texts, metadata=metadata)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is no whole Parquet file ({one_line(error)}); {COPY_AGAIN}"
        ) from error
    return Tables(path, "Parquet", lengths, file.read_row_group)


def _check_group(metadata: pq.FileMetaData, number: int, path: pathlib.Path) -> int:
    """Returns the number of rows of a row group; UserError if it is too large."""
    group, size = metadata.row_group(number), 0
    for i in range(group.num_columns):
        column = group.column(i)
        # Repeated values take no space in the file, but each takes its width in memory.
        width = max(8, metadata.schema.column(i).length or 0)
        size += max(column.total_uncompressed_size, column.num_values * width)
    if size > _MAX_GROUP_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes in row group {number} of {metadata.num_row_groups}; at most "
            f"{_MAX_GROUP_BYTES:,} are read at once: write it again with smaller ones, such as "
            "pyarrow.parquet.write_table(table, file, row_group_size=10_000)"
        )
    return group.num_rows


def open_arrow(path: pathlib.Path) -> Tables:
    """Opens an Arrow stream or file, mapped into memory; UserError if it is broken."""
    check_file(path, absent=WANTED)
    try:
        source = pa.memory_map(str(path))
        try:
            batches = list(pa.ipc.open_stream(source))
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is no whole Arrow file ({one_line(error)}); {COPY_AGAIN}"
        ) from error
    for batch in batches[:1]:  # all batches have the same schema
        _check_names(batch.schema, path)
    lengths = [batch.num_rows for batch in batches]
    return Tables(path, "Arrow", lengths, lambda i: pa.Table.from_batches([batches[i]]))


def _check_names(schema: pa.Schema, path: pathlib.Path) -> None:
    twice = [name for name, times in collections.Counter(schema.names).items() if times > 1]
    if twice:
        raise UserError(f"{path} has several columns named {twice[0][:80]!r}; rename all but one")


def _row_by_row(table: pa.Table) -> list[Row | BadRow]:
    """Converts a table to rows. A value that Python cannot hold makes only its own row a BadRow.

    Such values are text that is not UTF-8 and times out of range. The table is halved until one is alone.
    """
    try:
        return table.to_pylist()
    except (ValueError, OverflowError) as error:
        if isinstance(error, pa.ArrowException):
            raise
        if table.num_rows == 1:
            is_text = isinstance(error, UnicodeDecodeError)
            kind = "text that is not UTF-8" if is_text else "a value that cannot be read"
            return [BadRow(f"{kind} ({one_line(error)})")]
    half = table.num_rows // 2
    return _row_by_row(table.slice(0, half)) + _row_by_row(table.slice(half))


def _in_microseconds(table: pa.Table) -> pa.Table:
    """Converts nanoseconds to microseconds, because Python's times have no nanoseconds."""
    fields = [field.with_type(_without_nanoseconds(field.type)) for field in table.schema]
    schema = pa.schema(fields)
    return table if schema.equals(table.schema) else table.cast(schema, safe=False)


def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_nanoseconds(field.type)) for field in kind])
    for is_kind, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_without_nanoseconds(kind.value_type)))
    return kind


def _text_bytes(array: pa.Array) -> int:
    """The bytes of all texts in an array, at any depth; repeated texts count each time."""
    kind = array.type
    if types.is_dictionary(kind):
        if not _is_any(kind.value_type, _BINARY_TYPES):
            return 0
        lengths = _COMPUTE.binary_length(array.dictionary).take(array.indices)
        return _COMPUTE.sum(lengths).as_py() or 0
    if _is_any(kind, _BINARY_TYPES):
        return _COMPUTE.sum(_COMPUTE.binary_length(array)).as_py() or 0
    if types.is_struct(kind):
        return sum(map(_text_bytes, array.flatten()))
    if types.is_map(kind):
        # The columns of a sliced map are not sliced.
        entries = slice(array.offsets[0].as_py(), array.offsets[-1].as_py())
        return _text_bytes(array.keys[entries]) + _text_bytes(array.items[entries])
    return _text_bytes(array.flatten()) if _is_any(kind, _LIST_TYPES) else 0


def _is_any(kind: pa.DataType, tests: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    return any(is_kind(kind) for is_kind in tests)


def _columns(table: pa.Table, fields: Sequence[str]) -> list[list[Any]] | None:
    """The values of the columns below some fields; None if one of them has no keys."""
    columns: list[pa.Array] = []
    for field in fields:
        leaves = _leaves(table, field)
        if leaves is None:
            return None
        columns += leaves
    try:
        # to_pylist of a dictionary array is much slower than that of a plain one.
        return [
            (column.dictionary_decode() if types.is_dictionary(column.type) else column).to_pylist()
            for column in columns
        ]
    except UnicodeDecodeError:
        return None


def _leaves(table: pa.Table, field: str) -> list[pa.Array] | None:
    """The columns below a dotted field; None if a row has more or less than one plain value in each."""
    top, *inner = [field] if field in table.column_names else field.split(".")
    if top not in table.column_names:
        return None
    column = table.column(top).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # the table has no rows
        return None
    for name in inner:
        if not types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = column.flatten()[column.type.get_field_index(name)]
    if types.is_list(column.type) and types.is_struct(column.type.value_type):
        if column.null_count or (column.value_lengths().to_numpy() != 1).any():
            return None
        column = column.flatten()
    leaves = column.flatten() if types.is_struct(column.type) else [column]
    kinds = [
        leaf.type.value_type if types.is_dictionary(leaf.type) else leaf.type for leaf in leaves
    ]
    return leaves if all(_is_any(kind, _KEY_TYPES) for kind in kinds) else None


def _plain(value: Any) -> Any:
    """Converts to JSON's types: times and decimals become text; bytes, such as pictures, become None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    return value if isinstance(value, str | int | float | None) else None
