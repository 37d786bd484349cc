"""`jaxrl train --supervise`: starts the training process of a host, and starts it again when the run is lost.

    supervisor of each host  --->  jaxrl train ...   status 0        ends
          ^                                          75, a signal    starts again, from the newest checkpoint
          +------------------------------------------+

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
from collections.abc import Sequence
from typing import Any

from jaxrl.commands.rendezvous import Rendezvous, fewer_settings
from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.tracking.durable import ensure_writable, take_lock
from jaxrl.trainer.algorithm import pools_of

# Starts in a row without a new checkpoint after which it gives up.
_MOST_FAILURES = 10
# Pause before the n-th of them, times n: the others need time to notice a loss.
_PAUSE_S = 5.0
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
        before, after = (sum(p.num_devices for p in pools_of(c)) for c in (config, fewer))
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
        failures, saved, have_run = 0, _saved(folder), set()
        while True:
            more = meeting.wait(lambda: child.stopping) if meeting else []
            if more is None:
                return EXIT_TRY_AGAIN
            if isinstance(more, int):
                return more
            status = child.run([*command, *more])
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
            if child.stopping:
                return EXIT_TRY_AGAIN


def _saved(folder: pathlib.Path) -> set[pathlib.Path]:
    """Manifests of the checkpoints of all stages."""
    return set(folder.glob("*/checkpoints.seals/*.json"))


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

    def wait(self, seconds: float) -> None:
        """Sleeps, or less if a signal arrives."""
        until_s = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until_s:
            time.sleep(0.2)

    def _pass_on(self, number: int, frame: object) -> None:
        self.stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
