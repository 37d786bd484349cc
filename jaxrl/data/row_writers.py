"""Writes problems to JSONL and Parquet files, in a layout that is recognised when they are read back."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.records import Record
from jaxrl.data.row_layouts import SOURCE_NAME
from jaxrl.errors import UserError

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns rows with problem (prompt, if any is a conversation), answer, solution and other fields."""
    if all(isinstance(record.prompt, str) for record in records):
        prompts = [{"problem": record.prompt} for record in records]
    else:
        prompts = [{"prompt": _messages(record)} for record in records]
    return [
        {
            **prompt,
            "answer": record.answer,
            **({} if record.solution is None else {"solution": record.solution}),
            SOURCE_NAME: record.source,
            # A field of the original file may have one of the names above without being the prompt.
            **{k: v for k, v in record.extra.items() if k not in _OWN_FIELDS},
        }
        for prompt, record in zip(prompts, records, strict=True)
    ]


def write_rows(rows: Rows, path: str | pathlib.Path) -> None:
    """Writes rows to a new file; the ending of its name selects the format. A failure leaves no file.

    Raises:
      UserError: The ending is unknown, the file exists, or its folder cannot be written to.
    """
    path = pathlib.Path(path)
    if path.suffix not in _WRITERS:
        raise UserError(f"{path} is neither .jsonl nor .parquet; give the file one of these names")
    if path.exists():
        raise UserError(f"{path} exists; remove it, or name another file")
    unfinished = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](rows, unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error})") from error


def _write_jsonl(rows: Rows, path: pathlib.Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(rows: Rows, path: pathlib.Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column(name, [row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _column(name: str, values: list[Any]) -> pa.Array:
    try:
        column = pa.array(values)
    except pa.ArrowException:
        column = None
    # Parquet cannot store objects without fields.
    if column is not None and not (pa.types.is_struct(column.type) and not column.type.num_fields):
        return column
    logger.warning("%s holds values of several types; it is written as JSON text", name)
    return pa.array([None if value is None else json.dumps(value) for value in values])


_OWN_FIELDS = ("problem", "prompt", "answer", "solution", SOURCE_NAME)
_WRITERS: dict[str, Callable[[Rows, pathlib.Path], None]] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}


def _messages(record: Record) -> list[dict[str, str]]:
    prompt = record.prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]
