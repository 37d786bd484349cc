"""Runs of several processes without a shared disk, in buckets of gcp-storage-emulator and moto."""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from digits import write_problems
from processes import free_port, started
from stores import ROOT, Store, store_of
from tiny_runs import SETTINGS, problems_in

from jaxrl.errors import EXIT_TRY_AGAIN
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.metrics import read_metrics, without_timings

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1500)]

MORE = {
    "name": "t",
    "mesh.simulated_devices": 4,
    "mesh.train": "1-2-2",
    "mesh.generate": "1-1-2-2",
    "mesh.fsdp": 2,
    "algorithm.dataflow": "grpo",
    "sft.num_steps": 3,
    "sft.examples_per_step": 16,
    "data.train.size": 12,
    "data.evaluation.size": 0,
    "evaluation.every": 0,
    "run.save_every": 1,
}


def run(
    store: Store,
    folder: pathlib.Path,
    output: str,
    steps: int,
    processes: int,
    kill_when: Callable[[], bool] = lambda: False,
) -> str:
    """Runs it, each process with a disk of its own; returns what they said.

    Args:
      kill_when: whether the last process is to be killed with its mirror; then the others have to end, too.
    """
    named = SETTINGS | MORE | problems_in(folder) | {"run.output": output, "run.num_steps": steps}
    address, commands = f"localhost:{free_port()}", []
    for i in range(processes):
        own = {
            "hosts.num_processes": processes,
            "hosts.process_id": i,
            "hosts.coordinator": address,
        }
        given = [
            f"--config.{name}={x}"
            for name, x in (named | own).items()
            if processes > 1 or name not in own
        ]
        arguments = ["train", "--config", str(ROOT / "configs/dapo_tiny.py"), *given]
        shared = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        environment = store.environment | shared | {"XDG_CACHE_HOME": str(folder / f"disk{i}")}
        (folder / f"disk{i}/jaxrl").mkdir(parents=True, exist_ok=True)
        commands.append(
            [
                "env",
                *(f"{k}={v}" for k, v in environment.items()),
                sys.executable,
                "-m",
                "jaxrl",
                *arguments,
            ]
        )
    log = folder / "log"
    with contextlib.ExitStack() as stack:
        streams = {"stdout": stack.enter_context(log.open("w")), "stderr": -2}
        at_work = stack.enter_context(started(commands, cwd=folder, **streams))
        is_killed = False
        while None in [each.poll() for each in at_work]:
            if not is_killed and kill_when():
                kill(at_work[-1])
                is_killed = True
            time.sleep(0.2)
    ended = [each.returncode for each in at_work]
    expected = (
        [*[EXIT_TRY_AGAIN] * (processes - 1), -signal.SIGKILL] if is_killed else [0] * processes
    )
    assert ended == expected, log.read_text()[-5000:]
    return log.read_text()


def kill(process: subprocess.Popen) -> None:
    """Kills a run and its mirror, as the loss of their host does."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def wipe(folder: pathlib.Path) -> None:
    for disk in folder.glob("disk*"):
        shutil.rmtree(disk)


def rows(folder: pathlib.Path, stage: str) -> list[dict]:
    return [without_timings(row) for row in read_metrics(folder / stage / "metrics.jsonl")]


def test_two_disks_are_lost(tmp_path):
    write_problems(tmp_path)
    with store_of("gs", tmp_path) as store:
        run(store, tmp_path, str(tmp_path / "plain"), 4, 2)
        plain, output = tmp_path / "plain/t/seed0", f"{store.url}/runs"
        here = tmp_path / "disk0/jaxrl/runs" / store.url.replace("://", "/") / "runs/t/seed0"
        run(store, tmp_path, output, 2, 2)
        # A part is no checkpoint by itself.
        assert StoredCheckpoints(here / "rl/checkpoints").newest_intact() is None
        wipe(tmp_path)
        # A host is lost while it sends its part of step 3. Requests take a while, so that this is seen.
        store.gate.delay_s = 0.2
        parts = "runs/t/seed0/parts"
        said = run(store, tmp_path, output, 4, 2, lambda: bool(store.names(parts)))
        store.gate.delay_s = 0.0
        assert "process 1" in said
        wipe(tmp_path)
        run(store, tmp_path, output, 4, 2)
        for stage in ("sft", "rl"):
            assert rows(here, stage) == rows(plain, stage)
        names = store.names("runs/t/seed0")
        assert "rl/checkpoints.manifests/4.json" in names
        assert not [name for name in names if name.startswith("parts/")]
        wipe(tmp_path)
        said = run(store, tmp_path, output, 5, 1)
        assert "going on from the checkpoint of step 4" in said
        assert StoredCheckpoints(here / "rl/checkpoints").newest_intact() == 5


@contextlib.contextmanager
def toys(store: Store, folder: pathlib.Path, hosts: int, steps: int) -> Iterator[list]:
    """Runs of `toy_run.py`, one for each host with its own disk; killed with their mirrors at the end."""
    script = [sys.executable, str(ROOT / "tests/clients/toy_run.py"), f"{store.url}/toy"]

    def commands(ids: range, lock: int) -> list[list[str]]:
        return [
            [*script, str(folder / f"disk{i}/run"), str(steps), str(hosts), str(i), str(lock)]
            for i in ids
        ]

    streams = {"stderr": None, "env": store.environment}
    with started(commands(range(1), 0), **streams) as first:
        lock = int(first[0].stdout.readline() or -1)
        with started(commands(range(1, hosts), lock), **streams) as others:
            try:
                yield [*first, *others]
            finally:
                for process in (*first, *others):
                    if process.poll() is None:
                        kill(process)


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_three_hosts_are_killed_while_they_send_parts(kind, tmp_path):
    moments, steps, at = random.Random(1), 12, []
    with store_of(kind, tmp_path) as store:

        def newest() -> int:
            found = [x for x in store.names("toy") if x.startswith("rl/checkpoints.manifests/")]
            return max((int(pathlib.Path(x).stem) for x in found), default=0)

        while len(at) < 6:
            # Requests take a while, so parts are under way most of the time.
            store.gate.delay_s = 0.05
            with toys(store, tmp_path, 3, steps) as processes:
                until_s, before = time.monotonic() + 120, newest()
                while time.monotonic() < until_s:
                    if store.names("toy/parts") and (len(at) % 2 or newest() > before):
                        break
                    if all(x.poll() is not None for x in processes):
                        break
                time.sleep(moments.uniform(0, 0.5))
            at.append(newest())
            wipe(tmp_path)
        store.gate.delay_s = 0.0
        with toys(store, tmp_path, 3, steps) as processes:
            assert [x.wait(240) for x in processes] == [0, 0, 0]
        # `names` also makes s3fs forget the listings from before.
        assert newest() == steps
        print(f"{len(at)} kills, newest steps in the bucket: {at}")
        assert at == sorted(at) and at[-1] > 1
        manifest = json.loads(
            store.system.cat_file(f"bucket/toy/rl/checkpoints.manifests/{steps}.json")
        )
        assert manifest.keys() == {"weights", "weights1", "weights2"}
        for host, name in enumerate(sorted(manifest)):
            weights = b"%d" % host * 300_000
            for _ in range(steps):
                weights = hashlib.blake2b(weights).digest() * 4688
            assert store.system.cat_file(f"bucket/toy/rl/checkpoints/{steps}/{name}") == weights
            assert manifest[name] == [len(weights), zlib.crc32(weights)]
        assert not store.names("toy/parts")
