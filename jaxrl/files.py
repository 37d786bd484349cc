"""Reads files of users and of other programs. Any fault of a file is a UserError that names it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import stat
from typing import IO, Any

from jaxrl.errors import UserError

_AGAIN = "copy the published file again"
# A fingerprint reads so many parts of a file, and so many bytes of each.
_PARTS, _OF_PART = 32, 2**17


def cache_root() -> pathlib.Path:
    """The folder of everything that can be made again: $XDG_CACHE_HOME/jaxrl or ~/.cache/jaxrl."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    if is_bucket(root):
        raise UserError(f"XDG_CACHE_HOME={root} is in a bucket; name a folder on this host's disk")
    return pathlib.Path(root) / "jaxrl"


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address in a bucket; `pathlib` makes gs:/bucket of gs://bucket."""
    return os.fspath(path).startswith(("gs:/", "s3:/"))


def local_folder(path: str) -> pathlib.Path:
    """A folder, or that of the cache in which a run works whose folder is in a bucket."""
    if not is_bucket(path):
        return pathlib.Path(path)
    return cache_root() / "runs" / path.replace(":", "", 1)


def open_file(path: str | os.PathLike[str], *, absent: str, buffering: int = -1) -> IO[bytes]:
    """Opens a file for reading.

    Args:
      path: path of the file.
      absent: remedy for the message if the file is missing or not readable.
      buffering: as of `open`.

    Raises:
      UserError: if the file does not exist, is not readable or is no regular file.
    """
    try:
        return open(open_regular(path, os.O_RDONLY), "rb", buffering)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; {absent}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {absent}") from error


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file and returns its descriptor, which child processes do not inherit.

    Opening a pipe waits for its other end, and a device may have no end; both are refused without waiting.

    Args:
      path: path of the file.
      flags: as of `os.open`.

    Raises:
      OSError: as `os.open`, or the file is a folder, a pipe, a socket or a device.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


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
    """A digest of some files of a folder: names, sizes, and 32 parts of each, the first and the last too.

    Of files up to 4 MiB it reads every byte. It finds a copy that was cut off and another training of the
    same model, also where only some layers were trained, in seconds for any size.

    Args:
      folder: the folder. One without files has a digest, too.
      patterns: patterns of their paths below it.
    """
    digest = hashlib.blake2b(digest_size=8)
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        with open_file(path, absent="copy it again") as file:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size} ".encode())
            for n in range(_PARTS):
                file.seek(max(0, size - _OF_PART) * n // (_PARTS - 1))
                digest.update(file.read(_OF_PART))
    return digest.hexdigest()
