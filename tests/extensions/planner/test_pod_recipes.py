"""Recipes for pods: layouts have the devices of a topology, and two layers of each compile for it."""

import dataclasses
import importlib.util
import pathlib

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import ParallelLayout
from jaxrl_planner.hardware.cluster import Cluster, read_topology
from jaxrl_planner.make_plan import compile_plan

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
RECIPES = {
    "dapo_qwen32b.py:v5p-128": ("v5p:4x4x8", 128),
    "dapo_qwen32b.py:v6e-256": ("v6e:16x16", 256),
    "dapo_qwen32b.py:h100-128": ("h100:16x8", 128),
    "dapo_qwen32b.py:h200-64": ("h200:8x8", 64),
    "dapo_qwen7b.py": ("h100:1x8", 8),
    "grpo_qwen3_8b.py": ("v5p:2x2x2", 8),
    "grpo_qwen35_9b.py": ("h100:1x8", 8),
    "grpo_gpt_oss_20b.py": ("h100:2x8", 16),
    "grpo_qwen35_35b_a3b.py": ("h100:2x8", 16),
    "ppo_llama8b.py": ("h100:1x8", 8),
    "safe_rlhf_llama8b.py": ("h100:2x8", 16),
    "dapo_qwen3_30b_a3b.py": ("h100:4x8", 32),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layout_has_the_devices_of_its_topology(recipe):
    topology, num_devices = RECIPES[recipe]
    config = load_config(Config, str(CONFIGS / recipe), {})
    Cluster.parse(topology)
    layout = ParallelLayout.from_config(config.mesh)
    assert layout.num_devices == num_devices
    slots = config.rollout.slots
    assert slots == "auto" or slots % (layout.d * layout.d_g) == 0


def test_a_layout_that_has_no_name_is_refused():
    with pytest.raises(UserError, match="is not one of v5p-128, v6e-256"):
        load_config(Config, str(CONFIGS / "dapo_qwen32b.py:h100-64"), {})


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_its_programs_compile(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    topology, _ = RECIPES[recipe]
    if topology.startswith("h") and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the extra aot-gpu is not installed")
    config = load_config(Config, str(CONFIGS / recipe), {})
    # One layer of each kind at least.
    layers = max(2, len(config.model.layer_pattern))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))
    plan = compile_plan(config, read_topology(topology))
    assert plan.fits
    assert {"update", "generate", "prefill", "insert", "to_generate"} <= {
        p.name for p in plan.programs
    }
    update = next(p for p in plan.programs if (p.role, p.name) == ("actor", "update"))
    assert update.flops > 0 and update.traffic
