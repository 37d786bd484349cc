"""Files that are there whole or not at all, also after a crash or a power cut."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from jaxrl.errors import UserError


def ensure_writable(directory: str | os.PathLike[str]) -> None:
    """Creates `directory` and proves that a file can be written into it.

    Cheap, so that a run can ask before it compiles anything.

    Raises:
      UserError: the folder cannot be created or written.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder {os.fspath(directory)!r} ({error.strerror}); "
            "choose another folder, or free space and grant write permission on this one"
        ) from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces `path` by `content`; a crash at any moment leaves the old file or the new one.

    Raises:
      UserError: `path` is a folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(temporary, path)
    except IsADirectoryError as error:
        temporary.unlink()
        raise UserError(
            f"{path} is a folder, and a file has to be written there; remove it, or choose another output "
            "folder"
        ) from error
    sync(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's content, or the list of names that a directory is, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
