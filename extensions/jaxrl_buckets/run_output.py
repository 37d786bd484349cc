"""A run whose `run.output` is in a bucket: it works in a folder of this host, which `mirror` sends."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.files import local_folder
from jaxrl.mesh import hosts


@contextlib.contextmanager
def mirrored(config: Config) -> Iterator[None]:
    """Keeps the folder of a run in its bucket inside the block. Collective: the first process does it.

    What the bucket has of the run is fetched first.

    Raises:
      UserError: another run is at work there, the bucket cannot be used, or, at the end, it lacks something.
    """
    folder = config.run_folder.path
    below = folder.relative_to(local_folder(config.run.output)).as_posix()
    url = f"{config.run.output.rstrip('/')}/{below}"
    if config.sft.run:
        raise UserError(
            f"sft.run = {config.sft.run!r}: a stage that runs share needs a folder, and run.output is "
            f"{config.run.output}; leave one of them out, or start from that run's weights by `jaxrl convert`"
        )
    if ".." in url.split("/"):
        raise UserError(f"run.output = {config.run.output!r}: write the address without ..")
    hosts.disks_apart = _are_apart(folder)
    parts, me = hosts.num_processes() if hosts.disks_apart else 1, jax.process_index()
    mirrors: list[subprocess.Popen[str]] = []

    def start(lock: int = 0) -> int:
        process, lock = _started(config, url, parts, me, lock)
        mirrors.append(process)
        return lock

    try:
        lock = hosts.on_first(start)
        if hosts.disks_apart:
            hosts.gather(lambda: lock if hosts.is_first() else start(lock))
        yield
    except BaseException:
        # The error of the run is the one to tell.
        with contextlib.suppress(UserError):
            _end(mirrors, config, url, quiet=False)
        raise
    finally:
        hosts.disks_apart = False
    # Collective: no process ends before the bucket has all.
    hosts.on_first(lambda: _end(mirrors, config, url))
    # Those of other hosts end with the lock.
    if not hosts.is_first():
        _end(mirrors, config, url)


def _are_apart(folder: pathlib.Path) -> bool:
    """Whether each process has a disk of its own, and not all the same one. Collective."""
    run = hosts.on_first(lambda: uuid.uuid4().hex)
    # Each is looked for by its name: a listing of a disk on the network may be an old one.
    marks = [folder.parent / f".process.{i}.{run}" for i in range(hosts.num_processes())]
    own = marks[jax.process_index()]
    own.parent.mkdir(parents=True, exist_ok=True)
    hosts.gather(own.touch)
    seen = hosts.gather(lambda: sum(mark.exists() for mark in marks))
    own.unlink()
    if {*seen} not in ({1}, {len(seen)}):
        raise UserError(
            f"some processes of this run share {folder}, and others do not; start one process on each host, "
            "or let XDG_CACHE_HOME name a folder on a disk that all hosts share"
        )
    return len(seen) > 1 and seen[0] == 1


def _started(
    config: Config, url: str, parts: int, part: int, lock: int
) -> tuple[subprocess.Popen[str], int]:
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    owner = f"process {os.getpid()} on {socket.gethostname()}, started {started}"
    folder, keep = str(config.run_folder.path), str(config.run.keep_checkpoints)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_buckets.mirror", url, folder, keep, owner]
        + [str(x) for x in (parts, part, lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the run alone.
        start_new_session=True,
    )
    answer = _answer(process)
    if answer is None or "error" in answer:
        with process:
            raise UserError(answer["error"] if answer else f"{url}: its mirror has ended")
    return process, answer["number"]


def _end(
    mirrors: list[subprocess.Popen[str]], config: Config, url: str, *, quiet: bool = True
) -> None:
    for process in mirrors:
        assert process.stdin is not None
        with process:
            process.stdin.close()
            answer = _answer(process) or {"left": ["what is new"], "fault": "its mirror has ended"}
        if left := answer["left"]:
            listed = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            message = (
                f"{listed} did not reach {url} ({answer['fault']}), and lies in {config.run_folder}; the "
                "same command on this host brings it there"
            )
            if not quiet:
                print(message, file=sys.stderr)
            raise UserError(message)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None
