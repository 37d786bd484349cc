"""Reads and writes entries of the hardware table as JSON files, written by a user or by `jaxrl calibrate`.

    {"name": "mine", "device_kinds": ["NVIDIA L40S"], "arrangement": "hosts", "memory_gb": 48,
     "bfloat16_tflops": 362, "float32_tflops": 183, "memory_gbs": 864, "link_gbs": 32, "host_gbs": 50,
     "devices_per_host": 8}

The fields are those of `hardware.Accelerator`; fields with defaults may be omitted.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.mesh.hardware import Accelerator, accelerator

_FIELDS = {f.name: f for f in dataclasses.fields(Accelerator)}


def find_accelerator(name_or_path: str) -> Accelerator:
    """Finds an entry by its name in the table, or reads it from a JSON file.

    Args:
      name_or_path: name of an entry, or path that ends in .json.

    Raises:
      UserError: the name is unknown, or the file is not an entry.
    """
    if name_or_path.lower().endswith(".json"):
        return read_accelerator(name_or_path)
    return accelerator(name_or_path)


def read_accelerator(path: str | pathlib.Path) -> Accelerator:
    """Reads an entry from a file.

    Raises:
      UserError: the file does not exist, or a field is missing, unknown or out of range.
    """
    values = read_json_object(path, absent="write one, or calibrate the machine (docs/planner.md)")
    _check_names(path, values)
    try:
        return Accelerator(**{name: _tuples(value) for name, value in values.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write_accelerator(entry: Accelerator, path: str | pathlib.Path) -> None:
    """Writes an entry for `read_accelerator`; raises UserError if the file cannot be written."""
    text = json.dumps(dataclasses.asdict(entry), indent=2) + "\n"
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error


def _check_names(path: str | pathlib.Path, values: dict[str, Any]) -> None:
    unknown = [name for name in values if name not in _FIELDS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"{path}: {unknown[0]!r} is no field of an accelerator; {hint}"
            f"the fields are {', '.join(_FIELDS)}"
        )
    required = [n for n, f in _FIELDS.items() if f.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise UserError(
            f"{path}: {', '.join(missing)} of the accelerator "
            f"{'is' if len(missing) == 1 else 'are'} missing; an entry has at least {', '.join(required)}"
        )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
