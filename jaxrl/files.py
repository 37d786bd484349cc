"""Reads files of users and of other programs. Any fault of a file is a UserError that names it.

All such files are opened by `open_file`; a file that a library opens is checked by `check_file` first.
Otherwise a pipe would block, and a device such as /dev/zero would fill the memory.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from typing import IO, Any

from jaxrl.errors import UserError

MAX_BYTES = 1 << 24
"""Default limit of the size of a file that is read whole. Published config files have kilobytes."""

# Twice as many as in the largest published tokenizer. Python needs up to 70 bytes for a value of 3 bytes,
# such as "[],".
_MAX_JSON_VALUES = 4_000_000
_SHOWN_CHARS = 80
_AGAIN = "copy the published file again"


def cache_root() -> pathlib.Path:
    """The folder of everything that can be made again: $XDG_CACHE_HOME/jaxrl or ~/.cache/jaxrl."""
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxrl"
    )


def shown_path(path: str | os.PathLike[str]) -> str:
    """Formats a path for messages, without control characters; a very long path is cut."""
    text = os.fspath(path)
    text = text if text.isprintable() else ascii(text)[1:-1]
    # Cut only beyond the usual lengths: the end of a path is its most telling part.
    return text if len(text) <= 512 else f"{text[:_SHOWN_CHARS]}... ({len(text):,} characters)"


def check_file(path: str | os.PathLike[str], *, absent: str) -> None:
    """Checks that `path` is a readable file.

    Args:
      path: path of the file.
      absent: remedy for the message if the file is missing or not readable.

    Raises:
      UserError: as `open_file`.
    """
    open_file(path, absent=absent).close()


def open_file(path: str | os.PathLike[str], *, absent: str) -> IO[bytes]:
    """Opens a file for reading.

    Args:
      path: path of the file.
      absent: remedy for the message if the file is missing or not readable.

    Raises:
      UserError: if the file does not exist, is not readable, or is a directory, a pipe, a socket or a device.
    """
    shown = shown_path(path)
    try:
        # Check before opening, because opening a device may have an effect. Open without blocking, because
        # a pipe may have replaced the file after the check.
        _check_kind(os.stat(path).st_mode, shown, absent)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_kind(os.fstat(descriptor).st_mode, shown, absent)
        except UserError:
            os.close(descriptor)
            raise
        return open(descriptor, "rb")
    except FileNotFoundError as error:
        raise UserError(f"{shown} does not exist; {absent}") from error
    except NotADirectoryError as error:
        parent = shown_path(pathlib.Path(path).parent)
        raise UserError(
            f"{shown} does not exist, since {parent} is no directory; {absent}"
        ) from error
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror}); {absent}") from error
    except UserError:
        raise
    except ValueError as error:  # the path contains a NUL byte
        raise UserError(f"{shown} is no path ({error}); {absent}") from error


def read_bytes(
    path: str | os.PathLike[str], *, absent: str, max_bytes: int | None = MAX_BYTES
) -> bytes:
    """Reads a file.

    Args:
      path: path of the file.
      absent: remedy for the message if the file is missing or not readable.
      max_bytes: largest allowed size; None for no limit.

    Raises:
      UserError: as `open_file`, or if the file is larger.
    """
    with open_file(path, absent=absent) as file:
        try:
            # `read` allocates its argument first, so ask for no more than the file's size.
            stated = os.fstat(file.fileno()).st_size
            content = file.read(1 + (stated if max_bytes is None else min(stated, max_bytes)))
            if len(content) > stated:  # the file grows, or is in /proc, where sizes are 0
                content += file.read(
                    -1 if max_bytes is None else max(0, max_bytes + 1 - len(content))
                )
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {absent}") from error
    if max_bytes is not None and len(content) > max_bytes:
        raise UserError(f"{path} has more than the {max_bytes:,} bytes that are read; {_AGAIN}")
    return content


def read_text(
    path: str | os.PathLike[str], *, absent: str, max_bytes: int | None = MAX_BYTES
) -> str:
    """Reads a text file. Arguments as in `read_bytes`.

    Raises:
      UserError: as `read_bytes`, or if the file is not UTF-8.
    """
    content = read_bytes(path, absent=absent, max_bytes=max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); {_AGAIN}") from error


def read_json_object(
    path: str | os.PathLike[str], *, absent: str, max_bytes: int | None = MAX_BYTES
) -> dict[str, Any]:
    """Reads a JSON file whose value is an object. Arguments as in `read_bytes`.

    Raises:
      UserError: as `read_text`, or if the file is not valid JSON, is nested too deeply or is not an object.
    """
    return json_object(read_bytes(path, absent=absent, max_bytes=max_bytes), path)


def json_object(content: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parses the content of a JSON file whose value is an object.

    Args:
      content: content of the file.
      path: path for messages.

    Raises:
      UserError: as `read_json_object`.
    """
    # Every value but the first follows one of these characters, so this is an upper bound of their number.
    # Characters inside strings count too.
    if sum(map(content.count, (b"[", b"{", b","))) > _MAX_JSON_VALUES:
        raise UserError(f"{path} has more than {_MAX_JSON_VALUES:,} JSON values; {_AGAIN}")
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); {_AGAIN}") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); {_AGAIN}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply to be read; {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; {_AGAIN}")
    return value


def _check_kind(mode: int, shown: str, absent: str) -> None:
    if stat.S_ISDIR(mode):
        raise UserError(f"{shown} is a directory, and a file is expected; {absent}")
    if not stat.S_ISREG(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise UserError(f"{shown} is a {kind}, and a file is expected; {absent}")
