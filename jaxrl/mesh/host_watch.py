"""Heartbeats between the processes of a run: if one is lost, the others end with a message that names it.

    every process ----- heartbeat: count, phase, state ---------------> key-value store of process 0
          ^                                                                      |
          +---- process 0 reads all: a count that stands still, a "failed" ------+
          +---- the others read that of process 0 alone, which names the loss ---+

Without heartbeats a run ends when JAX notices the loss: more than a minute after a host was lost, or at once
if it was process 0, with SIGABRT and a hundred lines of stack. Here a thread of every process exchanges
heartbeats with the others. If one is missed it ends its own process with a line that names the lost process,
its last phase, and what to do.

The store dies with process 0. JAX then prints a hundred lines of stack and aborts the other processes before
their threads can react. So an abort waits for some seconds, in which a thread that follows process 0 writes
the line and ends with the status of a lost process (`hosts.start`). A process that the kernel kills for want
of memory prints nothing itself; the others name it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import jax

from jaxrl.errors import EXIT_TRY_AGAIN, UserError

_FAULT = 1
_PREFIX = "jaxrl/signs_of_life/"
# Heartbeats in the time after which a process counts as lost: single late ones do no harm.
_HEARTBEATS = 6
_SLOWEST_HEARTBEAT_S = 5.0
_RUNNING, _LEFT, _FAILED = "running", "left", "failed"
# Beginnings of errors from devices or from communication between hosts. A failed dispatch is a ValueError
# with such a text.
_STATUS = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN):"
)
REMEDY = (
    "look at the output and at the host of the lost one, then start all processes again with the same "
    "command: it goes on from what was saved"
)


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What a process tells the others about itself.

    Attributes:
      process: number of the process.
      host: name of its host.
      count: number of its heartbeats so far.
      phase: current phase, for messages.
      state: "running", "left" (its run is over), or "failed" (it ends with an error).
      lost: the description of a lost process with which it ends; "" without one.
    """

    process: int
    host: str
    count: int
    phase: str
    state: str = _RUNNING
    lost: str = ""


class Peers:
    """The last heartbeats of some processes. It has no threads and no clock of its own.

    Args:
      processes: their numbers.
      now_s: seconds of a monotonic clock.
      seen: what is known of some of them.
    """

    def __init__(self, processes: Iterable[int], now_s: float, seen: Peers | None = None):
        unseen = {i: Heartbeat(i, "unknown", -1, "never seen") for i in processes}
        self._last = unseen | (seen._last if seen else {})
        self._since_s = dict.fromkeys(unseen, now_s)

    def note(self, heartbeats: Sequence[Heartbeat], now_s: float) -> None:
        for new in heartbeats:
            # The same count again: nothing has come since.
            if new.process in self._last and new != self._last[new.process]:
                # A failed process keeps the time of its failure, whatever it still sends.
                if new.state != self._last[new.process].state or new.state == _RUNNING:
                    self._since_s[new.process] = now_s
                self._last[new.process] = new

    def lost(self, now_s: float, *, silent_s: float, failed_s: float) -> str:
        """A description of a lost process; "" if none is lost.

        Args:
          now_s: current time.
          silent_s: seconds without a heartbeat after which a process is lost.
          failed_s: seconds that the others wait for a process that has failed.
        """
        for last in self._last.values():
            # Found by another one. If that is process 0, it would itself be missed next.
            if last.lost:
                return last.lost
        for process, last in self._last.items():
            age_s = now_s - self._since_s[process]
            where = self.name(process)
            if last.state == _RUNNING and age_s > silent_s:
                return f"{where} has given no sign of life for {age_s:.0f} s"
            if last.state == _FAILED and age_s > failed_s:
                return f"{where} has ended with an error, of which its own output tells"
        return ""

    def name(self, process: int) -> str:
        """A process with its host and its last phase, for messages."""
        last = self._last[process]
        return f"process {process} (host {last.host}, {last.phase})"

    @property
    def all_gone(self) -> bool:
        """Whether no other process is running."""
        return all(last.state != _RUNNING for last in self._last.values())


