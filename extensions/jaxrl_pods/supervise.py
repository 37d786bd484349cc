"""`jaxrl train --supervise`: starts the training process of a host, and starts it again when the run is lost.

    supervisor of each host  --->  jaxrl train ...   status 0        ends
          ^                                          75, a signal    starts again, from the newest checkpoint
          +------------------------------------------+

A process that starts again while another one still runs without having noticed the loss makes JAX abort the
other one, with its stack and no reason. So a supervisor first waits until the others have ended.

Start it on every host in place of `jaxrl train`. A host that is gone for good is missed: the others try until
they have failed too often, or go on with the settings of `hosts.fewer`. It asks JAX for no device, so that it
takes none.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError
from jaxrl.mesh.hosts import AUTO, PATHWAYS, HostsConfig
from jaxrl.tracking.durable import ensure_writable, take_lock, write_atomically
from jaxrl.trainer.resolved import resolve
from jaxrl_pods.rendezvous import Rendezvous, fewer_settings

# Starts in a row without a new checkpoint after which it gives up.
_MOST_FAILURES = 10
# Pause before the n-th of them, times n.
_PAUSE_S = 5.0
# Time that the others need to end, beyond that to notice a loss and this pause.
_ENDING_S = 10.0
_BEGUN, _ENDED = b"begun", b"ended"
# Becomes the command of its arguments, which gets SIGTERM when its parent ends, however that ends.
_STOP_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG, SIGTERM = 1, 15
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Runs `jaxrl train` with these arguments until it ends for another reason than a loss."""
    command = [sys.executable, "-m", "jaxrl", "train", *arguments]
    for number in config.hosts.fewer:
        if not number.isdecimal() or not 0 < int(number) < config.hosts.num_processes:
            raise UserError(
                f"hosts.fewer has settings for {number!r} hosts; give numbers below hosts.num_processes, "
                f"{config.hosts.num_processes}, which JAX must not find itself"
            )
        _check_fewer(config, int(number), arguments)
    return keep_running(command, config.run_folder.path, hosts=config.hosts)


def _check_fewer(config: Config, num_hosts: int, arguments: Sequence[str]) -> None:
    """Raises UserError if the run cannot go on with so many hosts: long before one is lost."""

    def check(fewer: Config) -> None:
        """Checks the layout."""
        layouts = (config.mesh, fewer.mesh)
        before, after = (sum(p.num_devices for p in resolve(c).pools) for c in (config, fewer))
        if before * num_hosts != after * config.hosts.num_processes and not any(
            mesh.searched for mesh in layouts
        ):
            raise UserError(
                f"its layout has {after} devices, and {num_hosts} of {config.hosts.num_processes} hosts have "
                f"{before * num_hosts / config.hosts.num_processes:g} of {before}; change the layout"
            )

    more = fewer_settings(config.hosts, num_hosts)
    try:
        command_line.run(check, Config, argv=["", *arguments, *more])
    except UserError as error:
        raise UserError(f"hosts.fewer.{num_hosts}: {error}") from error


