"""What a process says and does when another process of its run is lost, or when it is lost itself.

    every process ----- sign of life: beat, phase, how it ended -----> key-value store of process 0
          ^                                                                      |
          +---- a beat that stands still, or an end with an error ---------------+

Without this a run of several processes ends when JAX notices: a minute and more after a host was lost, or at
once where process 0 was, with SIGABRT and a hundred lines of its stack. Here a thread of every process
exchanges signs of life with the others and ends its own process with a line that names the lost one, where it
was last seen, and what to do. With process 0 goes the store, and JAX ends the others before any thread of
theirs could; so a second process beside each, which waits for its end, writes the line after the stack.

What happens inside of a process is none of this file's business, but for the name of its phase.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import jax

from jaxrl.errors import EXIT_TRY_AGAIN, UserError

_FAULT = 1
_PREFIX = "jaxrl/signs_of_life/"
# Signs of life in the time after which one is missed.
_BEATS = 6
_SLOWEST_BEAT_S = 5.0
_RUNNING, _LEFT, _FAILED = "running", "left", "failed"
# How errors begin that a program has met on its devices or between hosts; a failed dispatch is a ValueError.
_STATUS = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN):"
)
_REMEDY = (
    "look at the output and at the host of the lost one, then start all processes again with the same "
    "command: it goes on from what was saved"
)


class Store(Protocol):
    """Text that all processes see; as of JAX's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Puts a text under a key."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Every (key, text) below `key`."""
        ...


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign of life.

    Attributes:
      process: whose.
      host: where it runs.
      beat: counts.
      phase: what it was doing, for people.
      state: running, left (its run is over), or failed (it ends with an error).
    """

    process: int
    host: str
    beat: int
    phase: str
    state: str = _RUNNING


class Peers:
    """What is known of the other processes; no threads and no clock of its own.

    Args:
      process, num_processes: which of how many this is.
      now_s: seconds, of any clock that only grows.
    """

    def __init__(self, process: int, num_processes: int, now_s: float):
        others = (i for i in range(num_processes) if i != process)
        unseen = {i: Sign(i, "unknown", -1, "never seen") for i in others}
        self._signs = unseen
        self._since_s = dict.fromkeys(unseen, now_s)

    def note(self, signs: Sequence[Sign], now_s: float) -> None:
        """Takes in what the store holds."""
        for sign in signs:
            if sign.process in self._signs and sign != self._signs[sign.process]:
                # Of a process that has failed, it counts since when it has.
                if sign.state != self._signs[sign.process].state or sign.state == _RUNNING:
                    self._since_s[sign.process] = now_s
                self._signs[sign.process] = sign

    def lost(self, now_s: float, *, silent_s: float, failed_s: float) -> str:
        """What is wrong with another process, in words; "" if nothing is.

        Args:
          now_s: the time.
          silent_s: a process without a sign of life for so long is lost.
          failed_s: one that ended with an error so long ago is not waited for.
        """
        for process, sign in self._signs.items():
            age_s = now_s - self._since_s[process]
            where = f"process {process} (host {sign.host}, {sign.phase})"
            if sign.state == _RUNNING and age_s > silent_s:
                return f"{where} has given no sign of life for {age_s:.0f} s"
            if sign.state == _FAILED and age_s > failed_s:
                return f"{where} has ended with an error, of which its own output tells"
        return ""

    @property
    def all_gone(self) -> bool:
        """Nobody else is running."""
        return all(sign.state != _RUNNING for sign in self._signs.values())


class HostWatch:
    """Signs of life of one process, and its end when those of another are missed. A context manager.

    Attributes:
      phase: what this process is doing, for people; assigned to.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        num_processes: int,
        *,
        lost_after_s: float,
        end: Callable[[int], None] = os._exit,
    ):
        """Starts nothing yet.

        Args:
          store: that all processes share.
          process, num_processes: which of how many this is.
          lost_after_s: a process that is silent for so long is lost.
          end: ends this process at once; for tests.
        """
        self._store = store
        self._me = Sign(process, socket.gethostname(), 0, "starting")
        self._num_processes = num_processes
        self._lost_after_s = lost_after_s
        self._every_s = min(lost_after_s / _BEATS, _SLOWEST_BEAT_S)
        self._end = end
        self._peers = Peers(process, num_processes, time.monotonic())
        # Of the signs of life: the thread writes them, and so does whoever leaves.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._found = threading.Event()
        self._broken = False
        self._witness: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._watch, name="host-watch", daemon=True)

    @property
    def phase(self) -> str:
        """See the class."""
        return self._me.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        with self._lock:
            self._me = dataclasses.replace(self._me, phase=phase)
        self._tell_witness(self._name)

    def __enter__(self) -> HostWatch:
        self._witness = _start_witness()
        self._tell_witness(self._name)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        orderly = isinstance(error, UserError | SystemExit | KeyboardInterrupt)
        if error is not None and not orderly:
            self._fail(error)
        self._leave(_LEFT if error is None else _FAILED)

    # How this process ends

    def _fail(self, error: BaseException) -> None:
        """Ends this process, with the reason: another one's if it is that, otherwise its own."""
        if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and _STATUS.match(str(error)):
            # What a program over all processes raises where one of them is gone.
            self._broken = True
            self._say(
                f"{self._name} could not go on ({str(error).splitlines()[0]}); whether another process is "
                "lost will be known in a moment"
            )
            if self._found.wait(self._silence_s + 2 * self._every_s):
                # The thread has said which, and ends this process.
                self._thread.join()
                return
        traceback.print_exception(error)
        self._leave(_FAILED)
        self._linger()
        self._end(_FAULT)

    def _leave(self, state: str) -> None:
        """The last sign of life; nothing that happens from now on is news."""
        self._stop.set()
        self._thread.join(timeout=self._every_s)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._send(state)
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.kill()
            witness.communicate()

    def _linger(self) -> None:
        """Process 0 has the store, without which JAX ends the others before they could say why."""
        until_s = time.monotonic() + self._lost_after_s + 2 * self._every_s
        while not self._me.process and time.monotonic() < until_s and not self._peers.all_gone:
            time.sleep(self._every_s)
            self._peers.note(self._read(), time.monotonic())

    # The thread

    @property
    def _silence_s(self) -> float:
        """How long a silence counts as the end. Less where a program has broken off, which is a sign too."""
        return min(self._lost_after_s, 3 * self._every_s) if self._broken else self._lost_after_s

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._send(_RUNNING)
                self._peers.note(self._read(), time.monotonic())
            except jax.errors.JaxRuntimeError:
                # The store does not answer. Whoever is silent because of that, process 0 is.
                pass
            reason = self._peers.lost(
                time.monotonic(), silent_s=self._silence_s, failed_s=self._lost_after_s
            )
            if reason and not self._stop.is_set():
                self._end_for(reason)
                return

    def _end_for(self, reason: str) -> None:
        self._found.set()
        self._say(f"{reason}; {self._name} ends with it, with status {EXIT_TRY_AGAIN}: {_REMEDY}")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._send(_FAILED)
        if self._witness is not None:
            # Its pipe stays open: the main thread may be writing to it.
            self._witness.kill()
        if not self._me.process:
            # The store goes with this process: others shall have read from it.
            time.sleep(2 * self._every_s)
        self._end(EXIT_TRY_AGAIN)

    def _send(self, state: str) -> None:
        with self._lock:
            self._me = dataclasses.replace(self._me, beat=self._me.beat + 1, state=state)
            text = json.dumps(dataclasses.asdict(self._me))
        self._store.key_value_set(f"{_PREFIX}{self._me.process}", text, allow_overwrite=True)

    def _read(self) -> list[Sign]:
        return [Sign(**json.loads(text)) for _, text in self._store.key_value_dir_get(_PREFIX)]

    @property
    def _name(self) -> str:
        """For people, with the phase."""
        me = self._me
        return f"process {me.process} of {self._num_processes} (host {me.host}, {me.phase})"

    def _say(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)

    # The witness

    def _tell_witness(self, text: str) -> None:
        witness = self._witness
        if witness is not None and witness.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                witness.stdin.write(text.replace("\n", " ") + "\n")
                witness.stdin.flush()


def _start_witness() -> subprocess.Popen[str]:
    """A process that says who this was, should it end without dismissing it."""
    path = pathlib.Path(__file__).with_name("host_witness.py")
    return subprocess.Popen(
        [sys.executable, "-P", "-S", str(path), _REMEDY],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # Signals to the run are not for it.
        start_new_session=True,
    )
