"""Runs whose folder is in a bucket of gcp-storage-emulator or moto, on hosts whose disks are empty."""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable

import pytest
from digits import write_problems
from processes import started
from stores import ROOT, Store, store_of
from tiny_runs import SETTINGS, problems_in

from jaxrl.errors import EXIT_USER_ERROR
from jaxrl.tracking.metrics import read_metrics, without_timings

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3000)]

RUN = "runs/t/seed0"
KILLS = 10
MORE = {
    "name": "t",
    "sft.num_steps": 40,
    "sft.save_every": 10,
    "sft.examples_per_step": 16,
    "sft.optim.lr": 1e-2,
    "data.train.size": 0,
    "data.evaluation.size": 0,
    "rollout.max_generation_batches": 1,
    "rollout.on_shortage": "fill",
    "run.save_every": 1,
    "evaluation.every": 0,
    "evaluation.num_samples": 1,
    "run.rollouts_every": 5,
}


class Hosts:
    """Starts a run on one host after the other, each with an empty disk of its own."""

    def __init__(self, store: Store, folder: pathlib.Path):
        self._store, self._folder, self.number = store, folder, 0
        self._started = contextlib.ExitStack()
        write_problems(folder)

    def command(self, output: str, steps: int, **settings) -> list[str]:
        named = SETTINGS | MORE | problems_in(self._folder) | settings
        named |= {"run.output": output, "run.num_steps": steps}
        given = [f"--config.{name}={value}" for name, value in named.items()]
        return ["train", "--config", str(ROOT / "configs/dapo_tiny.py"), *given]

    def start(self, arguments: list[str], *, module: bool = True) -> subprocess.Popen:
        cache = self.disk / "jaxrl"
        cache.mkdir(parents=True, exist_ok=True)
        environment = self._store.environment | {
            "XDG_CACHE_HOME": str(self.disk),
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, *(["-m", "jaxrl"] if module else []), *arguments]
        with self.log.open("a") as log:
            streams = {"stdout": log, "stderr": log}
            begun = started([command], env=environment, cwd=self._folder, **streams)
            (process,) = self._started.enter_context(begun)
        return process

    def end(self) -> None:
        """Ends what a failed test has left."""
        self._started.close()

    def run(self, arguments: list[str], **options: bool) -> int:
        return self.start(arguments, **options).wait()

    def next(self) -> None:
        self.number += 1

    @property
    def disk(self) -> pathlib.Path:
        return self._folder / f"host{self.number}"

    @property
    def log(self) -> pathlib.Path:
        return self._folder / f"host{self.number}.log"

    @property
    def run_folder(self) -> pathlib.Path:
        return self.disk / "jaxrl/runs" / self._store.url.replace("://", "/") / RUN


@pytest.fixture(params=["gs", "s3"])
def store(request, tmp_path):
    with store_of(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def hosts(store, tmp_path):
    made = Hosts(store, tmp_path)
    yield made
    made.end()


def rows(folder: pathlib.Path) -> list[dict]:
    return [without_timings(row) for row in read_metrics(folder / "rl/metrics.jsonl")]


def rows_in(store: Store) -> list[dict]:
    """The rows of the run in the bucket."""
    parts = [name for name in store.names(RUN) if name.startswith("rl/metrics.jsonl.parts/")]
    content = b"".join(store.system.cat_file(f"bucket/{RUN}/{name}") for name in parts)
    found = [json.loads(line) for line in content.splitlines()]
    return [without_timings(row) for row in found]


def manifests_in(store: Store) -> set[tuple[str, int]]:
    """Stage and step of each checkpoint with a manifest in the bucket."""
    names = [x for x in store.names(RUN) if "checkpoints.manifests/" in x]
    return {(x.partition("/")[0], int(pathlib.Path(x).stem)) for x in names}


def watch(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Waits for a condition, while a process is at work."""
    while not condition():
        assert process.poll() is None, "it has ended"
        time.sleep(0.1)


def kill_all(process: subprocess.Popen) -> None:
    """Kills a run and its mirror, as the loss of their host does."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    process.wait()


def test_ten_kills_while_saving(store, hosts, tmp_path):
    # More than ten runs come to on a machine that sees their checkpoints late.
    steps, moments = 48, random.Random(0)
    assert hosts.run(hosts.command(str(tmp_path / "plain"), steps)) == 0, hosts.log.read_text()
    expected = rows(tmp_path / "plain/t/seed0")
    command = hosts.command(f"{store.url}/runs", steps)
    reached = []
    for _ in range(KILLS):
        hosts.next()
        process = hosts.start(command)
        before, wanted = manifests_in(store), moments.randint(0, 2)
        # A checkpoint is on its way once its files are linked aside.
        while process.poll() is None:
            is_sending = any((hosts.run_folder / ".sending").glob("*/checkpoints/*"))
            if is_sending and len(manifests_in(store) - before) >= wanted:
                break
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 1))
        assert process.poll() is None, hosts.log.read_text()
        kill_all(process)
        reached.append(sorted(manifests_in(store), key=lambda x: (x[0] == "rl", x[1]))[-1:])
    hosts.next()
    assert hosts.run(command) == 0, hosts.log.read_text()
    print(f"newest manifests in the bucket at the kills: {reached}")
    assert rows_in(store) == expected == rows(hosts.run_folder)
    assert ("rl", steps) in manifests_in(store)
    # A host that has never seen the run finds it finished.
    hosts.next()
    assert hosts.run(command) == 0
    assert "step" not in hosts.log.read_text().partition("report:")[0].partition("DAPO")[2]


