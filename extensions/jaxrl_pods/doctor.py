"""Checks the hosts of a run in a minute, before anything is compiled for an hour.

jaxrl doctor --config configs/dapo_qwen32b.py --hosts 16 --config.hosts.coordinator=auto

Start it on every host with the arguments of `jaxrl train`. The first host prints a line for each check that
passes. The first one that fails ends all hosts with status 2 and a line that says what to do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.config.command_line import load_config, take_overrides
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.extensions import EXTENSIONS
from jaxrl.files import fingerprint
from jaxrl.flags import command_parser
from jaxrl.mesh import hosts
from jaxrl.mesh.compilation_cache import keep_compiled_programs
from jaxrl.mesh.handover import move_arrays
from jaxrl.mesh.pools import Placement, take_devices
from jaxrl.models.kernels import proof
from jaxrl.tracking.durable import disk_errors, ensure_writable
from jaxrl.trainer import program
from jaxrl.trainer.context import meshes_of
from jaxrl.trainer.open_settings import with_cpu_devices
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.roles import build_roles, role_models

_PACKAGES = ("jaxrl", "jax", "jaxlib", "flax", "orbax-checkpoint")
# Exchanges between busy hosts take tenths of a second.
_CLOCKS_S = 2.0
_FILE_BYTES = 2**28
# Programs, and data that change what a run computes: shapes, families of models, units of answers.
SOURCES = ("**/*.py", "**/*.toml", "**/*.yaml", "**/*.txt")
# float32 numbers of a device; simulated ones share a memory.
_NUMBERS, _NUMBERS_ON_CPU = 2**26, 2**20
# The others wait this much longer than the process that finds something wrong, process 0 twice.
_MARGIN_S = 5.0
_FILES = "see the file systems of weights, packages, cache and run.output"
_NETWORK = (
    "the hosts have met and their devices do not reach each other: open all ports between the hosts, and see "
    "docs/pods.md for the variables of the network"
)


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    name, *arguments = argv
    overrides, rest = take_overrides(arguments, Config)
    parser = command_parser(name, __doc__)
    parser.add_argument("--config", required=True, help="recipe file")
    parser.add_argument("--hosts", type=int, default=0, help="number of hosts that there must be")
    parser.add_argument("--patience_s", type=float, default=300.0, help="longest time of a check")
    args = parser.parse_args(rest)
    config = with_cpu_devices(load_config(Config, args.config, overrides))
    patience_s = args.patience_s
    in_time(patience_s, "cache of compiled programs", keep_compiled_programs)
    program.start(config)
    with hosts.watched(config.hosts):
        # The first exchange ends on all hosts at about the same moment, for the clocks.
        hosts.gather(lambda: None)
        with _ends("facts", _FILES, patience_s):
            facts = hosts.gather(lambda: _facts(config, patience_s))
        apart_s, placement = check_facts(facts, args.hosts), None
        if not config.mesh.searched:
            placement = take_devices(resolve(config).pools, jax.devices())
        _say("devices", f"{len(facts)} hosts, each with {facts[0]['devices']}")
        _say("clocks", f"within {apart_s:.2f} s of their median")
        for fact, value in facts[0]["same"].items():
            _say("same", f"{fact} {value}")
        with _ends("disk", _FILES, patience_s):
            _disk(config, patience_s)
        with _ends("all-reduce", _NETWORK, patience_s):
            mesh = Mesh(np.array(jax.devices()), ("device",))
            rows = _rows(mesh)
            total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
            # 0 + 1 + ... + n - 1
            wanted = mesh.size * (mesh.size - 1) / 2
            rate = _rate(lambda: total(rows), wanted)
            _say("all-reduce", f"{wanted:.0f} on all {mesh.size} devices, {rate}")
        with _ends("hand-over", _NETWORK, patience_s):
            _handover()
        if placement is not None:
            with _ends("kernels", "a kernel stops its device; choose xla for it", patience_s):
                try_kernels(config, placement)
    return 0


def try_kernels(config: Config, placement: Placement) -> None:
    """Builds the roles of a run without weights, which tries their kernels, and prints a line for each."""
    lines = _Lines(logging.INFO)
    logger = logging.getLogger(proof.__name__)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    if config.rollout.slots == "auto":
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, slots=placement.num_devices)
        )
    try:
        found = resolve(config)
        build_roles(found, meshes_of(placement), role_models(found))
    except UserError as error:
        _say("kernels", f"not tried, since the run cannot begin: {error}")
    else:
        if not lines.number:
            _say("kernels", "none to try")
    finally:
        logger.removeHandler(lines)


class _Lines(logging.Handler):
    """Prints what trials of kernels say."""

    number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += 1
        _say("kernels", record.getMessage())


@contextlib.contextmanager
def _ends(check: str, remedy: str, patience_s: float) -> Iterator[None]:
    """Ends this process if the block does not end in time: a collective that hangs cannot be interrupted."""

    def give_up() -> None:
        print(f"error: {check} does not end; {remedy}", file=sys.stderr, flush=True)
        os._exit(EXIT_USER_ERROR)

    hosts.enter_phase(check)
    # Process 0 last: without it the others end with the status of a loss.
    timer = threading.Timer(patience_s + _MARGIN_S * (1 + hosts.is_first()), give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def in_time(seconds: float, what: str, function: Callable[[], Any]) -> Any:
    """The result of a function, which may block for good where a file system does not answer.

    Raises:
      UserError: it does not end in time.
    """
    result = concurrent.futures.Future()

    def call() -> None:
        try:
            result.set_result(function())
        except Exception as error:  # raised below
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise UserError(
            f"{what} did not answer for {seconds:.0f} s on host {socket.gethostname()}; {_FILES}"
        ) from error


def _say(what: str, text: str) -> None:
    if hosts.is_first():
        print(f"{what:12}{text}", flush=True)


def sources() -> dict[str, pathlib.Path]:
    """The folders of jaxrl and of those packages of `extensions/` that are installed, by name."""
    names = {function.partition(".")[0] for function in EXTENSIONS.values()}
    found = {name: importlib.util.find_spec(name) for name in ("jaxrl", *sorted(names))}
    return {
        name: pathlib.Path(spec.origin).parent
        for name, spec in found.items()
        if spec and spec.origin
    }


def _facts(config: Config, patience_s: float) -> dict[str, Any]:
    """What hosts tell each other: name, clock, devices, and what must be the same everywhere."""
    clock_s = time.time()

    def files() -> dict[str, str]:
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        code = {f"source of {name}": fingerprint(at, *SOURCES) for name, at in sources().items()}
        return versions | code | program.weight_fingerprints(config)

    files_of = in_time(patience_s, "a file of the weights or the packages", files)
    same = {"Python": platform.python_version(), **files_of}
    devices = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
    return {"host": socket.gethostname(), "clock_s": clock_s, "devices": devices, "same": same}


def check_facts(facts: Sequence[Mapping[str, Any]], num_hosts: int) -> float:
    """Checks what the hosts have reported.

    Args:
      facts: those of every process: host, clock_s, devices, same.
      num_hosts: number of hosts that there must be; 0 for any.

    Returns:
      The largest distance of a clock from the median of all, in seconds.

    Raises:
      UserError: hosts are missing or differ.
    """
    if num_hosts and len(facts) != num_hosts:
        raise UserError(
            f"{len(facts)} hosts have met, and --hosts is {num_hosts}; start the same command on all of them"
        )
    median_s = statistics.median(each["clock_s"] for each in facts)
    for number, each in enumerate(facts):
        apart_s = each["clock_s"] - median_s
        name = f"process {number} (host {each['host']})"
        if each["devices"] != facts[0]["devices"]:
            raise UserError(
                f"{name} has {each['devices']}, process 0 {facts[0]['devices']}; restart the host that "
                "lacks devices, or replace it"
            )
        if abs(apart_s) > _CLOCKS_S:
            raise UserError(
                f"the clock of {name} is {apart_s:+.0f} s from the median; set it by NTP (chronyc tracking)"
            )
        for what, first in facts[0]["same"].items():
            if (own := each["same"].get(what)) != first:
                raise UserError(
                    f"{what} is {own} on {name} and {first} on process 0; give all hosts the same image, "
                    "checkout and files"
                )
    return max(abs(each["clock_s"] - median_s) for each in facts)


def _disk(config: Config, patience_s: float) -> None:
    folder = config.run_folder.path
    paths = [folder / f".doctor.{i}" for i in range(hosts.num_processes())]
    own = paths[jax.process_index()]

    def write() -> float:
        ensure_writable(folder)
        own.touch()
        content, start_s = os.urandom(_FILE_BYTES), time.perf_counter()
        # Without a name, so that a kill leaves nothing. Buffered: a single write may store a part and say
        # nothing of a full disk.
        with disk_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start_s

    def on_disk(function: Callable[[], Any]) -> list[Any]:
        return hosts.gather(lambda: in_time(patience_s, str(folder), function))

    try:
        slowest_s = max(on_disk(write))
        unseen = on_disk(lambda: [path.name for path in paths if not path.exists()])
    finally:
        # No second wait for a disk that does not answer.
        with contextlib.suppress(UserError):
            in_time(1.0, str(folder), lambda: own.unlink(missing_ok=True))
    for number, names in enumerate(unseen):
        if names:
            raise UserError(
                f"process {number} does not see {names[0]}, which another one has written to {folder}; "
                "run.output has to be a folder that all hosts share"
            )
    free, speed = shutil.disk_usage(folder).free / 1e9, _FILE_BYTES / 1e6 / slowest_s
    _say("disk", f"{folder}: shared, {free:.0f} GB free, {speed:.0f} MB/s for each of all at once")


def _handover() -> None:
    """From half of each host's devices to the other half, or of the hosts if each has one device."""
    # Their own order may go back and forth between hosts.
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    local = jax.local_device_count()
    by_turns = sorted(devices, key=lambda d: (devices.index(d) % local, d.process_index))
    half = len(devices) // 2
    if not half:
        return
    halves = (by_turns[:half], by_turns[half : 2 * half])
    learner, sampler = (Mesh(np.array(each), ("device",)) for each in halves)
    rows = _rows(learner)
    # Each device gets a part of every row, so of every host.
    target = NamedSharding(sampler, P(None, "device"))
    rate = _rate(lambda: move_arrays([rows], [target])[0], np.arange(half)[:, None])
    _say("hand-over", f"from {half} devices to {half}, {rate}")


