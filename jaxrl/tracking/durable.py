"""Writes files atomically: complete or not at all, also after a crash, a power cut or on a full disk.

`run_lock` lets one run at a time write to a folder. It is a kernel lock on an open file (flock), so it is
released however the process ends. The lock file stays and means nothing by itself. Readers take no lock.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxrl.errors import UserError
from jaxrl.files import is_bucket, open_regular
from jaxrl.mesh import hosts
from jaxrl.tracking.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
# Errors that are caused by the disk and not by the program.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


def ensure_writable(directory: str | os.PathLike[str]) -> None:
    """Creates `directory` and checks that a file can be written to it.

    It is cheap enough to call before anything compiles.

    Raises:
      UserError: if the folder cannot be created or is not writable.
    """
    if is_bucket(directory):
        raise UserError(
            f"{os.fspath(directory)} is in a bucket, and only a folder on a disk can be written; name one"
        )
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
    """Turns disk errors inside the block into UserErrors. Other OSErrors pass.

    Args:
      directory: folder to name if the error has no file name.

    Raises:
      UserError: instead of a disk error such as "No space left on device".
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise UserError(
            f"{error.filename or os.fspath(directory)} could not be written ({error.strerror}); what was "
            "saved before is still there: free space or repair the disk, and start the same command again"
        ) from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` to `path`. A crash at any moment leaves the old file or the new one.

    Raises:
      UserError: if `path` is a folder.
      OSError: if the disk does not accept the content; the old file is unchanged.
    """
    path = Path(path)
    # In the same folder, because only there a rename is atomic.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # Opening a pipe would wait for its other end.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb", buffering=0) as file:
            _write_all(file.fileno(), content)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except IsADirectoryError as error:
        if not temporary.is_dir():
            temporary.unlink()
        raise UserError(
            f"{path if path.is_dir() else temporary} is a folder, and a file has to be written there; remove "
            "it, or choose another output folder"
        ) from error
    except OSError as error:
        # A partial file is useless and would keep the disk full.
        temporary.unlink(missing_ok=True)
        raise _named(error, path) from error
    sync(path.parent)


class AppendedFile:
    """A file that is extended by complete records, which the end of this process does not tear."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path
        # Unbuffered: a buffer would try to write a failed record again when the file is closed.
        self._descriptor = open_written(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self, record: bytes, *, durable: bool = True) -> None:
        """Appends a record.

        Args:
          record: the record.
          durable: whether to wait until it is on disk; else `sync` does.

        Raises:
          OSError: if the disk does not accept the record; the file is unchanged.
        """
        # A full disk may take part of a record; it is cut off again.
        size = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, record)
            if durable:
                self.sync()
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise _named(error, self._path) from error

    def sync(self) -> None:
        """Waits until all records are on disk."""
        os.fsync(self._descriptor)

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Closes the file. Further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_written(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file of a run for writing; returns its descriptor. `flags` are as of `os.open`.

    Raises:
      UserError: if another kind of file is in its place, or it cannot be opened.
    """
    try:
        return open_regular(path, flags)
    except OSError as error:
        raise UserError(
            f"{os.fspath(path)} cannot be written ({error.strerror}); remove it, or choose another output "
            "folder"
        ) from error


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _named(error: OSError, path: str | os.PathLike[str]) -> OSError:
    # The error with the path of its file, which `os.write` leaves out.
    return OSError(error.errno, error.strerror, os.fspath(path))


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until the content of a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def run_lock(folder: Path, setting: str = "--config.name") -> Iterator[None]:
    """Holds the lock of a run folder inside the block. Collective: the first process holds it for all.

    Args:
      folder: the folder.
      setting: setting that chooses another one.

    Raises:
      UserError: if another run holds the lock (the message names its process), or the lock file cannot be
        opened.
    """
    held: list[IO[str]] = []

    def take() -> None:
        ensure_writable(folder)
        held.append(take_lock(RunFolder(folder).lock, setting))

    hosts.on_first(take)
    try:
        yield
    finally:
        for file in held:
            file.close()


def take_lock(path: Path, setting: str = "--config.name") -> IO[str]:
    """Takes the lock of a file in a run folder; returns the open file, which child processes do not inherit.

    Arguments and errors as in `run_lock`.
    """
    descriptor = open_written(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    folder, file = path.parent, os.fdopen(descriptor, "a+", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (
        BlockingIOError,
        PermissionError,
    ) as error:  # NFS reports a held lock as PermissionError
        file.seek(0)
        owner = " ".join(file.read(200).split())
        file.close()
        raise UserError(
            f"{folder} is in use by {owner or 'another process'}; wait for its end or stop it, or give this "
            f"run another {setting}"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        logger.warning(
            "the file system of %s has no locks (%s): nothing keeps a second run out of it",
            folder,
            error.strerror,
        )
    file.truncate(0)
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
    file.flush()
    return file
