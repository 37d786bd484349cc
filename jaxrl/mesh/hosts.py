"""Multi-process runs: processes start together, agree on decisions, and read arrays that span hosts.

Every process runs the same Python program on the same data, and each compiled program spans the devices of
all processes. This file handles the differences between hosts: the process that writes files, decisions that
only one process can make, and the check that all processes still do the same.

Functions marked *collective* must be called by every process, in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.checks import NAME, at_least, count, settings
from jaxrl.errors import EXIT_TRY_AGAIN, UserError
from jaxrl.mesh.host_watch import REMEDY, HostWatch
from jaxrl.private import coordination_client, coordinator_address

AUTO = "auto"
PATHWAYS = "pathways"
# For how long a process that ends with an error looks whether process 0 is gone.
_LAST_LOOK_S = 2.0
# How often it is looked for where it does not answer, and for how long a process waits for it to start.
_LOOK_EVERY_S, _START_S = 0.1, 300
# Timeout of JAX's own heartbeats. It is longer than ours, so that ours, whose message says more, come first.
_JAX_HEARTBEAT_S = 100

Result = TypeVar("Result")


@settings
class HostsConfig:
    """The processes of a run; each is started with the same command."""

    coordinator: Annotated[str, NAME] = ""
    """"" for a single process; "auto" if JAX can find the others (TPU pods, SLURM, Open MPI,
    Kubernetes); "pathways" for one process that drives all devices through Pathways; otherwise
    "address:port" of process 0, with `num_processes` and `process_id` set.
    """
    num_processes: Annotated[int, count(1)] = 1
    """Number of processes."""
    process_id: Annotated[int, count(0)] = 0
    """Number of this process, from 0."""
    lost_after_s: Annotated[float, at_least(1, at_most=86_400)] = 40.0
    """Seconds without a heartbeat after which a process counts as lost and all others end,
    within 15 s.
    Choose it longer than any C function that blocks Python's other threads.
    """
    pools_apart: bool = False
    """Whether each pool of `placement` has whole processes, the first ones the first pool. Otherwise
    every pool has an equal part of every process.
    """

    fewer: dict[str, str] = dataclasses.field(default_factory=dict)
    """Settings by the number of hosts with which `jaxrl train --supervise` goes on if others do not
    come back, such as {"8": "mesh.train=1-8-8 mesh.fsdp=8"}; "" changes none.
    """
    fewer_after_s: Annotated[float, at_least(0, at_most=86_400)] = 300.0
    """Seconds that `fewer` waits for the others."""

    def __post_init__(self):
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id {self.process_id} is not one of {self.num_processes} processes; "
                f"num_processes counts them and process_id goes from 0 to {self.num_processes - 1}"
            )
        if self.num_processes > 1 and not self.coordinator:
            raise ValueError(
                f"num_processes {self.num_processes} without a coordinator; set coordinator to the "
                "address:port of process 0, the same for all"
            )
        address, _, port = self.coordinator.rpartition(":")
        if self.coordinator not in ("", AUTO, PATHWAYS) and not (address and port.isdecimal()):
            raise ValueError(
                f"coordinator {self.coordinator!r} is neither {AUTO!r} nor {PATHWAYS!r} nor address:port of "
                "process 0, such as 10.0.0.1:8476"
            )

    @property
    def place(self) -> str:
        """What this process differs in before the others are found: its number, or its host with "auto"."""
        return socket.gethostname() if self.coordinator == AUTO else str(self.process_id)


def start(config: HostsConfig) -> None:
    """Joins this process with the others. Call it before anything asks JAX for a device.

    Raises:
      UserError: the other processes cannot be found.
    """
    if not config.coordinator:
        return
    if config.coordinator == PATHWAYS:
        try:
            import pathwaysutils  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise UserError(
                f"hosts.coordinator {PATHWAYS!r} needs the package pathwaysutils, which is not installed; "
                "run pip install pathwaysutils"
            ) from error
        pathwaysutils.initialize()
        return
    # JAX's service would install its own SIGTERM handler. A run handles signals itself, all processes at
    # once.
    jax.config.update("jax_enable_preemption_service", False)
    # Collectives between processes on CPU devices.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    heartbeat_s = max(_JAX_HEARTBEAT_S, round(2 * config.lost_after_s))
    place = config.coordinator, config.num_processes, config.process_id
    # JAX finds it with "auto".
    known: Any = place if config.coordinator != AUTO else ()
    # Before it connects: process 0 may die at any moment from then on, and JAX then aborts this process, in a
    # thread of its own. The handler must be safe in a signal, so it is no Python: it is libc's `sleep`, whose
    # seconds are the number of the signal, 6. In these `_follow_first` ends this process; if process 0 is
    # alive, the abort goes on after them.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, libc.sleep)
    met, leaves = threading.Event(), threading.Event()
    follower = threading.Thread(target=_follow_first, args=(config, met, leaves), daemon=True)

    def leave() -> None:
        # An error that was not caught, and perhaps of communication: then `follower` is about to say who is
        # gone, and ends this process.
        if isinstance(getattr(sys, "last_value", None), RuntimeError):
            follower.join(_LAST_LOOK_S)
        leaves.set()

    # Before JAX connects: if process 0 dies then, JAX looks for it for minutes.
    follower.start()
    try:
        if known and config.process_id and not met.wait(_START_S):
            raise RuntimeError(f"nobody has answered there for {_START_S} s")
        jax.distributed.initialize(*known, heartbeat_timeout_seconds=heartbeat_s)
    except (ValueError, RuntimeError) as error:
        leaves.set()
        reason = str(error).splitlines()[0]
        raise UserError(
            f"process {config.process_id} of {config.num_processes} did not find the others by "
            f"hosts.coordinator={config.coordinator} ({reason}); give the address:port of process 0 with "
            "hosts.num_processes and hosts.process_id, and start all processes"
        ) from error
    met.set()
    # Runs before JAX's own: once all processes have left, process 0 ends as it should.
    atexit.register(leave)


# Whether each process has a disk of its own: the run's folder there has only what this process writes.
disks_apart = False

# The watch of this process during a multi-process run. Global, like JAX's distributed client.
_watch: HostWatch | None = None


def _follow_first(config: HostsConfig, met: threading.Event, leaves: threading.Event) -> None:
    """Ends this process when the port of process 0 is closed, unless it `leaves` by itself.

    Holds a connection to it, which breaks at the moment of its death. The server also closes connections that
    say nothing, but takes new ones. Until the first one, which sets `met`, process 0 may be about to start.
    """
    address = ""
    while not leaves.wait(_LOOK_EVERY_S):
        # "" until JAX has found it.
        address = coordinator_address() if config.coordinator == AUTO else config.coordinator
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port or 0))) as line:
                if line.getsockname() == line.getpeername():
                    # Of this host to itself: a free port may become the port of this end, too.
                    continue
                met.set()
                while line.recv(1 << 12):
                    pass
        except ConnectionRefusedError:
            if met.is_set():
                break
        except OSError:
            # Of the network, which may come back. If it does not, heartbeats are missed.
            pass
    if leaves.is_set():
        return
    unwatched = f"process 0 ({address})", "this process"
    first, own = _watch.names_of_first_and_own() if _watch is not None else unwatched
    print(
        f"error: {first} is gone, and the service of all with it; {own} ends, with status "
        f"{EXIT_TRY_AGAIN}: {REMEDY}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_TRY_AGAIN)


@contextlib.contextmanager
def watched(config: HostsConfig) -> Iterator[None]:
    """Wraps a run: if another process is lost, this process ends with a message that names it.

    An unexpected error in this process ends it with a traceback, and the others with a message that names it.
    UserErrors propagate as usual. Does nothing for a single process, or inside another `watched`.
    """
    global _watch
    if num_processes() == 1 or _watch is not None:
        yield
        return
    try:
        with HostWatch(
            coordination_client(),
            jax.process_index(),
            num_processes(),
            lost_after_s=config.lost_after_s,
        ) as _watch:
            yield
    finally:
        _watch = None


def enter_phase(name: str) -> None:
    """Announces the current phase of this process; messages about a lost process name its last phase."""
    if _watch is not None:
        _watch.phase = name


def suspect_loss(error: BaseException) -> None:
    """Tells the watch of an error after which this process waits for others: it looks for a loss at once."""
    if _watch is not None:
        _watch.suspect_loss(error)


def num_processes() -> int:
    """The number of processes."""
    return jax.process_count()


def is_first() -> bool:
    """Whether this is process 0, which writes everything that is written once: logs, samples, the report."""
    return jax.process_index() == 0


def is_turn_of_this(turn: int, processes: Sequence[int] = ()) -> bool:
    """Whether this process does the given piece of work, if processes take turns.

    Args:
      turn: number of the piece, from 0, the same on each of them.
      processes: the processes; none for all.
    """
    processes = processes or range(num_processes())
    return processes[turn % len(processes)] == jax.process_index()


def fetch(tree: Any, *, everywhere: bool = True) -> Any:
    """Fetches a tree of arrays as whole NumPy arrays. Collective.

    Args:
      tree: the arrays.
      everywhere: whether the first process with devices of an array sends it to the processes that have none
        of them. Otherwise these keep it as it is.
    """
    leaves, structure = jax.tree.flatten(tree)
    holders = [processes_of(leaf) for leaf in leaves]
    # Arrays that no process can read whole from its own devices.
    spread = [
        i for i, leaf in enumerate(leaves) if len(holders[i]) > 1 and not leaf.is_fully_replicated
    ]
    if spread:
        parts = [leaves[i] for i in spread]
        whole = [NamedSharding(leaf.sharding.mesh, P()) for leaf in parts]
        for i, leaf in zip(spread, jax.jit(_same, out_shardings=whole)(parts), strict=True):
            leaves[i] = leaf
    me = jax.process_index()
    here = [i for i, each in enumerate(holders) if not each or me in each]
    for i, value in zip(here, jax.device_get([leaves[i] for i in here]), strict=True):
        leaves[i] = value
    partly = {each for each in holders if 0 < len(each) < num_processes()}
    for some in sorted(partly) if everywhere else ():
        sent = [i for i, each in enumerate(holders) if each == some]
        exchange = _next_exchange()
        _count(sum(leaves[i].nbytes for i in sent))
        if me == some[0]:
            _send(exchange, b"".join(leaves[i].tobytes() for i in sent))
        elif me not in some:
            content, start = _receive(exchange, some[0]), 0
            for i in sent:
                leaf, end = leaves[i], start + leaves[i].nbytes
                leaves[i] = np.frombuffer(content[start:end], leaf.dtype).reshape(leaf.shape)
                start = end
    return jax.tree.unflatten(structure, leaves)


def processes_of(leaf: Any) -> tuple[int, ...]:
    """The processes that have a part of an array, ascending; none if it is no array on a mesh."""
    # Any other array belongs to its own process alone.
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return ()
    return tuple(sorted({device.process_index for device in leaf.sharding.device_set}))


def _same(tree: Any) -> Any:  # one function, so that JAX compiles it once for equal shapes
    return tree


def largest(value: int) -> int:
    """The largest of the processes' values. Collective."""
    return max(gather(lambda: value))


