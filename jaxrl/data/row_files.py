"""Opens files of rows, read by index, in any of these formats:

    .jsonl .json          JSON, an object a line or one list of objects
    .parquet              Parquet
    .arrow .feather       Arrow, streams and files
    folder with state.json    the Arrow files that `datasets.save_to_disk` writes; read without that package
    .array_record         ArrayRecord, a JSON object a record
    any other folder      all files in it, of one of these formats, sorted by name

The first bytes of a file tell its format, rather than its name. A file that is broken as a whole is a
UserError. A broken row is a BadRow, and its place is known ("train.jsonl:17", "train.parquet row 3").

Not supported: compressed JSONL, TFRecord, and ArrayRecord of anything but JSON.
"""

from __future__ import annotations

import codecs
import itertools
import os
import pathlib
from collections.abc import Hashable, Iterator, Sequence
from typing import SupportsIndex

from jaxrl.data.arrow_rows import open_arrow, open_parquet
from jaxrl.data.json_rows import ArrayRecords, JsonLines, JsonList
from jaxrl.data.rows import COPY_AGAIN, WANTED, Row, RowFile, locate
from jaxrl.errors import UserError
from jaxrl.files import open_file, read_json_object

_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".feather", ".array_record", ".arrayrecord")
_LFS = b"version https://git-lfs"


def open_rows(path: str | pathlib.Path) -> RowFile:
    """Opens a file or a folder of rows.

    Raises:
      UserError: It does not exist, is empty, or is broken.
    """
    path = pathlib.Path(path)
    rows = _open_folder(path) if os.path.isdir(path) else _open_file(path)
    if not len(rows):
        raise UserError(
            f"{path} is empty; put one JSON object a line there, such as "
            '{"problem": ..., "answer": ...}'
        )
    return rows


class Joined(RowFile):
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[RowFile]):
        self._files = files
        self._starts = [0, *itertools.accumulate(len(file) for file in files)]
        self.kind = f"{files[0].kind}, {len(files)} files" if len(files) > 1 else files[0].kind

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        file, row = locate(self._starts, range(len(self))[index])
        return self._files[file][row]

    def keys(self, fields: Sequence[str]) -> Iterator[Hashable] | None:
        """The keys of its files, if all of them have keys."""
        keys = [file.keys(fields) for file in self._files]
        known = [of_file for of_file in keys if of_file is not None]
        return itertools.chain.from_iterable(known) if len(known) == len(keys) else None

    def place(self, index: int) -> str:
        """The place in the file that has the row."""
        file, row = locate(self._starts, index)
        return self._files[file].place(row)


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
    """Opens a data set of `datasets.save_to_disk`: Arrow streams, in the order that state.json names them."""
    state = read_json_object(folder / "state.json", absent="")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{folder}/state.json names no data files; {COPY_AGAIN}")
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder} holds a selection of rows by index; call flatten_indices() before save_to_disk"
        )
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(name, str) and pathlib.Path(name).name == name for name in names):
        raise UserError(f"{folder}/state.json names files outside its folder; {COPY_AGAIN}")
    missing = [name for name in names if not os.path.exists(folder / str(name))]
    if missing:
        raise UserError(f"{folder} has no {missing[0]}, which its state.json names; {COPY_AGAIN}")
    return Joined([open_arrow(folder / str(name)) for name in names])


def _open_file(path: pathlib.Path) -> RowFile:
    with open_file(path, absent=WANTED) as file:
        start = file.read(64)
    if start.startswith(_LFS):
        raise UserError(
            f"{path} is a pointer of Git LFS and not the file itself; run git lfs pull where it lies"
        )
    if start.startswith(b"\x1f\x8b"):
        raise UserError(f"{path} is compressed; unpack it first: gunzip {path}")
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return open_parquet(path)
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or path.suffix in (".arrow", ".feather"):
        return open_arrow(path)
    if path.suffix in (".array_record", ".arrayrecord"):
        return ArrayRecords(path)
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    # A file that begins with a list may also be JSONL with a wrong first line; the name decides.
    if text.startswith(b"[") and path.suffix == ".json":
        return JsonList(path)
    return JsonLines(path)
