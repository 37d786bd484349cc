"""The peak memory of a run, measured and planned."""

import pathlib
import re
import subprocess
import sys

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh import devices
from jaxrl_planner.make_plan import peak_memory_line, planned_bytes
from jaxrl_planner.memory import ResidentBuffers
from jaxrl_planner.plan import Plan, PlannedPool

RECIPE = str(pathlib.Path(__file__).parents[3] / "configs" / "dapo_tiny.py")
GB = 10**9


def pool(name: str, num_devices: int, *, sampling: int, learning: int) -> PlannedPool:
    buffers = (
        ResidentBuffers("cache", "", 1, sampling, sampling=True, learning=False),
        ResidentBuffers("gradients", "", 1, learning, sampling=False, learning=True),
    )
    return PlannedPool(name, "", num_devices, buffers)


def test_the_larger_phase_of_every_pool_counts():
    plan = Plan(
        "two pools",
        (
            pool("actor", 4, sampling=2 * GB, learning=3 * GB),
            pool("critic", 2, sampling=5 * GB, learning=GB),
        ),
    )
    assert planned_bytes(plan, per_device=True) == 5 * GB
    assert planned_bytes(plan, per_device=False) == (4 * 3 + 2 * 5) * GB


# More than whatever the process has had before, in a process of its own.
ALLOCATES = """
import numpy as np
from jaxrl.mesh.devices import peak_process_bytes

before = peak_process_bytes()
block = np.ones(before // 8 + 25_000_000)
after = peak_process_bytes()
assert after - before >= 100_000_000, (before, after)
del block
assert peak_process_bytes() >= after
"""


@pytest.mark.long
def test_the_peak_of_a_process_stays():
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_run_tells_its_memory_beside_the_plan():
    line = peak_memory_line(load_config(Config, RECIPE, {}))
    measured, planned = map(float, re.findall(r"([\d.]+) GB", line))
    assert "in this process" in line and "--dry_run counts" in line
    assert measured == pytest.approx(devices.peak_process_bytes() / GB, abs=0.06)
    assert 0 < planned < measured


def test_a_recipe_that_cannot_be_traced_is_no_error_after_the_run():
    config = load_config(Config, RECIPE, {"mesh.layout": "auto"})
    line = peak_memory_line(config)
    assert "(no plan to compare with: mesh.layout" in line
