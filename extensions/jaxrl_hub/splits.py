"""Subsets and splits of a data set on the hub, by the head of its card, or by the names of its files:

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
_METADATA = re.compile(r"(dataset_infos?|dataset_dict|state|config)\.json")


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
        data_files = config.get("data_files") or ()
        # A pattern, a list of them, or a list of splits with one or more patterns each.
        entries = [data_files] if isinstance(data_files, str | dict) else list(data_files)
        plain = [entry for entry in entries if isinstance(entry, str)]
        told = [("train", plain)] if plain else []
        for entry in (entry for entry in entries if isinstance(entry, dict)):
            path = entry.get("path", ())
            patterns = [path] if isinstance(path, str) else list(path)
            told.append((str(entry.get("split", "train")), patterns))
        for split, patterns in told:
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
        # A folder named after a split is no subset.
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
    # "default" is how the hub calls the subset of a card that names none.
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
        if name.endswith(DATA_FILES) and not _METADATA.fullmatch(pathlib.PurePosixPath(name).name)
    )