class HostWatch:
    """Sends the heartbeats of this process, and ends it if those of another are missed. A context manager.

    Attributes:
      phase: current phase of this process, for messages; can be set.
    """

    def __init__(
        self,
        store: Any,
        process: int,
        num_processes: int,
        *,
        lost_after_s: float,
        end: Callable[[int], None] = os._exit,
    ):
        """Prepares the watch; entering the context starts it.

        Args:
          store: key-value store that all processes share, such as JAX's coordination service.
          process, num_processes: number of this process, and number of processes.
          lost_after_s: seconds without a heartbeat after which a process is lost.
          end: function that ends this process at once; replaced in tests.
        """
        self._store = store
        self.phase = "starting"
        self._process = process
        self._host = socket.gethostname()
        self._count = 0
        self._num_processes = num_processes
        self._lost_after_s = lost_after_s
        self._every_s = min(lost_after_s / _HEARTBEATS, _SLOWEST_HEARTBEAT_S)
        self._end = end
        # All would read the heartbeats of all: their number would grow with the square of the processes.
        self._peers = Peers((0,) if process else range(1, num_processes), time.monotonic())
        # The thread and the main thread both send heartbeats.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._found = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._watch, name="host-watch", daemon=True)

    def __enter__(self) -> HostWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # These leave by themselves and say why: the user's error, a status, Ctrl-C.
        orderly = isinstance(error, UserError | SystemExit | KeyboardInterrupt)
        if error is not None and not orderly:
            self._fail(error)
        self._leave(_LEFT if error is None else _FAILED)

    # How this process ends

    def suspect_loss(self, error: BaseException) -> None:
        """Shortens the silence after which a process is lost, if the error is one of communication.

        A program over all processes raises such an error if one of them is gone. Call it before this process
        waits for others.
        """
        is_broken = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
        if not self._broken and is_broken and _STATUS.match(str(error)):
            if self._process:
                # Process 0 may have no such program, and then finds the loss later.
                others = (i for i in range(self._num_processes) if i != self._process)
                self._peers = Peers(others, time.monotonic(), self._peers)
            self._broken = True
            self._say(
                f"{self._name} could not go on ({str(error).splitlines()[0]}); whether another process is "
                "lost will be known in a moment"
            )

    def _fail(self, error: BaseException) -> None:
        """Ends this process and prints the reason: the loss of another process, or `error`."""
        self.suspect_loss(error)
        # Then the thread prints the message and ends this process.
        if self._broken and self._found.wait(self._silence_s + 2 * self._every_s):
            self._thread.join()
            return
        traceback.print_exception(error)
        self._leave(_FAILED)
        # Process 0 waits for the others. It holds the store; without it JAX ends them without a message.
        until_s = time.monotonic() + self._lost_after_s + 2 * self._every_s
        while not self._process and time.monotonic() < until_s and not self._peers.all_gone:
            time.sleep(self._every_s)
            self._peers.note(self._read(), time.monotonic())
        self._end(_FAULT)

    def _leave(self, state: str) -> None:
        """Stops the watch and sends the last heartbeat."""
        self._stop.set()
        # The thread may be waiting for a store that no longer answers.
        self._thread.join(timeout=self._every_s)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._send(state)

    def names_of_first_and_own(self) -> tuple[str, str]:
        """Process 0 and this process with their phases, for messages."""
        return self._peers.name(0), self._name

    # The thread

    @property
    def _silence_s(self) -> float:
        """Seconds of silence after which a process is lost; fewer if a program has already failed."""
        return min(self._lost_after_s, 3 * self._every_s) if self._broken else self._lost_after_s

    def _watch(self) -> None:
        exchange, late = threading.Thread(), False
        while not self._stop.wait(0 if late else self._every_s):
            if not exchange.is_alive():
                exchange = self._in_thread(self._exchange)
            exchange.join(self._every_s)
            was_late, late = late, exchange.is_alive()
            if late and not was_late:
                # Perhaps this process itself was held up.
                continue
            reason = self._peers.lost(
                time.monotonic(), silent_s=self._silence_s, failed_s=self._lost_after_s
            )
            if reason and not self._stop.is_set():
                break
        else:
            return
        self._found.set()
        self._say(f"{reason}; {self._name} ends with it, with status {EXIT_TRY_AGAIN}: {REMEDY}")
        self._in_thread(lambda: self._exchange(_FAILED, reason)).join(self._every_s)
        if not self._process:
            # The store dies with this process. Give the others time to read the last heartbeat.
            time.sleep(2 * self._every_s)
        self._end(EXIT_TRY_AGAIN)

    def _in_thread(self, function: Callable[[], None]) -> threading.Thread:
        """Starts a function that blocks for minutes if the network of this process or of process 0 is cut."""
        thread = threading.Thread(target=function, name="host-watch-exchange", daemon=True)
        thread.start()
        return thread

    def _exchange(self, state: str = _RUNNING, lost: str = "") -> None:
        # If the store does not answer process 0 is lost, since it holds the store.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._send(state, lost)
            self._peers.note(self._read(), time.monotonic())

    def _send(self, state: str, lost: str = "") -> None:
        with self._lock:
            self._count += 1
            sent = Heartbeat(self._process, self._host, self._count, self.phase, state, lost)
            text = json.dumps(dataclasses.asdict(sent))
        # One key for each process, overwritten: the store does not grow with the run.
        self._store.key_value_set(f"{_PREFIX}{self._process}", text, allow_overwrite=True)

    def _read(self) -> list[Heartbeat]:
        if self._process and not self._broken:
            texts = [self._store.key_value_try_get(f"{_PREFIX}0")]
        else:
            texts = [text for _, text in self._store.key_value_dir_get(_PREFIX)]
        return [Heartbeat(**json.loads(text)) for text in texts]

    @property
    def _name(self) -> str:
        """This process and its phase, for messages."""
        return f"process {self._process} of {self._num_processes} (host {self._host}, {self.phase})"

    def _say(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)