def check_same(what: str, content: Iterable[Any]) -> None:
    """Checks that all processes hold the same data, which would otherwise make them diverge silently.

    Collective; exchanges a hash of 8 bytes.

    Args:
      what: description of the data with the step, for the message.
      content: arrays, or strings.

    Raises:
      UserError: another process holds different content; raised on every process.
    """
    if num_processes() == 1:
        return
    # Only a hash passes through process 0, however large the content is.
    digest = hashlib.blake2b(digest_size=8)
    for part in content:
        digest.update(part.encode() if isinstance(part, str) else np.asarray(part).tobytes())
    first, *each = gather(digest.hexdigest)
    if others := [str(i) for i, other in enumerate(each, start=1) if other != first]:
        raise UserError(
            f"{what} differ between processes: {', '.join(others)} disagree with process 0. "
            "Every process must be started with the same command, on the same files, with the same packages"
        )


def on_first(function: Callable[[], Result], *, process: int = 0) -> Result:
    """Runs `function` in process 0, or another one, and returns its result on every process. Collective.

    Args:
      function: a function whose result can be written as JSON.
      process: the process, the same on all.

    Raises:
      UserError: the function raised it; raised on every process.
    """
    if num_processes() == 1:
        return function()
    if jax.process_index() == process:
        # Run before the exchange is counted. If it raises anything but a UserError a server goes on, and its
        # next exchange must have the number that the others wait for.
        content = json.dumps(_outcome_of(function)).encode()
        _send(_next_exchange(), content)
    else:
        content = _receive(_next_exchange(), process)
    _count(len(content))
    return _result_of(json.loads(content))


