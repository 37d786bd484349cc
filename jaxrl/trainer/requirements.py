"""Everything a run needs and does not find, in one message, before anything is read or compiled.

A newcomer who starts a big recipe on a laptop should learn in one go which devices and files it wants
and where to put them, not one by one.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.mesh.pools import Pool, takes_all

_WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Something that the run will ask for only later.

    Attributes:
      setting: that names it.
      look: finds it, or raises UserError.
    """

    setting: str
    look: Callable[[], object]


def require(
    *,
    pools: Sequence[Pool],
    num_devices: int,
    device_kind: str,
    weights: str,
    tokenizer: str,
    needs_chat_template: bool,
    lookups: Sequence[Lookup] = (),
) -> None:
    """Raises one UserError that lists all that `missing` finds; returns if that is nothing."""
    faults = missing(
        pools=pools,
        num_devices=num_devices,
        device_kind=device_kind,
        weights=weights,
        tokenizer=tokenizer,
        needs_chat_template=needs_chat_template,
        lookups=lookups,
    )
    if faults:
        things = "one thing" if len(faults) == 1 else f"{len(faults)} things"
        listed = " ".join(f"({i}) {fault}." for i, fault in enumerate(faults, start=1))
        raise UserError(
            f"this run lacks {things}: {listed} Paths are relative to {pathlib.Path.cwd()}; "
            "--dry_run shows the plan without any of this"
        )


def missing(
    *,
    pools: Sequence[Pool],
    num_devices: int,
    device_kind: str,
    weights: str,
    tokenizer: str,
    needs_chat_template: bool,
    lookups: Sequence[Lookup] = (),
) -> list[str]:
    """What a run lacks, a phrase each with its remedy, in the order in which a user would fetch it.

    Args:
      pools: of devices, one or more.
      num_devices, device_kind: what this process sees, simulated ones included.
      weights: Hugging Face directory to start from; "" starts from random weights and needs none.
      tokenizer: Hugging Face tokenizer directory; "" trains one and needs none.
      needs_chat_template: prompts go through the tokenizer's chat template.
      lookups: everything else, files of problems first, whoever looks it up.
    """
    return [
        *_missing_devices(pools, num_devices, device_kind),
        *(_missing_weights(pathlib.Path(weights)) if weights else ()),
        *(_missing_tokenizer(pathlib.Path(tokenizer), needs_chat_template) if tokenizer else ()),
        *(fault for lookup in lookups for fault in _not_found(lookup)),
    ]


def _missing_devices(pools: Sequence[Pool], num_devices: int, device_kind: str) -> list[str]:
    needed = sum(pool.num_devices for pool in pools)
    if needed == num_devices or (not takes_all(pools) and needed < num_devices):
        return []
    names = " + ".join(pool.layout.name for pool in pools)
    return [
        f"devices: layout {names} needs {needed}, found {num_devices} {device_kind}; run on as many, change "
        "mesh.train and mesh.generate to what is here, or, for a small model, set "
        f"mesh.simulated_devices={needed}"
    ]


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


def _not_found(lookup: Lookup) -> list[str]:
    try:
        lookup.look()
    except UserError as error:
        return [f"{lookup.setting}: {error}"]
    return []


def _shards(index: dict) -> list[str]:
    """The files that an index names; none if it is broken, which its reader will say."""
    file_of = index.get("weight_map")
    if not isinstance(file_of, dict):
        return []
    return sorted({file for file in file_of.values() if isinstance(file, str)})


def _read_json(path: pathlib.Path) -> dict | None:
    """The object in a file; None if there is no such file, {} if it holds anything else."""
    if not path.is_file():
        return None
    try:
        return read_json_object(path, absent="")
    except UserError:  # whoever reads the file for good says what is wrong with it
        return {}
