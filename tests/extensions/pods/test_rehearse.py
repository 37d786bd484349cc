"""A rehearsal has the layout of its recipe and a small model, and goes through start, kill and resume."""

import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.huggingface.config_json import config_json
from jaxrl.models.shapes import model_shapes
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.roles import check_role_batches
from jaxrl_planner.planned_roles import abstract_meshes
from jaxrl_pods.rehearse import on_hosts
from jaxrl_pods.rehearsed_recipe import (
    devices_of,
    recipe_text,
    share_of_spaces,
    small_model,
    smaller_layout,
    with_fewer_devices,
)

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = ROOT / "configs"


def layout(**settings) -> ParallelLayout:
    return ParallelLayout.from_config(LayoutConfig(**settings))


def test_fewer_devices_are_fewer_replicas_data_first():
    fully = LayoutConfig(train="1-8-16", generate="1-8-1-16", fsdp=16)
    shares = {"expert": 1, "context": 1}
    assert smaller_layout(fully, 4) == {
        "train": "1-8-4",
        "generate": "1-8-1-4",
        "fsdp": 4,
        **shares,
    }
    # data 4 x fsdp 2
    hybrid = LayoutConfig(train="2-2-8", generate="1-2-2-8", fsdp=2)
    by_data = {"train": "2-2-2", "generate": "1-2-2-2", "fsdp": 2, **shares}
    assert smaller_layout(hybrid, 4) == by_data
    assert smaller_layout(hybrid, 8)["fsdp"] == 1
    with pytest.raises(UserError, match="8 replicas, which do not divide by 3"):
        smaller_layout(hybrid, 3)


def test_fewer_devices_of_every_pool():
    pools = {
        "learn": {"roles": ("actor",), "train": "1-2-4", "devices": "8-15"},
        "sample": {"roles": ("rollout",), "train": "1-1-8", "devices": "0-7"},
    }
    config = load_config(Config, str(CONFIGS / "dapo_tiny.py"), {"placement": pools})
    smaller = with_fewer_devices(config, 2)
    assert (devices_of(config), devices_of(smaller)) == (16, 8)
    assert smaller.placement["learn"]["train"] == "1-2-2"
    assert smaller.placement["sample"]["train"] == "1-1-4"


def test_a_small_model_keeps_what_is_split():
    # 80 is the first multiple of 16 and of two dimensions of 40 heads above 64.
    small = small_model(model_shapes("qwen2.5-32b"), [layout(train="1-8-16", fsdp=16)])
    assert (small.num_layers, small.d_model, small.d_ff, small.head_dim) == (2, 80, 80, 2)
    assert (small.num_heads, small.num_kv_heads, small.vocab_size) == (40, 8, 152_064)
    # Two layers of each of 2 stages; 192 is the first multiple of 64 and 24. Heads have a size of their own.
    staged = small_model(model_shapes("qwen3-30b-a3b"), [layout(train="2-1-24", fsdp=24)])
    assert (staged.num_layers, staged.d_model, staged.head_dim) == (4, 192, 16)
    assert (staged.num_experts, staged.experts_per_token) == (128, 8)
    # A pattern of four layers fits once.
    assert small_model(model_shapes("qwen3.5-9b"), [layout(train="1-1-1")]).num_layers == 4


def test_hosts_have_eight_devices_or_what_there_is():
    config = load_config(Config, str(CONFIGS / "dapo_qwen32b.py"), {})
    assert on_hosts(config, None) == (config, 16, "")
    assert on_hosts(config, 32) == (config, 32, "")
    smaller, hosts, line = on_hosts(config, 4)
    assert (hosts, devices_of(smaller)) == (4, 32)
    assert line == "32 devices in place of 128: 4 times fewer replicas (1-8-4)"
    with pytest.raises(UserError, match="128 devices of the recipe do not divide over --hosts 3"):
        on_hosts(config, 3)
    tiny = load_config(Config, str(CONFIGS / "dapo_tiny.py"), {})
    with pytest.raises(UserError, match=r"--config\.mesh\.train=1-1-2"):
        on_hosts(tiny, 2)


# They name models that another run trains, and the rehearsal has to be given.
WITH_MODELS = ("distill_tiny", "safe_rlhf_llama8b", "safe_rlhf_tiny")
RECIPES = [path for path in sorted(CONFIGS.glob("*.py")) if path.stem not in WITH_MODELS]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_batches_of_every_recipe_divide(path, tmp_path):
    config = load_config(Config, str(path), {})
    file = tmp_path / "recipe.py"
    file.write_text(recipe_text(str(path), config, ["seed"]))
    small = load_config(Config, str(file), {})
    assert devices_of(small) == devices_of(config) == small.mesh.simulated_devices
    assert small.model.num_params < 60e6 and not small.weights
    config_json(small.model, dtype="float32")
    if config.run.num_steps and not config.preference.loss:
        resolve(small)
        check_role_batches(small, abstract_meshes(resolve(small).pools))


def test_overrides_stay():
    config = load_config(Config, str(CONFIGS / "dapo_tiny.py"), {"rollout.slots": 12})
    assert "'rollout.slots'" not in recipe_text("dapo_tiny", config, ["rollout.slots"])


def test_weights_of_a_role_on_the_hub_are_refused():
    changes = {"reward.model": "Skywork/Skywork-Reward-V2-Qwen3-8B"}
    config = load_config(Config, str(CONFIGS / "dapo_qwen7b.py"), changes)
    with pytest.raises(UserError, match=r"reward\.model Skywork/.* is not on this machine"):
        recipe_text("dapo_qwen7b", config, ["reward.model"])


def test_the_reward_differs_between_answers():
    answers: Any = types.SimpleNamespace(texts=("a b", "", "ab c d"))
    assert share_of_spaces(answers) == [1 / 3, 0.0, 2 / 6]


def test_mistakes_on_the_command_line_are_one_line(tmp_path, capsys):
    assert cli.main(["jaxrl", "rehearse"]) == 2
    assert "--config" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for arguments, message in (
        (("no_such.py",), 'no recipe file "no_such.py"'),
        (("dapo_tiny", "--out", str(tmp_path)), "is not empty"),
        (("dapo_tiny", "--config.mesh.layout=auto"), "mesh.layout 'auto' is open"),
        (("dapo_tiny", "--config.mesh.fdsp=2"), "mesh.fsdp"),
    ):
        assert cli.main(["jaxrl", "rehearse", "--config", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_hosts_lose_one_and_go_on(tmp_path):
    command = [
        *(sys.executable, "-m", "jaxrl", "rehearse", "--config", "configs/dapo_tiny.py"),
        *("--hosts", "2", "--out", str(tmp_path), "--config.mesh.train=1-2-2"),
        *("--config.mesh.generate=1-1-2-2", "--config.mesh.fsdp=2"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "status of the others [75]" in done.stdout
    assert "step 3 repeated" in done.stdout and "numbers equal" in done.stdout