def gather(function: Callable[[], Result]) -> list[Result]:
    """Runs `function` in each process and returns all results, by process, on every process. Collective.

    Args:
      function: a function whose result can be written as JSON.

    Raises:
      UserError: the function raised it in at least one process; raised on every process.
    """
    if num_processes() == 1:
        return [function()]
    content = json.dumps(_outcome_of(function)).encode()
    exchange = _next_exchange()
    _send(exchange, content)
    # Read before the next exchange is counted, which may delete what was sent.
    each = [json.loads(_receive(exchange, i)) for i in range(num_processes())] if is_first() else []
    outcomes = on_first(lambda: each)
    return [_result_of(outcome) for outcome in outcomes]


def _outcome_of(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": function()}
    except UserError as error:
        return {"error": str(error)}


def _result_of(outcome: dict[str, Any]) -> Any:
    if "error" in outcome:
        raise UserError(outcome["error"])
    return outcome["result"]


# Exchanges go through the key-value store of JAX's service in process 0, not over the devices: these may be
# at work for another pool. All processes make the same exchanges in the same order, and number them.
# Process 0 keeps what was sent until there are this many exchanges, or bytes.
_EXCHANGES = "jaxrl/exchange"
_KEPT, _KEPT_BYTES = 64, 2**26
_FOREVER_MS = 2**31 - 1
# The exchanges and bytes that process 0 keeps, and how often it has deleted them. The same on every process.
_kept = _kept_bytes = _deleted = 0


def _next_exchange() -> str:
    global _kept, _kept_bytes, _deleted
    if _kept == _KEPT or _kept_bytes > _KEPT_BYTES:
        # Everyone has read what was sent before.
        coordination_client().wait_at_barrier(f"{_EXCHANGES}/{_deleted}", _FOREVER_MS)
        if is_first():
            coordination_client().key_value_delete(f"{_EXCHANGES}/{_deleted}/")
        _kept, _kept_bytes, _deleted = 0, 0, _deleted + 1
    _kept += 1
    return f"{_EXCHANGES}/{_deleted}/{_kept}"


def _count(num_bytes: int) -> None:
    global _kept_bytes
    _kept_bytes += num_bytes


def _send(exchange: str, content: bytes) -> None:
    coordination_client().key_value_set_bytes(f"{exchange}/{jax.process_index()}", content)


def _receive(exchange: str, process: int) -> bytes:
    return coordination_client().blocking_key_value_get_bytes(f"{exchange}/{process}", _FOREVER_MS)
