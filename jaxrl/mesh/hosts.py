"""Several processes that run one program: how they start, agree, and read what lies across them.

Every process runs the same Python on the same data; a program on the mesh is one program over the devices
of all of them. What may differ between hosts is settled here: which process writes, what to do with a
signal that only one of them got, and the check that they still do the same.

Functions marked *collective* must be called by every process, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxrl.checks import NAME, at_least, check_fields, count
from jaxrl.errors import UserError
from jaxrl.mesh.host_watch import HostWatch

AUTO = "auto"
PATHWAYS = "pathways"
# Of JAX's own heartbeats; ours, which can say more, come first.
_JAX_HEARTBEAT_S = 100

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """The processes of a run; each is started with the same command.

    Attributes:
      coordinator: "" for a single process, "auto" where JAX finds the others by itself (TPU pods, SLURM,
        Open MPI, Kubernetes), "pathways" for one process that drives all devices through Pathways, otherwise
        "address:port" of process 0, to be given with the other two.
      num_processes: how many there are.
      process_id: which of them this is, from 0.
      lost_after_s: a process without a sign of life for so long is lost, and all others end. More than any
        function of C that keeps Python's other threads from running takes.
    """

    coordinator: Annotated[str, NAME] = ""
    num_processes: Annotated[int, count(1)] = 1
    process_id: Annotated[int, count(0)] = 0
    lost_after_s: Annotated[float, at_least(1, at_most=86_400)] = 60.0

    def __post_init__(self):
        check_fields(self)
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


def start(config: HostsConfig) -> None:
    """Joins this process with the others. Call before anything asks JAX for a device.

    Raises:
      UserError: the others cannot be found.
    """
    if not config.coordinator:
        return
    if config.coordinator == PATHWAYS:
        _start_pathways()
        return
    # It would take SIGTERM for itself; a run agrees on signals in its own way.
    jax.config.update("jax_enable_preemption_service", False)
    # What processes on CPU, simulated or not, talk to each other by.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    patience: Any = {
        "heartbeat_timeout_seconds": max(_JAX_HEARTBEAT_S, round(2 * config.lost_after_s))
    }
    try:
        if config.coordinator == AUTO:
            jax.distributed.initialize(**patience)
        else:
            jax.distributed.initialize(
                config.coordinator, config.num_processes, config.process_id, **patience
            )
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"process {config.process_id} of {config.num_processes} did not find the others by "
            f"hosts.coordinator={config.coordinator} ({reason}); give the address:port of process 0 with "
            "hosts.num_processes and hosts.process_id, and start all processes"
        ) from error


def _start_pathways() -> None:
    try:
        import pathwaysutils  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            f"hosts.coordinator {PATHWAYS!r} needs the package pathwaysutils, which is not installed; run "
            "pip install pathwaysutils"
        ) from error
    pathwaysutils.initialize()


# Of this process, as JAX's client is, while a run of several lasts.
_watch: HostWatch | None = None


@contextlib.contextmanager
def watched(config: HostsConfig) -> Iterator[None]:
    """Around a run: if another process of it is lost, this one ends with a line that says so.

    A fault of this process ends it with its traceback, and the others with a line that names it. UserErrors
    are raised as ever. Does nothing for a single process.
    """
    global _watch
    if num_processes() == 1:
        yield
        return
    # JAX has no public name for its client; Orbax, too, takes it from here.
    store: Any = distributed.global_state.client
    try:
        with HostWatch(
            store, jax.process_index(), num_processes(), lost_after_s=config.lost_after_s
        ) as _watch:
            yield
    finally:
        _watch = None


def enter_phase(name: str) -> None:
    """Says what this process is about to do, for people who will want to know where it was lost."""
    if _watch is not None:
        _watch.phase = name


def num_processes() -> int:
    """How many processes run this program."""
    return jax.process_count()


def is_first() -> bool:
    """This process writes what is written once: logs, samples, the report."""
    return jax.process_index() == 0


def is_turn_of_this(turn: int) -> bool:
    """Whether a piece of work that one process does is this one's, where they take turns.

    Args:
      turn: counts the pieces, from 0 and alike on every process.
    """
    return turn % num_processes() == jax.process_index()


def fetch(tree: Any) -> Any:
    """The values of a tree of arrays as NumPy arrays, whole, on every process. Collective."""
    leaves, structure = jax.tree.flatten(tree)
    spread = [i for i, leaf in enumerate(leaves) if _is_spread(leaf)]
    if spread:
        parts = [leaves[i] for i in spread]
        whole = [NamedSharding(leaf.sharding.mesh, P()) for leaf in parts]
        for i, leaf in zip(spread, jax.jit(_same, out_shardings=whole)(parts), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, jax.device_get(leaves))


def _is_spread(leaf: Any) -> bool:
    """No process can read the whole of it from its own devices."""
    if not isinstance(leaf, jax.Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _same(tree: Any) -> Any:
    return tree


def put(value: Any, sharding: Sharding) -> jax.Array:
    """An array where `sharding` says, on this mesh or another one.

    A host array goes to the devices of this process without a word to the others, which hold the same one.
    An array on other devices is sent to them; nothing waits for it. Only where several processes move one
    between two sets of devices it passes through the hosts, since JAX has no other way, and then it is
    collective.

    Args:
      value: a host array, the same on every process, or a jax.Array.
      sharding: where to.
    """
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        local = value.is_fully_addressable and sharding.is_fully_addressable
        if local or value.sharding.device_set == sharding.device_set:
            return jax.device_put(value, sharding)
        value = fetch(value)
    elif sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def largest(value: int) -> int:
    """The largest of the processes' values. Collective."""
    return int(_of_each(np.array([value], np.int32)).max())


