"""A disk that is full: one line, status 2, nothing torn, and a run that goes on once there is room."""

import dataclasses
import os
import shutil
import subprocess
import sys

import jax
import pytest
from test_loop import Counter, rows_of, run
from test_program import curve, make_config, one_device, problems, warm, whole  # noqa: F401

from jaxrl.commands.run_commands import write_report
from jaxrl.config.config_tree import flatten_config, format_config
from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.tracking.durable import disk_errors
from jaxrl.trainer import program

# TensorStore, which still has requests when Orbax has given up, says so to an event loop that is gone.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. None")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class SmallDisk:
    """A file system of its own."""

    def __init__(self, path):
        self.path = path

    def resize(self, num_bytes: int) -> None:
        """Mounts it, empty, or changes its size."""
        again = "remount," if os.path.ismount(self.path) else ""
        options = ["-t", "tmpfs", "-o", f"{again}size={num_bytes}"]
        subprocess.run(["mount", *options, "tmpfs", self.path], check=True, capture_output=True)

    def leave(self, num_bytes: int) -> None:
        """Makes it so small that this much can still be written."""
        free = os.statvfs(self.path)
        self.resize((free.f_blocks - free.f_bfree) * free.f_frsize + num_bytes)

    def close(self) -> None:
        """Takes it away."""
        if os.path.ismount(self.path):
            subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    disk = SmallDisk(path)
    try:
        disk.resize(300_000)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    yield disk
    disk.close()


class Wide(Counter):
    """Its checkpoints are 40 kB that no compression makes smaller."""

    @staticmethod
    def _state_of(count):
        state = Counter._state_of(count)
        noise = jax.random.normal(jax.random.key(count), (10_000,))
        return dataclasses.replace(state, params=state.params | {"noise": noise})


@pytest.mark.parametrize("size", [8_000, 40_000, 100_000, 150_000, 300_000])
def test_a_stage_tells_of_it_and_goes_on_to_the_same_rows(size, disk, capfd):
    """At each size the disk fills up in another file: logs, a first or later checkpoint, a manifest."""

    def metrics(step):
        return {f"metric/{i}": step / (i + 1) for i in range(40)}

    options = {"metrics": metrics, "num_steps": 40, "save_every": 3, "keep": 2}
    run(disk.path.parent / "whole", counter=Wide(), **options)
    disk.resize(size)
    capfd.readouterr()
    line = r"No space left on device\)[^\n]*free space[^\n]*$"
    # As a program does: which file is the first without room depends on what TensorStore has written by then.
    with pytest.raises(UserError, match=line), disk_errors(disk.path):
        run(disk.path / "rl", counter=Wide(), **options)
    # Of Orbax's threads each would tell of it with its stack.
    assert "Traceback" not in capfd.readouterr().err
    disk.resize(10**8)
    counter = run(disk.path / "rl", counter=Wide(), **options)
    assert int(counter.state.step) == 40
    assert rows_of(disk.path / "rl") == rows_of(disk.path.parent / "whole")


def test_files_of_the_run_and_its_report(disk, problems, whole):  # noqa: F811
    """A finished run writes its report again, and then its settings."""
    disk.resize(10**8)
    config = make_config(disk.path, problems, num_steps=4)
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    report = config.run_folder.report.read_bytes()
    (config.run_folder.path / "lock").unlink()
    disk.leave(0)
    with pytest.raises(UserError, match=r"(lock|seed0).* \(No space left on device\)"):
        program.train(config, devices=one_device(), report=write_report)
    disk.leave(8192)
    with pytest.raises(UserError, match=r"report\.html could not .* \(No space left on device\)"):
        program.train(config, devices=one_device(), report=write_report)
    assert config.run_folder.report.read_bytes() == report
    # Where a run is new its settings come first.
    fresh = dataclasses.replace(config, name="fresh")
    with pytest.raises(UserError, match=r"No space left on device"):
        program.train(fresh, devices=one_device(), report=write_report)
    disk.resize(10**8)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert config.run_folder.config.read_text() == format_config(config)
    assert curve(config) == curve(whole)


@pytest.mark.slow
def test_the_command_ends_with_status_2_and_goes_on(disk, problems, whole):  # noqa: F811
    disk.resize(10**8)
    config = make_config(disk.path, problems, num_steps=4)
    warm(config, whole)
    recipe = disk.path.parent / "recipe.py"
    recipe.write_text(
        "from jaxrl.config.schema import Config\n"
        "from jaxrl.config.config_tree import to_config_dict\n"
        "def get_config():\n"
        "    config = to_config_dict(Config())\n"
        f"    config.update_from_flattened_dict({flatten_config(config)!r})\n"
        "    return config\n"
    )
    # Room for the first checkpoint and not for the second.
    state = sum(
        p.stat().st_size
        for p in (whole.run_folder.path / "rl/checkpoints/4").rglob("*")
        if p.is_file()
    )
    disk.leave(int(1.5 * state) + 100_000)
    command = [sys.executable, f"{ROOT}/launch/train.py", "--config", str(recipe)]
    environment = os.environ | {"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == EXIT_USER_ERROR, ended.stderr
    *before, last = ended.stderr.splitlines()
    assert last.startswith("error: ") and "(No space left on device)" in last
    assert not any(line.startswith(("error: ", "ERROR")) for line in before), ended.stderr
    disk.resize(10**8)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert curve(config) == curve(whole)