def test_twenty_kills_of_a_toy(store, hosts, tmp_path):
    moments, url, at = random.Random(1), f"{store.url}/{RUN}", []
    for _ in range(20):
        hosts.next()
        script = [str(pathlib.Path(__file__).with_name("toy_run.py")), url]
        process = hosts.start([*script, str(hosts.run_folder), "30"], module=False)
        before = manifests_in(store)
        # Half of the kills come before a checkpoint is whole in the bucket.
        until_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until_s:
            if manifests_in(store) - before or (
                len(at) % 2 and (hosts.run_folder / ".sending").exists()
            ):
                break
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 0.5))
        if process.poll() is not None:
            break
        kill_all(process)
        at.append(max((step for _, step in manifests_in(store)), default=0))
    hosts.next()
    assert hosts.run([*script, str(hosts.run_folder), "30"], module=False) == 0, (
        hosts.log.read_text()
    )
    print(f"{len(at)} kills, newest steps in the bucket: {at}")
    assert at == sorted(at) and len(at) >= KILLS
    # Worked out by itself.
    weights, expected = b"0" * 300_000, []
    for step in range(1, 31):
        weights = hashlib.blake2b(weights).digest() * 4688
        expected.append({"step": step, "crc": zlib.crc32(weights)})
    assert rows_in(store) == expected
    assert store.system.cat_file(f"bucket/{RUN}/rl/checkpoints/30/weights") == weights


def test_a_second_run_is_refused_and_damage_is_named(store, hosts, tmp_path):
    steps = 6
    plain = hosts.start(hosts.command(str(tmp_path / "plain"), steps))
    assert plain.wait() == 0, hosts.log.read_text()
    hosts.next()
    url = f"{store.url}/runs"
    first = hosts.start(hosts.command(url, 4))
    watch(first, lambda: bool(store.names(f"{RUN}/lock")))
    hosts.next()
    assert hosts.run(hosts.command(url, 4)) == EXIT_USER_ERROR
    said = hosts.log.read_text().splitlines()[-1]
    assert re.fullmatch(rf"error: {url}/t/seed0 is in use by process {first.pid} on .*", said)
    assert first.wait() == 0
    # A file of the newest checkpoint changes, and of a newer one only a part has come.
    folder = f"bucket/{RUN}/rl/checkpoints"
    name = next(x for x in store.names(f"{RUN}/rl/checkpoints/4") if "/d/" in x)
    content = store.system.cat_file(f"{folder}/4/{name}")
    store.system.pipe_file(f"{folder}/4/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    store.system.pipe_file(f"{folder}/5/actor/d/0", b"half")
    hosts.next()
    assert hosts.run(hosts.command(url, steps)) == 0, hosts.log.read_text()
    said = hosts.log.read_text()
    assert f"{url}/t/seed0/rl/checkpoints/4/ is damaged" in said
    assert f"{url}/t/seed0/rl/checkpoints/5/ is half written: it has no manifest" in said
    assert "checkpoint of step 4 skipped" in said
    assert rows_in(store) == rows(tmp_path / "plain/t/seed0")
    hosts.next()
    commands = (
        ["report", f"{url}/t/seed0", str(tmp_path / "plain/t/seed0"), f"--out={store.url}/x.html"],
        ["convert", "--path", f"{url}/t/seed0", "--out", f"{store.url}/hf"],
        ["diff", f"{url}/t/seed0", str(tmp_path / "plain/t/seed0")],
    )
    for command in commands:
        assert hosts.run(command) == 0, hosts.log.read_text()
    assert hosts.log.read_text().splitlines()[-1].startswith("equal: ")
    assert store.system.cat_file("bucket/x.html").startswith(b"<!")
    assert {"config.json", "model.safetensors"} <= {*store.names("hf")}


def test_a_store_that_fails_stops_no_step(store, hosts, tmp_path):
    url, steps = f"{store.url}/runs", 8
    assert hosts.run(hosts.command(f"{store.url}-not-there/runs", steps)) == EXIT_USER_ERROR
    said = hosts.log.read_text().splitlines()
    assert said[-1].startswith(f"error: {store.url}-not-there/runs/t/seed0 cannot be used")
    hosts.next()
    store.gate.mode = "503"
    assert hosts.run(hosts.command(url, steps)) == EXIT_USER_ERROR
    assert hosts.log.read_text().splitlines()[-1].startswith(f"error: {url}/t/seed0 cannot be used")
    hosts.next()
    store.gate.mode = "open"
    process = hosts.start(hosts.command(url, steps))
    watch(process, (hosts.run_folder / "rl/metrics.jsonl").exists)
    # No request is answered while all steps are made.
    store.gate.mode = "silent"
    watch(process, lambda: "report:" in hosts.log.read_text())
    assert len(rows(hosts.run_folder)) == steps
    store.gate.mode = "503"
    assert process.wait() == EXIT_USER_ERROR
    said = hosts.log.read_text().splitlines()
    assert sum("takes no files" in line for line in said) == 1
    assert f"rl/checkpoints/{steps}/" in said[-1] and f"lies in {hosts.run_folder}" in said[-1]
    store.gate.mode = "open"
    assert ("rl", steps) not in manifests_in(store)
    assert hosts.run(hosts.command(url, steps)) == 0, hosts.log.read_text()
    assert ("rl", steps) in manifests_in(store) and rows_in(store) == rows(hosts.run_folder)