def keep_running(command: Sequence[str], folder: pathlib.Path, *, hosts: HostsConfig) -> int:
    """Runs a command until it ends for another reason than a loss; returns its exit status.

    SIGTERM and SIGINT are passed on, and it is not started again after them.

    Args:
      command: the training command of this host.
      folder: folder of the run.
      hosts: this host and the others.

    Raises:
      UserError: the folder cannot be written to, another supervisor has this process of the run, or the
        command failed too often.
    """
    ensure_writable(folder)
    # Of numbered processes without a host: one that comes back does not join where another has taken its
    # place.
    lock = folder / f"supervisor.{hosts.place}.lock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(take_lock(lock))
        child = stack.enter_context(_Child())
        meeting = stack.enter_context(Rendezvous(hosts, folder)) if hosts.fewer else None
        others = _OthersTraining(hosts, folder)
        failures, saved, have_run = 0, _saved(folder), set()
        if not meeting and others.predecessor_was_lost():
            others.wait(child)
        while True:
            more = meeting.wait(lambda: child.stopping) if meeting else []
            if more is None:
                return EXIT_TRY_AGAIN
            if isinstance(more, int):
                return more
            if child.stopping:
                return EXIT_TRY_AGAIN
            others.tell_begun()
            status = child.run([*command, *more])
            others.tell_ended()
            num_hosts = meeting.num_hosts if meeting else 0
            # A started process that does not find the others, who have not noticed a loss yet, has status 2.
            # So has one that refuses its layout, which then has not run before.
            lost = status < 0 or status == EXIT_TRY_AGAIN
            lost |= status == EXIT_USER_ERROR and num_hosts in have_run
            if child.stopping or not lost:
                if meeting and not child.stopping:
                    meeting.end(status)
                # A signal as a shell tells it.
                return 128 - status if status < 0 else status
            before, saved = saved, _saved(folder)
            failures = 1 if saved != before else failures + 1
            have_run.add(num_hosts)
            if failures > _MOST_FAILURES:
                raise UserError(
                    f"the training process ended {_MOST_FAILURES} times without a new checkpoint, at last "
                    f"with status {status}; look at its output above, then start it again"
                )
            print(
                f"supervisor: ended with status {status}; start {failures} of {_MOST_FAILURES} without a "
                f"new checkpoint follows in {_PAUSE_S * failures:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            child.wait(_PAUSE_S * failures)
            # A rendezvous waits for them itself.
            if not meeting:
                others.wait(child)
            if child.stopping:
                return EXIT_TRY_AGAIN


def _saved(folder: pathlib.Path) -> set[pathlib.Path]:
    """Manifests of the checkpoints of all stages."""
    return set(folder.glob("*/checkpoints.manifests/*.json"))


class _OthersTraining:
    """Whether the training processes of the other hosts run, from a file that each supervisor writes.

    <run>/supervisor.3.training    "begun" or "ended", and by its time of change since when
    """

    def __init__(self, hosts: HostsConfig, folder: pathlib.Path):
        self._hosts, self._folder = hosts, folder
        self._path = self._file(hosts.place)

    def predecessor_was_lost(self) -> bool:
        """Whether an earlier supervisor of this place ended without its training; notes the end of that."""
        was_lost = self._path.exists() and self._path.read_bytes() == _BEGUN
        self.tell_ended()
        return was_lost

    def tell_begun(self) -> None:
        write_atomically(self._path, _BEGUN)

    def tell_ended(self) -> None:
        write_atomically(self._path, _ENDED)

    def wait(self, child: _Child) -> None:
        """Waits until the training processes that ran beside the lost one have ended, or must have."""
        if self._hosts.coordinator in ("", PATHWAYS) or self._have_ended():
            return
        most_s = self._hosts.lost_after_s + _ENDING_S
        print(
            f"supervisor: waits until the other processes have ended, for {most_s:.0f} s at most",
            file=sys.stderr,
            flush=True,
        )
        child.wait(most_s, self._have_ended)

    def _have_ended(self) -> bool:
        """Whether all others say so. One that began after the end of this host's process has met no loss."""
        if self._hosts.coordinator == AUTO:
            # JAX knows how many there are: those that have a file.
            others = list(self._folder.glob("supervisor.*.training"))
        else:
            others = [self._file(str(number)) for number in range(self._hosts.num_processes)]
        others = [path for path in others if path != self._path]
        # By the clock of the file system: those of hosts may differ.
        ended_s = self._path.stat().st_mtime_ns
        try:
            return bool(others) and not any(
                path.read_bytes() == _BEGUN and path.stat().st_mtime_ns <= ended_s
                for path in others
            )
        except FileNotFoundError:
            # Hosts that do not share the folder do not know of each other.
            return False

    def _file(self, place: str) -> pathlib.Path:
        return self._folder / f"supervisor.{place}.training"


class _Child:
    """The training process, and the signals that it gets. A context manager.

    Attributes:
      stopping: whether a signal to stop has arrived.
    """

    def __init__(self):
        self.stopping = False
        self._process: subprocess.Popen | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> _Child:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Runs a command; returns its exit status, or minus the signal that ended it."""
        # A session of its own: Ctrl-C reaches it once, by the supervisor.
        command = [sys.executable, "-c", _STOP_WITH_PARENT, *command]
        self._process = subprocess.Popen(command, start_new_session=True)
        if self.stopping:
            self._process.terminate()
        return self._process.wait()

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Sleeps; less if a signal arrives, or `until` returns True."""
        until_s = time.monotonic() + seconds
        while not (self.stopping or time.monotonic() >= until_s or until()):
            time.sleep(0.2)

    def _pass_on(self, number: int, frame: object) -> None:
        self.stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
