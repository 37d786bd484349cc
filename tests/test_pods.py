"""Files that start a run on many hosts: well-formed, of settings that exist, and one process a host."""

import pathlib
import re
import subprocess
import sys
import types

import pytest
import yaml

from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import leaf_types
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts

ROOT = pathlib.Path(__file__).parents[1]
PODS = sorted(path for path in (ROOT / "launch/pods").iterdir() if path.suffix != ".md")
KINDS = leaf_types(Config)


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.name)
def test_every_setting_exists_and_every_recipe_loads(path):
    text = path.read_text()
    for name in re.findall(r"--config\.([a-z_.]+)=", text):
        assert name in KINDS, name
    for recipe in set(re.findall(r"configs/[a-z0-9_]+\.py(?::[a-z0-9-]+)?", text)):
        load_config(Config, str(ROOT / recipe), {})


@pytest.mark.parametrize("path", [p for p in PODS if p.suffix in (".sh", ".sbatch")], ids=str)
def test_scripts_are_well_formed(path):
    subprocess.run(["bash", "-n", path], check=True)


def test_a_jobset_has_as_many_processes_as_its_slice_has_hosts():
    jobset = yaml.safe_load((ROOT / "launch/pods/gke_jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert spec["parallelism"] == spec["completions"] == 4 * 4 * 8 // chips
    assert [int(side) for side in sides] == [4, 4, 8]


def test_hosts_of_gpus_are_as_many_as_the_recipe_wants():
    sky = yaml.safe_load((ROOT / "launch/pods/skypilot.yaml").read_text())
    config = load_config(Config, str(ROOT / "configs/dapo_qwen32b.py:h100-128"), {})
    p, t, d = map(int, config.mesh.train.split("-"))
    assert sky["num_nodes"] * 8 == p * t * d


def stand_in(folder: pathlib.Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def test_slurm_starts_one_process_a_host_with_its_number(tmp_path):
    # More names than a pipe holds: whoever reads the first line only would kill the one that writes.
    stand_in(tmp_path, "scontrol", "echo node-a; seq -f node-%05g 20000")
    stand_in(tmp_path, "python", 'echo "$SLURM_NODEID: $*"')
    stand_in(tmp_path, "srun", 'shift; for i in 0 1; do SLURM_NODEID=$i "$@"; done')
    ran = subprocess.run(
        [ROOT / "launch/pods/slurm.sbatch", "configs/dapo_tiny.py", "--config.name=two words"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_NNODES": "2",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    expected = (
        "launch/train.py --config configs/dapo_tiny.py --config.hosts.coordinator=node-a:8476 "
        "--config.hosts.num_processes=2 --config.hosts.process_id={i} --config.name=two words"
    )
    assert ran.stdout.splitlines() == [f"{i}: {expected.format(i=i)}" for i in range(2)]


def test_a_slice_gets_the_command_on_all_of_its_hosts(tmp_path):
    stand_in(tmp_path, "gcloud", "printf '%s\\n' \"$@\"")
    ran = subprocess.run(
        [
            ROOT / "launch/pods/tpu_vm.sh",
            "pod",
            "zone-a",
            "configs/x.py",
            "--config.name=two words",
        ],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    *options, command = ran.stdout.splitlines()
    assert "--worker=all" in options
    assert command == (
        "cd ~/jaxrl && python launch/train.py --config configs/x.py --config.hosts.coordinator=auto "
        "--config.name=two\\ words"
    )


def test_pathways_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(UserError, match="needs the package pathwaysutils"):
        hosts.start(hosts.HostsConfig(coordinator="pathways"))
    begun = []
    there = types.SimpleNamespace(initialize=lambda: begun.append(True))
    monkeypatch.setitem(sys.modules, "pathwaysutils", there)
    hosts.start(hosts.HostsConfig(coordinator="pathways"))
    assert begun == [True]
