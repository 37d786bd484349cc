"""Hosts that fit together pass, and the first thing that differs is named on all of them."""

import dataclasses
import os
import pathlib
import re
import resource
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from processes import free_port, started

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.files import fingerprint
from jaxrl.mesh import hosts
from jaxrl.mesh.pools import take_devices
from jaxrl.models.kernels import proof
from jaxrl.trainer.resolved import resolve
from jaxrl_pods import doctor
from jaxrl_pods.doctor import check_facts, in_time, try_kernels

ROOT = pathlib.Path(__file__).parents[3]


def facts(**changes) -> list[dict]:
    """Three hosts, of which the last one is different."""
    alike = {"host": "a", "clock_s": 100.0, "devices": "4 x TPU v5", "same": {"jax": "0.10.2"}}
    return [alike, alike | {"host": "b", "clock_s": 101.9}, alike | {"host": "c"} | changes]


def test_hosts_that_are_alike_pass():
    check_facts(facts(), 3)
    check_facts(facts(), 0)


@pytest.mark.parametrize(
    ("changes", "num_hosts", "message"),
    [
        ({}, 4, "3 hosts have met, and --hosts is 4"),
        ({"devices": "3 x TPU v5"}, 3, r"process 2 \(host c\) has 3 x TPU v5, process 0 4 x"),
        # The median of 100, 101.9 and 95.
        ({"clock_s": 95.0}, 3, r"clock of process 2 \(host c\) is -5 s from the median"),
        ({"same": {"jax": "0.11.0"}}, 3, r"jax is 0.11.0 on process 2 .* and 0.10.2 on process 0"),
        ({"same": {}}, 3, "jax is None on process 2"),
    ],
)
def test_what_differs_is_named(changes, num_hosts, message):
    with pytest.raises(UserError, match=message):
        check_facts(facts(**changes), num_hosts)


def test_the_source_has_the_data_that_runs_read():
    source = doctor.sources()["jaxrl"]
    assert source == ROOT / "jaxrl"
    found = {path for pattern in doctor.SOURCES for path in source.glob(pattern)}
    data = ("mesh/chips.toml", "models/huggingface/architectures.yaml", "rewards/units.txt")
    assert {source / name for name in (*data, "models/shapes.toml", "cli.py")} <= found
    assert doctor.sources()["jaxrl_planner"] == ROOT / "extensions" / "jaxrl_planner"


def test_a_fingerprint_sees_sizes_ends_and_the_middle(tmp_path):
    path = tmp_path / "model.safetensors"
    zeros = bytes(2**20)
    contents = [
        b"a" + 2 * zeros,
        2 * zeros + b"a",
        zeros + b"a" + zeros,
        2 * zeros,
        2 * zeros + b"\0",
    ]
    # Of 32 MiB half a MiB in the middle, as one layer is trained.
    contents += [32 * zeros, 16 * zeros + b"a" * 2**20 + 15 * zeros]
    seen = set()
    for content in contents:
        path.write_bytes(content)
        seen.add(fingerprint(tmp_path, "*.json", "*.safetensors"))
    path.rename(tmp_path / "other.safetensors")
    assert len(seen | {renamed := fingerprint(tmp_path, "*.json", "*.safetensors")}) == 8
    (tmp_path / "README.md").write_text("a note")
    assert fingerprint(tmp_path, "*.json", "*.safetensors") == renamed
    assert fingerprint(tmp_path / "missing", "*") == fingerprint(tmp_path, "*.none")


def test_a_disk_that_stores_a_part_is_full(tmp_path):
    config = Config()
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output=str(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(UserError, match="could not be written"):
            doctor._disk(config, 60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.rglob(".doctor*"))


def test_a_file_system_that_does_not_answer_is_named(tmp_path):
    # Opening it blocks until somebody writes, as on a mount that hangs.
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"the weights did not answer for 0 s on host"):
        in_time(0.2, "the weights", (tmp_path / "model.safetensors").read_bytes)
    assert in_time(60.0, "", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(60.0, "", lambda: 1 // 0)


def test_a_line_for_each_kernel(tmp_path, monkeypatch, capsys):
    changes = {"weights": "", "rollout.slots": "auto", "run.output": str(tmp_path)}
    config = load_config(Config, f"{ROOT}/configs/grpo_tiny.py", changes)
    placement = take_devices(resolve(config).pools, jax.devices()[:1])
    try_kernels(config, placement)
    assert capsys.readouterr().out == "kernels     none to try\n"
    short = dataclasses.replace(config.rollout, cache="paged", cache_tokens=16)
    try_kernels(dataclasses.replace(config, rollout=short), placement)
    told = "kernels     not tried, since the run cannot begin: "
    assert capsys.readouterr().out.startswith(told)
    # As the roles of a run on another device do it.
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(proof.jax, "devices", lambda: [gpu])
    trial = proof.Trial("doubling", lambda x: 2 * x, lambda x: x + x, lambda: (jnp.ones(2),))
    monkeypatch.setattr(doctor, "build_roles", lambda *_: proof.stands(trial, gpu, hosts.gather))
    try_kernels(config, placement)
    assert capsys.readouterr().out.startswith("kernels     doubling agrees with XLA, ")


def doctors(
    folders: list[pathlib.Path], *options: str, devices: int = 8
) -> list[tuple[str, str, int]]:
    """(stdout, stderr, status) of a process in each folder."""
    command = [
        *(sys.executable, "-m", "jaxrl", "doctor", f"--config={ROOT}/configs/grpo_tiny.py"),
        *(f"--config.mesh.simulated_devices={devices}", f"--config.mesh.train=1-1-{devices}"),
        *(f"--config.mesh.generate=1-1-1-{devices}", "--config.weights=model"),
        *(f"--config.hosts.coordinator=localhost:{free_port()}", "--config.hosts.num_processes=2"),
        *options,
    ]
    commands = [
        ["env", f"--chdir={folder}", *command, f"--config.hosts.process_id={i}"]
        for i, folder in enumerate(folders)
    ]
    with started(commands) as processes:
        return [(*process.communicate(timeout=300), process.returncode) for process in processes]


@pytest.mark.long
def test_two_hosts_are_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs = f"--config.run.output={tmp_path / 'runs'}"
    (tmp_path / "model").mkdir()
    (out, errors, status), (silent, _, other) = doctors([tmp_path] * 2, "--hosts=2", runs)
    assert (status, other) == (0, 0), errors
    assert "devices     2 hosts, each with 4 x cpu" in out
    assert re.search(r"disk +\S+: shared, \d+ GB free, \d+ MB/s", out)
    # 0 + 1 + ... + 7
    assert re.search(r"all-reduce +28 on all 8 devices, 4 MB .* GB/s", out)
    assert re.search(r"hand-over +from 4 devices to 4, 4 MB .* GB/s", out)
    assert "devices" not in silent and not list(tmp_path.rglob(".doctor*"))
    # The same names with other content.
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "model.safetensors").write_text(folder.name)
    for _, errors, status in doctors(folders, runs):
        assert status == 2 and re.search(
            r"error: model is \w+ on process 1 .* on process 0", errors
        )


@pytest.mark.long
def test_hosts_of_one_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "model").mkdir()
    runs = f"--config.run.output={tmp_path / 'runs'}"
    (out, errors, status), (*_, other) = doctors([tmp_path] * 2, runs, devices=2)
    assert (status, other) == (0, 0), errors
    assert re.search(r"hand-over +from 1 devices to 1, 4 MB .* GB/s", out)
