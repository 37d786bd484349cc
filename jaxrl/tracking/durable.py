"""Files that are there whole or not at all, also after a crash, a power cut, or on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxrl.errors import UserError

# Errors that the disk causes, and not the program.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


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


@contextlib.contextmanager
def disk_errors(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Around a run that writes into `directory`: a disk that takes nothing more is no fault of the program.

    Raises:
      UserError: in the place of an OSError of the disk, such as "No space left on device".
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        raise UserError(
            f"{error.filename or os.fspath(directory)} could not be written ({error.strerror}); what was "
            "saved before is still there: free space or repair the disk, and start the same command again"
        ) from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces `path` by `content`; a crash at any moment leaves the old file or the new one.

    Raises:
      UserError: `path` is a folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), content)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except IsADirectoryError as error:
        temporary.unlink()
        raise UserError(
            f"{path} is a folder, and a file has to be written there; remove it, or choose another output "
            "folder"
        ) from error
    except OSError as error:
        # A full disk shall not be filled by what is of no use.
        temporary.unlink(missing_ok=True)
        raise _named(error, path) from error
    sync(path.parent)


class AppendedFile:
    """A file that grows by whole records, each of which is on the disk when `append` returns."""

    def __init__(self, path: str | os.PathLike[str]):
        """Opens the file, or makes it."""
        self._path = path
        # Unbuffered: what a full disk did not take is not tried again when the file is closed.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def append(self, record: bytes) -> None:
        """Appends a record.

        Raises:
          OSError: the disk does not take it; the file is as before.
        """
        size = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, record)
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise _named(error, self._path) from error

    def close(self) -> None:
        """Closes the file, once or more often."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _named(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """The error with the file that it is about, which a write does not say."""
    return OSError(error.errno, error.strerror, os.fspath(path))


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's content, or the list of names that a directory is, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