def check_same(what: str, content: Iterable[Any]) -> None:
    """Ends the run where processes hold different data, before it makes them differ in silence.

    Collective; costs a few bytes.

    Args:
      what: it is, with the step, for the message.
      content: arrays, or strings.

    Raises:
      UserError: another process holds other content; raised on every process.
    """
    if num_processes() == 1:
        return
    digest = hashlib.blake2b(digest_size=8)
    for part in content:
        digest.update(part.encode() if isinstance(part, str) else np.asarray(part).tobytes())
    each = _of_each(np.frombuffer(digest.digest(), np.uint32))
    others = np.flatnonzero((each != each[0]).any(axis=1))
    if len(others):
        raise UserError(
            f"{what} differ between processes: {', '.join(map(str, others))} disagree with process 0. "
            "Every process must be started with the same command, on the same files, with the same packages"
        )


def _of_each(values: np.ndarray) -> np.ndarray:
    """The values of every process, [processes, n]."""
    return np.asarray(multihost_utils.process_allgather(values)).reshape(-1, len(values))


def on_first(function: Callable[[], Result]) -> Result:
    """What `function` returns in the first process, which alone runs it. Collective.

    Args:
      function: its result must be JSON-able.

    Raises:
      UserError: the function did; raised on every process.
    """
    if num_processes() == 1:
        return function()
    outcome = _outcome_of(function) if is_first() else {}
    return _result_of(json.loads(_broadcast(json.dumps(outcome).encode())))


def gather(function: Callable[[], Result]) -> list[Result]:
    """What `function` returns in each process, in their order, on every process. Collective.

    Args:
      function: its result must be JSON-able.

    Raises:
      UserError: the function did, in one process or several; raised on every process.
    """
    if num_processes() == 1:
        return [function()]
    content = json.dumps(_outcome_of(function)).encode()
    sizes = _of_each(np.array([len(content)], np.int32)).reshape(-1).tolist()
    each = _of_each(_padded(content, max(sizes))).astype(np.uint8)
    outcomes = [json.loads(bytes(row[:size])) for row, size in zip(each, sizes, strict=True)]
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


def _broadcast(content: bytes) -> bytes:
    """The first process's content."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = _padded(content if is_first() else b"", size)
    return bytes(multihost_utils.broadcast_one_to_all(padded).astype(np.uint8)[:size])


def _padded(content: bytes, size: int) -> np.ndarray:
    """With room for `size` bytes, of few shapes, so that few programs are compiled."""
    padded = np.zeros(1 << max(size - 1, 1).bit_length(), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return padded
