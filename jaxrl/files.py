"""Reading files that somebody else wrote: whatever is wrong with one is a UserError that names it.

Every such file is opened by `open_file`, or checked by `check_file` where a library opens it: a pipe would
be waited for and a device such as /dev/zero read until memory ends.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from typing import IO, Any

from jaxrl.errors import UserError

MAX_BYTES = 1 << 24
"""Of a file that is read whole, unless its reader says otherwise; published config files have kilobytes."""

# Python takes up to 70 bytes for a value of two, such as "[],": twice the largest published tokenizer.
_MAX_JSON_VALUES = 4_000_000
_SHOWN_CHARS = 80
_AGAIN = "copy the published file again"


def cache_root() -> pathlib.Path:
    """The folder of everything that can be made again: $XDG_CACHE_HOME/jaxrl or ~/.cache/jaxrl."""
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxrl"
    )


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages show it: without control characters, and cut where it is long."""
    text = os.fspath(path)
    text = text if text.isprintable() else ascii(text)[1:-1]
    # Paths that exist are shown whole, since their end is what tells them apart.
    return text if len(text) <= 512 else f"{text[:_SHOWN_CHARS]}... ({len(text):,} characters)"


def check_file(path: str | os.PathLike[str], *, absent: str) -> None:
    """Raises UserError unless `path` is a file that can be read.

    Args:
      path: of the file.
      absent: the remedy where there is none.
    """
    open_file(path, absent=absent).close()


def open_file(path: str | os.PathLike[str], *, absent: str) -> IO[bytes]:
    """A file, open for reading.

    Args:
      path: of the file.
      absent: the remedy where there is none.

    Raises:
      UserError: it does not exist, cannot be read, or is a directory, a pipe, a socket or a device.
    """
    shown = shown_path(path)
    try:
        # A look before opening, since opening a device may do something; and without waiting, since a pipe
        # may have taken the file's place in between.
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
    except ValueError as error:  # a NUL byte
        raise UserError(f"{shown} is no path ({error}); {absent}") from error


def read_bytes(
    path: str | os.PathLike[str], *, absent: str, max_bytes: int | None = MAX_BYTES
) -> bytes:
    """The content of a file.

    Args:
      path: of the file.
      absent: the remedy where there is none.
      max_bytes: the most that is read; None reads any file whole.

    Raises:
      UserError: as `open_file`, or the file is larger.
    """
    with open_file(path, absent=absent) as file:
        try:
            # As much as is asked for is allocated first, so that it is no more than there is.
            stated = os.fstat(file.fileno()).st_size
            content = file.read(1 + (stated if max_bytes is None else min(stated, max_bytes)))
            if len(content) > stated:  # it grows, or is one of /proc, which are stated with 0
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
    """The text of a file; arguments as of `read_bytes`.

    Raises:
      UserError: as `read_bytes`, or the file is not UTF-8.
    """
    content = read_bytes(path, absent=absent, max_bytes=max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); {_AGAIN}") from error


def read_json_object(
    path: str | os.PathLike[str], *, absent: str, max_bytes: int | None = MAX_BYTES
) -> dict[str, Any]:
    """The JSON object in a file; arguments as of `read_bytes`.

    Raises:
      UserError: as `read_text`, or the file is no JSON, nested too deeply to be read, or no object.
    """
    return json_object(read_bytes(path, absent=absent, max_bytes=max_bytes), path)


def json_object(content: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in the content of a file; the path is for messages.

    Raises:
      UserError: as `read_json_object`.
    """
    # A value follows one of these, so that there are no more values; in texts they count too.
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
