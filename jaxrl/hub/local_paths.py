"""Turns what a setting names into a path on this machine: a path stays, the rest is fetched.

Qwen/Qwen2.5-7B      by `extensions/jaxrl_hub`
gs://bucket/qwen     by `extensions/jaxrl_buckets`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl import extensions
from jaxrl.files import is_bucket
from jaxrl.hub.hub_names import hub_name

# Names of splits to train on and to evaluate with, best first.
TRAINING = ("train",)
EVALUATION = ("test", "validation")


def open_hub() -> Any:
    """Returns the hub of `HF_ENDPOINT`, with the cache of `HF_HOME`."""
    return extensions.lookup("a name on the Hugging Face hub")()


def store_of(text: str) -> tuple[Any, Any] | None:
    """What fetches the files of a setting, `Hub` or its like, and their name there; None for a path.

    Raises:
      UserError: nothing here fetches from there.
    """
    if is_bucket(text):
        return extensions.lookup("gs:// and s3://")(), text
    name = hub_name(text)
    return None if name is None else (open_hub(), name)


def local_model(text: str, *, tokenizer_only: bool = False) -> str:
    """Returns the directory of a model; fetches it first if `text` is no path.

    Args:
      text: path, name on the hub, or address in a bucket.
      tokenizer_only: the tokenizer is enough, without weights.

    Raises:
      UserError: the model cannot be fetched.
    """
    if (found := store_of(text)) is None:
        return text
    store, name = found
    return str(store.model(name, tokenizer_only=tokenizer_only))


def local_rows(text: str, splits: Sequence[str]) -> str:
    """Returns a file or directory of rows; fetches it first if `text` is no path.

    Args:
      text: path, name of a function, name on the hub, or address in a bucket.
      splits: names of the split to take, best first, if `text` names none.

    Raises:
      UserError: the rows cannot be fetched.
    """
    if (found := store_of(text)) is None:
        return text
    store, name = found
    return str(store.rows(name, splits))
