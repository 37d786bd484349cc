"""Turns what a setting names into a path on this machine: a path stays, a name on the hub is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl.hub.hub_names import hub_name

if TYPE_CHECKING:
    from jaxrl.hub.downloads import Hub

# Names of splits to train on and to evaluate with, best first.
TRAINING = ("train",)
EVALUATION = ("test", "validation")


def open_hub() -> Hub:
    """Returns the hub of `HF_ENDPOINT`, with the cache of `HF_HOME`."""
    # Imported here: most runs name paths, and need no `huggingface_hub`.
    from jaxrl.hub.downloads import Hub

    return Hub()


def local_model(text: str, *, tokenizer_only: bool = False) -> str:
    """Returns the directory of a model; fetches it first if `text` is a name on the hub.

    Args:
      text: path, or name on the hub.
      tokenizer_only: the tokenizer is enough, without weights.

    Raises:
      UserError: the model cannot be fetched.
    """
    name = hub_name(text)
    return text if name is None else str(open_hub().model(name, tokenizer_only=tokenizer_only))


def local_rows(text: str, splits: Sequence[str]) -> str:
    """Returns a file or directory of rows; fetches it first if `text` is a name on the hub.

    Args:
      text: path, name of a function, or name on the hub.
      splits: names of the split to take, best first, if `text` names none.

    Raises:
      UserError: the rows cannot be fetched.
    """
    name = hub_name(text)
    return text if name is None else str(open_hub().rows(name, splits))
