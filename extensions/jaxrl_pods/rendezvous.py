"""Rendezvous of the supervisors of a run: which hosts start together, if some do not come back.

    <run>/supervisor.3.json    {"state": "waiting", "round": 4, "address": "10.0.0.4", "members": [], ...}

Each supervisor keeps such a file new as long as it lives. The one with the lowest number of those that wait
decides once no host trains: all of them; or, after `hosts.fewer_after_s`, as many of the first as
`hosts.fewer` has settings for. The others read in its file that they belong to the round.

A host that comes back while the others train waits for the next round, or for the end of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable

from jaxrl.errors import EXIT_USER_ERROR
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.tracking.durable import write_atomically

_WAITING, _TRAINING, _ENDED = "waiting", "training", "ended"
_RENEW_S, _POLL_S = 5.0, 1.0
# A file system that hosts share may show another host's file some seconds late.
_STALE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a supervisor tells the others.

    Attributes:
      state: "waiting", "training" or "ended".
      round: number of the last round that it trained in or, from its start, saw.
      address: address of its host.
      members: numbers of the hosts of that round, ascending; the first one has process 0.
      status: exit status of a run that has ended.
    """

    state: str
    round: int
    address: str
    members: tuple[int, ...] = ()
    status: int = 0


class Rendezvous:
    """The place of this host among the supervisors of a run. A context manager."""

    def __init__(self, hosts: HostsConfig, folder: pathlib.Path):
        self._hosts, self._folder = hosts, folder
        self._path = self._file(hosts.process_id)
        # Not a round that began before this supervisor.
        old = [sign.round for sign in self._signs(stale=True).values()]
        self._own = Sign(_WAITING, max(old, default=0), _address_towards(hosts.coordinator))
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Rendezvous:
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._thread.join()
        # What has ended stays for those that wait for the end.
        if self._own.state != _ENDED:
            self._path.unlink(missing_ok=True)

    @property
    def num_hosts(self) -> int:
        """The number of hosts of its last round."""
        return len(self._own.members)

    def end(self, status: int) -> None:
        """Tells those that wait that the run has ended."""
        self._tell(state=_ENDED, status=status)

    def wait(self, stopping: Callable[[], bool]) -> list[str] | int | None:
        """Waits for the next round of this host.

        Returns:
          The arguments of the training command that differ from those of all hosts; the exit status if the
          others have ended the run without this host or have refused its round; None if `stopping`.
        """
        self._tell(state=_WAITING)
        present, since_s, left_out = [], 0.0, False
        while not stopping():
            signs, me = self._signs(), self._hosts.process_id
            rounds = [sign for sign in signs.values() if sign.state == _TRAINING]
            for sign in rounds:
                if me in sign.members and sign.round > self._own.round:
                    return self._start(sign.members, sign.round, signs)
            waiting = [i for i, sign in sorted(signs.items()) if sign.state == _WAITING]
            if waiting != present:
                present, since_s = waiting, time.monotonic()
                self._say(f"hosts {waiting} of {self._hosts.num_processes} are ready to start")
            if rounds and not left_out and not any(me in sign.members for sign in rounds):
                left_out = True
                self._say(
                    f"hosts {list(rounds[0].members)} train; this one waits for their next start"
                )
            for sign in (sign for sign in signs.values() if sign.state == _ENDED):
                same_round = (sign.round, sign.members) == (self._own.round, self._own.members)
                # A process that refuses its layout may end those of other hosts before they refuse it, too.
                if left_out or (same_round and sign.status == EXIT_USER_ERROR):
                    return sign.status
            if not rounds and waiting[0] == me:
                if len(waiting) == self._hosts.num_processes:
                    enough = len(waiting)
                elif time.monotonic() - since_s >= self._hosts.fewer_after_s:
                    fitting = [int(n) for n in self._hosts.fewer if int(n) <= len(waiting)]
                    enough = max(fitting, default=0)
                else:
                    enough = 0
                if enough:
                    number = 1 + max(sign.round for sign in signs.values())
                    return self._start(tuple(waiting[:enough]), number, signs)
            time.sleep(_POLL_S)
        return None

    def _start(self, members: tuple[int, ...], number: int, signs: dict[int, Sign]) -> list[str]:
        self._tell(state=_TRAINING, round=number, members=members)
        if len(members) == self._hosts.num_processes:
            return []
        self._say(f"hosts {list(members)} of {self._hosts.num_processes} go on without the others")
        port = self._hosts.coordinator.rpartition(":")[2]
        address = f"{signs[members[0]].address}:{port}" if len(members) > 1 else ""
        return [
            f"--config.hosts.coordinator={address}",
            f"--config.hosts.num_processes={len(members)}",
            f"--config.hosts.process_id={members.index(self._hosts.process_id)}",
            *fewer_settings(self._hosts, len(members)),
        ]

    # The files

    def _file(self, number: int) -> pathlib.Path:
        return self._folder / f"supervisor.{number}.json"

    def _signs(self, *, stale: bool = False) -> dict[int, Sign]:
        """Those of hosts that are there, this one among them, or all."""
        # By the clock of the file system: those of hosts may differ.
        now_s = 0.0 if stale else self._touched_s()
        found = {}
        for number in range(self._hosts.num_processes):
            with contextlib.suppress(FileNotFoundError), self._file(number).open() as file:
                if stale or now_s - os.fstat(file.fileno()).st_mtime < _STALE_S:
                    values = json.load(file)
                    found[number] = Sign(**values | {"members": tuple(values["members"])})
        return found

    def _touched_s(self) -> float:
        os.utime(self._path)
        return self._path.stat().st_mtime

    def _tell(self, **changes: object) -> None:
        self._own = dataclasses.replace(self._own, **changes)
        write_atomically(self._path, json.dumps(dataclasses.asdict(self._own)).encode())

    def _renew(self) -> None:
        while not self._left.wait(_RENEW_S):
            if self._own.state != _ENDED:
                # Where the file system does not answer this host counts as gone.
                with contextlib.suppress(OSError):
                    self._touched_s()

    def _say(self, text: str) -> None:
        print(f"supervisor: {text}", file=sys.stderr, flush=True)


def fewer_settings(hosts: HostsConfig, num_hosts: int) -> list[str]:
    """The arguments of `hosts.fewer` for a number of hosts."""
    return [f"--config.{setting}" for setting in shlex.split(hosts.fewer[str(num_hosts)])]


def _address_towards(coordinator: str) -> str:
    """The address of this host in the network of the coordinator, which need not answer."""
    host, _, port = coordinator.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, target = found[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing.
        probe.connect(target)
        address = probe.getsockname()[0]
    return f"[{address}]" if family == socket.AF_INET6 else address
