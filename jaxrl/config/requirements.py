"""Collects all missing requirements of a run into one message, before anything is read or compiled.

A newcomer who starts a large recipe on a laptop learns at once which devices and files it needs and where to
put them, instead of one after the other.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.mesh.pools import Pool, takes_all

_WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"

T = TypeVar("T")


class Finder:
    """Looks for things one by one, and reports everything missing at the end.

    find = Finder()
    find.files(weights="models/a", tokenizer="", needs_chat_template=False)
    pairs = find("preference.path", lambda: read_preferences(path))
    find.check()    # raises, naming both, if neither is there
    """

    def __init__(self):
        self.missing: list[str] = []

    def __call__(self, setting: str, look: Callable[[], T]) -> T | None:
        """Returns the result of `look`; if it raises UserError, records the message and returns None.

        Args:
          setting: name of the setting that asks for the thing.
          look: function that finds the thing.
        """
        try:
            return look()
        except UserError as error:
            self.missing.append(f"{setting}: {error}")
            return None

    def devices(self, pools: Sequence[Pool], num_devices: int, device_kind: str) -> None:
        """Records if the pools do not fit the devices of this process, simulated ones included."""
        needed = sum(pool.num_devices for pool in pools)
        if needed == num_devices or (not takes_all(pools) and needed < num_devices):
            return
        names = " + ".join(pool.layout.name for pool in pools)
        self.missing.append(
            f"devices: layout {names} needs {needed}, found {num_devices} {device_kind}; run on as many, "
            "change mesh.train and mesh.generate to what is here, or, for a small model, set "
            f"mesh.simulated_devices={needed}"
        )

    def files(self, *, weights: str, tokenizer: str, needs_chat_template: bool) -> None:
        """Records missing files of the policy.

        Args:
          weights: Hugging Face directory of the initial weights; "" means random weights, without files.
          tokenizer: Hugging Face tokenizer directory; "" means a trained tokenizer, without files.
          needs_chat_template: whether prompts use the tokenizer's chat template.
        """
        if weights:
            self.missing += _missing_weights(pathlib.Path(weights))
        if tokenizer:
            self.missing += _missing_tokenizer(pathlib.Path(tokenizer), needs_chat_template)

    def check(self) -> None:
        """Raises one UserError that names everything missing; returns if nothing is."""
        if not self.missing:
            return
        count = len(self.missing)
        things = "one thing" if count == 1 else f"{count} things"
        listed = " ".join(f"({i}) {fault}." for i, fault in enumerate(self.missing, start=1))
        raise UserError(
            f"this run lacks {things}: {listed} Paths are relative to {pathlib.Path.cwd()}; "
            "--dry_run shows the plan without devices and weights"
        )


def _missing_weights(folder: pathlib.Path) -> list[str]:
    absent = [] if (folder / "config.json").is_file() else ["config.json"]
    index = _read_json(folder / _INDEX)
    if index is not None:
        shards = _shards(index)
        lost = [name for name in shards if not (folder / name).is_file()]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            absent.append(f"{lost[0]}{more} of the {len(shards)} files that {_INDEX} names")
    elif not any(folder.glob(_WEIGHTS)):
        absent.append(_WEIGHTS)
    if not absent:
        return []
    return [
        f"weights: {folder}/ has no {' and no '.join(absent)}; put the model's Hugging Face files there, or "
        "set weights to their folder"
    ]


def _missing_tokenizer(folder: pathlib.Path, needs_chat_template: bool) -> list[str]:
    absent = [
        name
        for name in ("tokenizer.json", "tokenizer_config.json")
        if not (folder / name).is_file()
    ]
    if needs_chat_template and not (folder / "chat_template.jinja").is_file():
        config = _read_json(folder / "tokenizer_config.json")
        if config is not None and not config.get("chat_template"):
            absent.append('chat_template.jinja, nor "chat_template" in tokenizer_config.json')
    if not absent:
        return []
    return [
        f"tokenizer: {folder}/ has no {' and no '.join(absent)}; put the model's Hugging Face files there, "
        "or set tokenizer.path to their folder"
    ]


def _shards(index: dict) -> list[str]:
    """The files that an index names; empty if the index is broken, because its reader reports that."""
    file_of = index.get("weight_map")
    if not isinstance(file_of, dict):
        return []
    return sorted({file for file in file_of.values() if isinstance(file, str)})


def _read_json(path: pathlib.Path) -> dict | None:
    """The JSON object in a file; None if the file does not exist, {} if it holds anything else."""
    if not path.is_file():
        return None
    try:
        return read_json_object(path, absent="")
    except UserError:  # the code that uses the file reports what is wrong with it
        return {}
