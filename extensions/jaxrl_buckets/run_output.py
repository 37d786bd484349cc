"""A run whose `run.output` is in a bucket: it works in a folder of this host, which `mirror` sends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.files import local_folder
from jaxrl.mesh import hosts
from jaxrl_buckets.mirror import NOTE


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
    mirrors: list[subprocess.Popen[str]] = []
    hosts.on_first(lambda: mirrors.append(_started(config, url)))
    notes = hosts.gather(lambda: (folder / NOTE).read_text() if (folder / NOTE).exists() else "")
    try:
        if len({*notes}) > 1:
            raise UserError(
                f"the processes of this run do not share {folder}; let XDG_CACHE_HOME name a folder on a "
                "disk that all hosts share"
            )
        yield
    except BaseException:
        # The error of the run is the one to tell.
        with contextlib.suppress(UserError):
            _end(mirrors, config, url, quiet=False)
        raise
    # Collective: no process ends before the bucket has all.
    hosts.on_first(lambda: _end(mirrors, config, url))


def _started(config: Config, url: str) -> subprocess.Popen[str]:
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    owner = f"process {os.getpid()} on {socket.gethostname()}, started {started}"
    folder, keep = str(config.run_folder.path), str(config.run.keep_checkpoints)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_buckets.mirror", url, folder, keep, owner],
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
    return process


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
