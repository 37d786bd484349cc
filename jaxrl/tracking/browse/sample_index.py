"""An index of sample files in a temporary database, for the lists, filters and searches of `jaxrl browse`.

    step_20.jsonl, step_10.jsonl, ...     read once in a background thread, newest step first
    table samples                         a row per sample: position in its file, columns of lists and filters
    table texts                           prompt, completion and answer in folded case, for searches

The files are untrusted: an invalid line is counted and skipped. If a file grows, only its new lines are read;
if it is replaced, all of it is read again. The folder of the files is never written to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.tracking.readable import visible
from jaxrl.tracking.sample_rows import read_head

logger = logging.getLogger(__name__)

# Number of characters of a text that are searched. The pages also show the rest.
SEARCHED_CHARS = 100_000
# Number of characters of a text in a list: its beginning and its end.
_START_CHARS, _END_CHARS = 120, 160
_ROWS_AT_ONCE = 1000
_LOOK_EVERY_S = 2.0

ORDERS = {
    "newest": "step DESC, file, line",
    "oldest": "step, file, line",
    "reward, highest": "reward DESC, file, line",
    "reward, lowest": "reward, file, line",
    "longest": "length DESC, file, line",
    "shortest": "length, file, line",
}
"""The orders of a list: label -> SQL."""

ANY_FAILURE, NO_FAILURE = "any kind", "none"
"""Choices of the failure filter besides the kinds of failures."""

_TABLES = """
CREATE TABLE samples (
  id INTEGER PRIMARY KEY, file TEXT, line INTEGER, start INTEGER, size INTEGER,
  step INTEGER, source TEXT, prompt_id INTEGER, sample INTEGER,
  correct INTEGER, reward REAL, length INTEGER, truncated INTEGER, stop_reason TEXT,
  failure TEXT, prompt TEXT, completion TEXT, answer TEXT, prediction TEXT
);
CREATE UNIQUE INDEX by_place ON samples (file, line);
CREATE INDEX by_step ON samples (step DESC, file, line);
CREATE INDEX by_prompt ON samples (file, source, prompt_id);
CREATE INDEX by_source ON samples (source);
CREATE INDEX by_failure ON samples (failure);
CREATE INDEX by_reward ON samples (reward);
CREATE INDEX by_length ON samples (length);
CREATE TABLE texts (id INTEGER PRIMARY KEY, folded TEXT);
"""
_COLUMNS = (
    *(
        "file",
        "line",
        "start",
        "size",
        "step",
        "source",
        "prompt_id",
        "sample",
        "correct",
        "reward",
    ),
    *(
        "length",
        "truncated",
        "stop_reason",
        "failure",
        "prompt",
        "completion",
        "answer",
        "prediction",
    ),
)


@dataclasses.dataclass(frozen=True)
class Filter:
    """The filter and the order of a list of samples. None and "" disable a criterion.

    Attributes:
      text: text to find in prompt, completion or answer, ignoring case.
      source: name of a data set.
      correct, truncated: required value.
      failure: kind of grader failure, `ANY_FAILURE` or `NO_FAILURE`.
      step, reward, length: (lowest, highest) value, both included.
      order: key of `ORDERS`.
    """

    text: str = ""
    source: str = ""
    correct: bool | None = None
    truncated: bool | None = None
    failure: str = ""
    step: tuple[float | None, float | None] = (None, None)
    reward: tuple[float | None, float | None] = (None, None)
    length: tuple[float | None, float | None] = (None, None)
    order: str = "newest"

    def condition(self) -> tuple[str, list[Any]]:
        """The SQL condition and the values of its placeholders."""
        parts, values = ["1"], []
        for name in ("source", "correct", "truncated"):
            value = getattr(self, name)
            if value not in ("", None):
                parts.append(f"{name} = ?")
                values.append(value)
        if self.failure in (ANY_FAILURE, NO_FAILURE):
            parts.append(f"failure {'!=' if self.failure == ANY_FAILURE else '='} ''")
        elif self.failure:
            parts.append("failure = ?")
            values.append(self.failure)
        for name in ("step", "reward", "length"):
            for sign, bound in zip((">=", "<="), getattr(self, name), strict=True):
                if bound is not None:
                    parts.append(f"{name} {sign} ?")
                    values.append(bound)
        if self.text:
            parts.append("id IN (SELECT id FROM texts WHERE instr(folded, ?) > 0)")
            values.append(_folded(self.text))
        return " AND ".join(parts), values


@dataclasses.dataclass(frozen=True)
class Overview:
    """The number of samples that pass a filter, and the means over them (None without samples)."""

    count: int
    reward: float | None
    correct: float | None
    length: float | None


@dataclasses.dataclass
class _File:
    """How far a file has been read: its inode, and the numbers of bytes and lines."""

    inode: int
    read: int = 0
    lines: int = 0


class SampleIndex:
    """An index of the samples in some files.

    As a context manager it follows the files in a background thread. Otherwise call `refresh`, and `close` at
    the end.

    Attributes:
      bad_lines: number of lines that are not samples.
      progress: (bytes of all files, bytes read so far).
    """

    def __init__(self, files: Callable[[], Sequence[pathlib.Path]]):
        """Args: a function that returns the present files, in the order in which to read them."""
        self._files = files
        self._folder = tempfile.TemporaryDirectory(prefix="jaxrl-browse-")
        self._path = pathlib.Path(self._folder.name) / "index.sqlite"
        self._known: dict[str, _File] = {}
        self._paths: dict[str, pathlib.Path] = {}
        self.bad_lines = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._reading = threading.Lock()
        self.progress = (0, 0)
        with self._open() as database:
            # WAL lets pages read while the thread writes. The database need not survive a crash.
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_TABLES)

    def __enter__(self) -> SampleIndex:
        self._thread = threading.Thread(target=self._follow, name="sample-index", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and removes the database."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._folder.cleanup()

    # Queries of the pages

    def overview(self, wanted: Filter) -> Overview:
        """The number and the means of all samples that pass the filter."""
        condition, values = wanted.condition()
        what = "count(*), avg(reward), avg(correct), avg(length)"
        with self._open() as database:
            query = f"SELECT {what} FROM samples WHERE {condition}"
            return Overview(*database.execute(query, values).fetchone())

    def page(self, wanted: Filter, *, start: int, count: int) -> list[dict[str, Any]]:
        """Rows `start` to `start + count` of the filtered samples, in the filter's order."""
        condition, values = wanted.condition()
        order = ORDERS.get(wanted.order, ORDERS["newest"])
        query = f"SELECT * FROM samples WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
        with self._open() as database:
            return [dict(row) for row in database.execute(query, [*values, count, start])]

    def sources(self, *, most: int = 200) -> list[str]:
        """The names of the data sets, at most `most`."""
        return self._different("source", most)

    def failures(self, *, most: int = 50) -> list[str]:
        """The kinds of grader failures, at most `most`."""
        return self._different("failure", most)

    def _different(self, column: str, most: int) -> list[str]:
        query = (
            f"SELECT DISTINCT {column} FROM samples WHERE {column} != '' ORDER BY {column} LIMIT ?"
        )
        with self._open() as database:
            return [row[column] for row in database.execute(query, [most])]

    def sample(self, file: str, line: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The index's row and the file's complete row of a sample; None if the sample does not exist."""
        with self._open() as database:
            found = database.execute(
                "SELECT * FROM samples WHERE file = ? AND line = ?", [file, line]
            ).fetchone()
        if found is None:
            return None
        try:
            with self._paths[file].open("rb") as opened:
                opened.seek(found["start"])
                row = json.loads(opened.read(found["size"]))
        except (OSError, ValueError, RecursionError):
            return None  # the file was replaced and is not yet read again
        return (dict(found), row) if isinstance(row, dict) else None

    def group(self, file: str, source: str, prompt_id: int | None) -> list[dict[str, Any]]:
        """The samples of one prompt, at most 500."""
        where = "file = ? AND source = ? AND prompt_id IS ?"
        query = f"SELECT * FROM samples WHERE {where} ORDER BY sample LIMIT 500"
        with self._open() as database:
            return [dict(row) for row in database.execute(query, [file, source, prompt_id])]

    # Reading files

    def refresh(self) -> None:
        """Reads new files and new lines."""
        with self._reading:
            present = {path.stem: path for path in self._files() if path.is_file()}
            self._paths = present
            sizes = {name: _size(path) for name, path in present.items()}
            total = sum(sizes.values())
            for name in self._known.keys() - present.keys():
                self._forget(name)
            for name, path in present.items():
                if self._ended.is_set():
                    return
                try:
                    self._read(name, path, total)
                except OSError as error:
                    logger.warning("%s cannot be read (%s)", path, error.strerror or error)
            self.progress = (total, sum(known.read for known in self._known.values()))

    def _follow(self) -> None:
        while not self._ended.is_set():
            self.refresh()
            self._ended.wait(_LOOK_EVERY_S)

    def _read(self, name: str, path: pathlib.Path, total: int) -> None:
        status = path.stat()
        known = self._known.get(name)
        if known is not None and (known.inode != status.st_ino or status.st_size < known.read):
            self._forget(name)
            known = None
        if known is None:
            known = self._known[name] = _File(status.st_ino)
        if status.st_size == known.read:
            return
        with path.open("rb") as file, self._open() as database:
            file.seek(known.read)
            rows: list[tuple[list[Any], str]] = []
            while (line := file.readline()).endswith(b"\n") and not self._ended.is_set():
                found = _indexed(line)
                if found is None:
                    self.bad_lines += 1
                else:
                    values, text = found
                    rows.append(([name, known.lines, known.read, len(line), *values], text))
                known.read += len(line)
                known.lines += 1
                if len(rows) >= _ROWS_AT_ONCE:
                    _insert(database, rows)
                    rows = []
                    self.progress = (total, sum(x.read for x in self._known.values()))
            _insert(database, rows)

    def _forget(self, name: str) -> None:
        del self._known[name]
        with self._open() as database:
            database.execute(
                "DELETE FROM texts WHERE id IN (SELECT id FROM samples WHERE file = ?)", [name]
            )
            database.execute("DELETE FROM samples WHERE file = ?", [name])

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=60)) as database, database:
            database.execute("PRAGMA synchronous = OFF")
            database.row_factory = sqlite3.Row
            yield database


def _insert(database: sqlite3.Connection, rows: Sequence[tuple[list[Any], str]]) -> None:
    marks = ", ".join("?" * len(_COLUMNS))
    for values, text in rows:
        added = database.execute(
            f"INSERT INTO samples ({', '.join(_COLUMNS)}) VALUES ({marks})", values
        )
        database.execute("INSERT INTO texts VALUES (?, ?)", [added.lastrowid, text])
    database.commit()


def _indexed(line: bytes) -> tuple[list[Any], str] | None:
    """The columns from "step" on and the searchable text of a line; None if it is not a sample."""
    try:
        row = read_head(line)
    except ValueError:
        return None
    completion, prompt = row.get("completion"), row.get("prompt")
    if not isinstance(completion, str) or not isinstance(prompt, str):
        return None
    answer, prediction = (_text(row.get(name)) for name in ("answer", "prediction"))
    values = [
        _whole(row.get("step")),
        _text(row.get("source")),
        _whole(row.get("prompt_id")),
        _whole(row.get("sample")),
        _flag(row.get("correct")),
        real(row.get("reward")),
        _whole(row.get("length")),
        _flag(row.get("truncated")),
        _text(row.get("stop_reason")),
        failure_kind(row),
        _excerpt(prompt),
        _excerpt(completion),
        _excerpt(answer),
        _excerpt(prediction),
    ]
    texts = (text[:SEARCHED_CHARS] for text in (prompt, completion, answer))
    return values, _folded("\n".join(texts))


def _excerpt(text: str) -> str:
    """The beginning of a text and its end, where the answer usually is, with invisible characters escaped."""
    if len(text) > _START_CHARS + _END_CHARS:
        text = f"{text[:_START_CHARS]} […] {text[-_END_CHARS:]}"
    return visible(text)


def _folded(text: str) -> str:
    return visible(text).casefold()


def _text(value: Any) -> str:
    return "" if value is None else visible(str(value)[:SEARCHED_CHARS])


def real(value: Any) -> float | None:
    """The value as a float; None unless it is a finite number."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) < 1e300 and math.isfinite(value) else None


def failure_kind(row: Mapping[str, Any]) -> str:
    """The kind of the grader's failure on a sample; "" if grading succeeded."""
    failure = row.get("failure")
    return _text(failure.get("kind"))[:_START_CHARS] if isinstance(failure, dict) else ""


def _whole(value: Any) -> int | None:
    # SQLite's integers have 64 bits.
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value if known else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _size(path: pathlib.Path) -> int:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0
