"""Runs whose folder is in a bucket of gcp-storage-emulator or moto, on hosts whose disks are empty."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from digits import write_problems
from stores import ROOT, Store, store_of
from tiny_runs import SETTINGS, problems_in

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
        self._started: list[subprocess.Popen] = []
        write_problems(folder)

    def command(self, output: str, steps: int, **settings) -> list[str]:
        named = SETTINGS | MORE | problems_in(self._folder) | settings
        named |= {"run.output": output, "run.num_steps": steps}
        given = [f"--config.{name}={value}" for name, value in named.items()]
        return ["train", "--config", str(ROOT / "configs/dapo_tiny.py"), *given]

    def start(self, arguments: list[str]) -> subprocess.Popen:
        cache = self.disk / "jaxrl"
        cache.mkdir(parents=True, exist_ok=True)
        environment = self._store.environment | {
            "XDG_CACHE_HOME": str(self.disk),
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxrl", *arguments],
                env=environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Ends what a failed test has left."""
        for process in self._started:
            process.kill()
            process.wait()

    def run(self, arguments: list[str]) -> int:
        return self.start(arguments).wait()

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


def kill_all(process: subprocess.Popen) -> None:
    """Kills a run and its mirror, as the loss of their host does."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    process.wait()


def test_ten_kills_while_saving(store, hosts, tmp_path):
    steps, moments = 24, random.Random(0)
    assert hosts.run(hosts.command(str(tmp_path / "plain"), steps)) == 0, hosts.log.read_text()
    expected = rows(tmp_path / "plain/t/seed0")
    command = hosts.command(f"{store.url}/runs", steps)
    reached = []
    for _ in range(KILLS):
        hosts.next()
        process = hosts.start(command)
        # A checkpoint is on its way once its files are linked aside.
        begun: set[pathlib.Path] = set()
        wanted = moments.randint(1, 3)
        while len(begun) < wanted and process.poll() is None:
            begun |= {*(hosts.run_folder / ".sending").glob("*/checkpoints/*")}
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        assert process.poll() is None, hosts.log.read_text()
        kill_all(process)
        reached.append(max((row["step"] for row in rows_in(store)), default=-1))
    hosts.next()
    assert hosts.run(command) == 0, hosts.log.read_text()
    print(f"steps in the bucket at the kills: {reached}")
    assert rows_in(store) == expected == rows(hosts.run_folder)
    manifests = [name for name in store.names(RUN) if "manifests" in name]
    assert f"rl/checkpoints.manifests/{steps}.json" in manifests
    # A host that has never seen the run finds it finished.
    hosts.next()
    assert hosts.run(command) == 0
    assert "step" not in hosts.log.read_text().partition("report:")[0].partition("DAPO")[2]
