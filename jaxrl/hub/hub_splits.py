"""Finds the files of one split among the files of a data set's repository.

A repository tells its subsets and splits at the head of its card, or by the names of its files:

    main/train-00000-of-00001.parquet       subset "main", split "train"
    data/test.jsonl                         subset "data", split "test"
    questions.parquet                       subset "", split "train"
"""

from __future__ import annotations

import fnmatch
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl.hub.hub_names import HubName

DATA_FILES = (".parquet", ".jsonl", ".json", ".arrow")

# (subset, split) -> files
Splits = Mapping[tuple[str, str], Sequence[str]]

_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev|eval)(?:[-_./]|$)")
_SAME = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "test"}
# JSON files beside the data.
_METADATA = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
)


def declared_splits(info: Any) -> Splits:
    """Splits that the card of a repository declares; empty if it declares none.

    Args:
      info: `huggingface_hub.DatasetInfo`.
    """
    card = info.card_data.to_dict() if info.card_data is not None else {}
    names = _data_files([sibling.rfilename for sibling in info.siblings or ()])
    found: dict[tuple[str, str], list[str]] = {}
    for config in card.get("configs") or ():
        subset = str(config.get("config_name", "default"))
        for split, patterns in _patterns(config.get("data_files")):
            files = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
            if files:
                found.setdefault((subset, split), []).extend(files)
    return found


def inferred_splits(names: Sequence[str]) -> Splits:
    """Splits by the names of files, as in the example above."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in _data_files(names):
        path = pathlib.PurePosixPath(name)
        word = _SPLIT.search(path.name) or _SPLIT.search(path.parent.name)
        split = _SAME.get(word[1], word[1]) if word else "train"
        folders = path.parent.parts
        if folders and _SPLIT.fullmatch(folders[-1]):
            folders = folders[:-1]
        found.setdefault(("/".join(folders), split), []).append(name)
    return found


def choose_files(name: HubName, found: Splits, splits: Sequence[str]) -> list[str]:
    """Returns the files of the split that a name and a setting mean.

    Args:
      name: as the setting gives it.
      found: splits of the data set, not empty.
      splits: names of the split, best first, if `name` has none.

    Raises:
      UserError: there is no such subset or split, or the name must say which.
    """
    subsets = list(dict.fromkeys(subset for subset, _ in found))
    subset = name.subset or (subsets[0] if len(subsets) == 1 else "default")
    if subset not in subsets:
        problem = f"no subset {name.subset!r}" if name.subset else "several subsets"
        names = ", ".join(f"{name.repo}:{other}" for other in subsets if other)
        raise UserError(f"data set {name.repo} has {problem}; write one of {names or name.repo}")
    there = [split for other, split in found if other == subset]
    wanted = [name.split] if name.split else splits
    chosen = next((split for split in wanted if split in there), None)
    if chosen is None and len(there) == 1 and not name.split:
        chosen = there[0]
    if chosen is None:
        label = subset or "default"
        raise UserError(
            f"data set {name.repo} has no split {' or '.join(map(repr, wanted))}; write one of "
            f"{', '.join(f'{name.repo}:{label}:{s}' for s in there)}"
        )
    return list(found[subset, chosen])


def _data_files(names: Sequence[str]) -> list[str]:
    return sorted(
        name
        for name in names
        if name.endswith(DATA_FILES) and pathlib.PurePosixPath(name).name not in _METADATA
    )


def _patterns(data_files: Any) -> list[tuple[str, list[str]]]:
    """(split, patterns) of a `data_files` entry: a pattern, a list of them, or a list of splits."""
    if data_files is None:
        return []
    entries = [data_files] if isinstance(data_files, str | dict) else list(data_files)
    plain = [entry for entry in entries if isinstance(entry, str)]
    told = [("train", plain)] if plain else []
    for entry in entries:
        if isinstance(entry, dict):
            path = entry.get("path", ())
            told.append(
                (str(entry.get("split", "train")), [path] if isinstance(path, str) else list(path))
            )
    return told
