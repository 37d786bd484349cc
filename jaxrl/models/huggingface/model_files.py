"""The files of a Hugging Face directory, and writing such a directory atomically."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
GENERATION_FILE = "generation_config.json"

# Files that are copied along with a model, besides weights and config.json. An explicit list, so that no
# program or pickle in a downloaded directory is passed on.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    GENERATION_FILE,
)


@contextlib.contextmanager
def new_directory(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary directory and renames it to `path` in the end, or removes it after an error.

    Raises:
      UserError: `path` exists, or cannot be created.
    """
    check_new(path)
    path = pathlib.Path(path).absolute()
    # Next to `path`, on the same file system: only there a rename is atomic.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be made ({error.strerror}: {error.filename}); choose another place"
        ) from error
    try:
        yield partial
        partial.rename(path)
    # Ctrl-C, too, leaves nothing behind.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_new(path: str | pathlib.Path) -> None:
    """Raises UserError if `path` exists. Commands that write only after long work call it first."""
    if pathlib.Path(path).exists():
        raise UserError(f"{path} exists and is not overwritten; remove it or choose another name")


def copy_companions(
    source: pathlib.Path, target: pathlib.Path, files: Sequence[str] = COMPANION_FILES
) -> None:
    """Copies those of `files` that exist in `source`; names may have a `*`."""
    for pattern in files:
        for file in filter(pathlib.Path.is_file, source.glob(pattern)):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object in the format of Hugging Face's files."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
