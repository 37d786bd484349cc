"""Reading files that somebody else wrote: whatever is wrong with one is a UserError that names it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxrl.errors import UserError

_AGAIN = "copy the published file again"


def read_bytes(path: str | pathlib.Path, *, absent: str) -> bytes:
    """The content of a file.

    Args:
      path: of the file.
      absent: the remedy where there is none.

    Raises:
      UserError: it does not exist, is a directory, or cannot be read.
    """
    path = pathlib.Path(path)
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; {absent}") from error
    except NotADirectoryError as error:
        raise UserError(
            f"{path} does not exist, since {path.parent} is no directory; {absent}"
        ) from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a directory, and a file is expected; {absent}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {absent}") from error


def read_text(path: str | pathlib.Path, *, absent: str) -> str:
    """The text of a file; `absent` as for `read_bytes`.

    Raises:
      UserError: as `read_bytes`, or the file is not UTF-8.
    """
    try:
        return read_bytes(path, absent=absent).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); {_AGAIN}") from error


def read_json_object(path: str | pathlib.Path, *, absent: str) -> dict[str, Any]:
    """The JSON object in a file; `absent` as for `read_bytes`.

    Raises:
      UserError: as `read_text`, or the file is no JSON, nested too deeply to be read, or no object.
    """
    text = read_text(path, absent=absent)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); {_AGAIN}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply to be read; {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; {_AGAIN}")
    return value
