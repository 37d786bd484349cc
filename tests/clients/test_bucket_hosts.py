"""A run of two processes without a shared disk, in a bucket of gcp-storage-emulator."""

import contextlib
import pathlib
import shutil
import sys

import pytest
from digits import write_problems
from processes import free_port, started
from stores import ROOT, Store, store_of
from tiny_runs import SETTINGS, problems_in

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


def run(store: Store, folder: pathlib.Path, output: str, steps: int, processes: int) -> str:
    """Runs it, each process with a disk of its own; returns what they said."""
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
        ended = [
            each.wait() for each in stack.enter_context(started(commands, cwd=folder, **streams))
        ]
    assert not any(ended), log.read_text()[-5000:]
    return log.read_text()


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
