"""One run at a time writes to a folder of a bucket: numbered objects, each put only where none is.

    lock/00000004    {"owner": "process 7 on host-a, started ...", "state": "held", "beat": 12, ...}

The highest number holds the lock. A bucket has no lock of its own, and no clock that hosts share. So the
holder counts up in its object every 15 s, and whoever finds it waits for that: a count that changes is a run
at work. One that stays for 90 s is that of a host that was lost, and the next number is put. Only one process
can put it: stores take an object on the condition that there is none (`ifGenerationMatch=0`, `If-None-Match:
*`). A holder that finds a higher number has lost the lock, and writes no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
import uuid
from typing import Any

from jaxrl.errors import UserError

BEAT_S, STALE_S = 15.0, 90.0


class LockLost(Exception):
    """Another run holds the lock now; the message names it."""


class BucketLock:
    """The lock of a run's folder.

    Attributes:
      number: number of this holder.
      before: number of the holder before, 0 if there was none.

    Args:
      system: file system of the store, by fsspec.
      root: path of the run's folder there.
      url: the same as the user knows it.
      owner: words for this run.
      process: id of the process that runs it.
    """

    def __init__(self, system: Any, root: str, url: str, owner: str, process: int):
        self._system, self._root, self._url = system, f"{root}/lock", url
        self._id, self.number, self.before = uuid.uuid4().hex, 0, 0
        self._about: dict[str, Any] = {"id": self._id, "owner": owner, "machine": _machine()}
        self._about |= {"run": process, "mirror": os.getpid(), "state": "held", "beat": 0}
        # The thread of the heartbeat, and that which sends.
        self._one_at_a_time = threading.Lock()

    def take(self) -> None:
        """Waits until the lock is free, or until its holder shows that it is at work.

        Raises:
          UserError: another run is at work.
        """
        seen, since_s = None, time.monotonic()
        while True:
            number, holder = self.newest()
            is_stale = holder == seen and time.monotonic() - since_s > STALE_S
            if not number or is_stale or _has_ended(holder):
                if self._put_first(number + 1):
                    self.number, self.before = number + 1, number
                    return
                continue
            changed = seen is not None and holder != seen
            if holder["state"] == "held" and (changed or _is_here(holder, "run")):
                raise UserError(
                    f"{self._url} is in use by {holder['owner']}; wait for its end or stop it, or give this "
                    "run another --config.name"
                )
            if seen is None:
                print(
                    f"{self._url} was last held by {holder['owner']}; waiting up to {STALE_S:.0f} s "
                    "for a sign of it",
                    file=sys.stderr,
                    flush=True,
                )
            if holder != seen:
                seen, since_s = holder, time.monotonic()
            time.sleep(1)

    def beat(self, state: str = "held") -> None:
        """Shows that this run is at work. States: "held", "ending" while the rest is sent, "released".

        Raises:
          LockLost: another run has taken the lock.
        """
        with self._one_at_a_time:
            number, holder = self.newest()
            if holder.get("id") != self._id:
                raise LockLost(holder.get("owner", "somebody who has removed it"))
            self._about |= {"state": state, "beat": self._about["beat"] + 1}
            self._system.pipe_file(self._path(number), json.dumps(self._about).encode())

    def remove_older(self) -> None:
        """Removes the objects of earlier holders."""
        for path in self._paths():
            if path.rpartition("/")[2] < f"{self.number:08d}":
                self._system.rm_file(path)

    def _put_first(self, number: int) -> bool:
        path = self._path(number)
        with contextlib.suppress(FileExistsError):
            self._system.pipe_file(path, json.dumps(self._about).encode(), mode="create")
        # It may be ours although the answer was lost. And a store that knows no conditions keeps the last.
        return json.loads(self._system.cat_file(path))["id"] == self._id

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Number of the holder, and what it says of itself; 0 and nothing if there is none."""
        while True:
            paths = self._paths()
            if not paths:
                return 0, {}
            # It may have been removed since.
            with contextlib.suppress(FileNotFoundError):
                return int(paths[-1].rpartition("/")[2]), json.loads(
                    self._system.cat_file(paths[-1])
                )

    def _paths(self) -> list[str]:
        self._system.invalidate_cache()
        return sorted(path for path in self._system.find(self._root))

    def _path(self, number: int) -> str:
        return f"{self._root}/{number:08d}"


def _has_ended(holder: dict[str, Any]) -> bool:
    is_lost = holder["machine"] == _machine() != "" and not _is_here(holder, "mirror")
    return holder["state"] == "released" or is_lost


def _is_here(holder: dict[str, Any], process: str) -> bool:
    """Whether a process of a holder runs on this machine."""
    if not _machine() or holder["machine"] != _machine():
        return False
    try:
        # A process that has ended but was not waited for has the state Z.
        return ") Z" not in pathlib.Path(f"/proc/{holder[process]}/stat").read_text()
    except OSError:
        return False


def _machine() -> str:
    """Names what process ids belong to: this boot of the machine, and the container; "" if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