def _rows(mesh: Mesh) -> jax.Array:
    """float32 [devices, numbers]: each device has a row of its own number."""
    n = mesh.size
    numbers = _NUMBERS_ON_CPU if mesh.devices.flat[0].platform == "cpu" else _NUMBERS
    rows = jax.jit(
        lambda: jnp.broadcast_to(jnp.arange(n, dtype=jnp.float32)[:, None], (n, numbers // n * n)),
        out_shardings=NamedSharding(mesh, P("device")),
    )
    return rows()


def _rate(call: Callable[[], jax.Array], wanted: Any) -> str:
    """The speed of a second call, for one device; UserError on all if a shard is not what is wanted."""

    def measured() -> tuple[list[str], int, float]:
        try:
            jax.block_until_ready(call())
            start_s = time.perf_counter()
            result = jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            raise UserError(f"{str(error).splitlines()[0]}; {_NETWORK}") from error
        seconds, shards = time.perf_counter() - start_s, result.addressable_shards
        wrong = [str(x.device) for x in shards if (np.asarray(x.data) != wanted).any()]
        return wrong, max((x.data.nbytes for x in shards), default=0), 1e3 * seconds

    results = hosts.gather(measured)
    for number, (devices, *_) in enumerate(results):
        if devices:
            raise UserError(f"{devices[0]} of process {number} got wrong numbers; replace its host")
    # A process may have no device that receives.
    num_bytes, ms = (max(column) for column in list(zip(*results, strict=True))[1:])
    return f"{num_bytes / 1e6:.0f} MB for each in {ms:.3g} ms: {num_bytes / 1e6 / ms:.3g} GB/s"
