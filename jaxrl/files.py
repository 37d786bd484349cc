"""Reads files of users and of other programs. Any fault of a file is a UserError that names it."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import IO, Any

from jaxrl.errors import UserError

_AGAIN = "copy the published file again"
_ENDS = 2**20


def cache_root() -> pathlib.Path:
    """The folder of everything that can be made again: $XDG_CACHE_HOME/jaxrl or ~/.cache/jaxrl."""
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxrl"
    )


def open_file(path: str | os.PathLike[str], *, absent: str) -> IO[bytes]:
    """Opens a file for reading.

    Args:
      path: path of the file.
      absent: remedy for the message if the file is missing or not readable.

    Raises:
      UserError: if the file does not exist or is not readable.
    """
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; {absent}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {absent}") from error


def read_bytes(path: str | os.PathLike[str], *, absent: str) -> bytes:
    """Reads a file. Arguments and errors as in `open_file`."""
    with open_file(path, absent=absent) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], *, absent: str) -> str:
    """Reads a text file, UTF-8. Arguments and errors as in `open_file`."""
    content = read_bytes(path, absent=absent)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); {_AGAIN}") from error


def read_json_object(path: str | os.PathLike[str], *, absent: str) -> dict[str, Any]:
    """Reads a JSON file whose value is an object. Arguments as in `open_file`.

    Raises:
      UserError: as `read_text`, or if the file is not valid JSON, is nested too deeply or is not an object.
    """
    text = read_text(path, absent=absent)
    try:
        value = json.loads(text)
    # The parser recurses, so a deeply nested file ends it without being malformed.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; {_AGAIN}")
    return value


def fingerprint(folder: pathlib.Path, *patterns: str) -> str:
    """A digest of some files of a folder: names, sizes, and the first and the last MiB of each.

    It finds a copy that was cut off and another training of the same model, in seconds for any size.

    Args:
      folder: the folder. One without files has a digest, too.
      patterns: patterns of their paths below it.
    """
    digest = hashlib.blake2b(digest_size=8)
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        with open_file(path, absent="copy it again") as file:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size} ".encode() + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read())
    return digest.hexdigest()
