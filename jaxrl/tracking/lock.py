"""Locks a run folder, so that only one run writes to it.

It is a kernel lock on an open file (flock), so it is released however the process ends. The lock file stays
and has no meaning without the lock. Readers, such as an export, take no lock.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import IO

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.tracking.durable import ensure_writable
from jaxrl.tracking.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


@contextlib.contextmanager
def run_lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a run folder inside the block. Collective: the first process holds it for all.

    Raises:
      UserError: if another run holds the lock (the message names its process), or the lock file cannot be
        opened.
    """
    held: list[IO[str]] = []

    def take() -> None:
        ensure_writable(folder)
        held.append(_take(folder))

    hosts.on_first(take)
    try:
        yield
    finally:
        for file in held:
            file.close()


def _take(folder: pathlib.Path) -> IO[str]:
    """Takes the lock and returns its open file, which child processes do not inherit."""
    path = RunFolder(folder).lock
    # Opening a pipe would block.
    if path.exists() and not path.is_file():
        raise UserError(
            f"{path} is no file, and the lock of a run has to be one; remove it, or give this run another "
            "--config.name"
        )
    try:
        file = path.open("a+", errors="replace")
    except OSError as error:
        raise UserError(
            f"{path} cannot be opened ({error.strerror}); grant write permission, or give this run another "
            "--config.name"
        ) from error
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
            "run another --config.name"
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
