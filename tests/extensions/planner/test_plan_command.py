"""`jaxrl plan` as a user calls it: what is refused before compiling, and a small run compiled for a slice."""

import dataclasses
import json
import pathlib

import jax
import pytest

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl_planner.hardware.accelerators import accelerator
from jaxrl_planner.hardware.cluster import Cluster, Topology
from jaxrl_planner.make_plan import compile_plan, trace_plan
from jaxrl_planner.step_load import load_of, response_lengths

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
TINY = [
    "--config.model.num_layers=2",
    "--config.rollout.slots=8",
    "--config.rollout.prefill_prompts=8",
    "--config.train.rows=8",
    "--config.mesh.train=1-1-4",
    "--config.mesh.fsdp=4",
    "--config.mesh.simulated_devices=0",
]


def refused(capsys, *arguments: str) -> str:
    status = cli.run("plan", ["plan", "--config", str(CONFIGS / "ppo_tiny.py"), *arguments])
    assert status == 2
    return capsys.readouterr().err


def test_a_topology_that_is_too_small_is_refused_with_those_that_exist():
    config = load_config(Config, str(CONFIGS / "dapo_qwen7b.py"), {"rollout.slots": "16"})
    # Eight simulated devices in the place of a slice's: nothing is compiled before this is counted.
    slice_of_8 = Topology("v5e:2x4", accelerator("v5e"), tuple(jax.devices()), 8)
    with pytest.raises(UserError, match=r"use v5e:4x4 \(16 devices\) or v5e:4x8 \(32 devices\)"):
        compile_plan(config, slice_of_8)


def test_a_dry_run_prints_the_plan_and_what_the_run_lacks(capsys):
    arguments = ["--config", str(CONFIGS / "grpo_tiny.py"), "--dry_run"]
    fault = "--config.data.train.path=absent.jsonl"
    assert cli.run("train", ["train", *arguments, fault]) == 2
    out, error = capsys.readouterr()
    assert "learning, before temporaries" in out and "actor update, traced" in out
    assert error.count("\n") == 1
    assert "this run lacks one thing: (1) data.train: absent.jsonl does not exist" in error


@pytest.mark.slow
def test_a_recipe_alone_is_traced_as_by_a_dry_run(capsys):
    arguments = ["--config", str(CONFIGS / "grpo_tiny.py")]
    assert cli.run("plan", ["plan", *arguments]) == 0
    traced = capsys.readouterr().out
    assert cli.run("train", ["train", *arguments, "--dry_run"]) == 0
    assert capsys.readouterr().out == traced
    assert cli.run("plan", ["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["pools"][0]["bytes"]["learning"] > 0


@pytest.mark.parametrize("option", ["--search", "--trace", "--response-tokens=9"])
def test_what_is_about_a_topology_wants_one(option, capsys):
    error = refused(capsys, option)
    assert "none is named; add --topology" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_a_mean_length_that_cannot_be_is_refused(text, capsys):
    error = refused(capsys, "--topology", "v5e:2x2", "--trace", f"--response-tokens={text}")
    assert "mean" in error and error.count("\n") == 1


def test_a_plan_needs_a_recipe(capsys):
    assert cli.run("plan", ["plan"]) == 2
    assert "no recipe is named; add --config" in capsys.readouterr().err


def test_pools_that_do_not_divide_over_hosts_are_refused():
    placement = {
        "policy": {"roles": ("actor", "reference"), "train": "1-1-9", "generate": "1-1-1-9"},
        "value": {"roles": ("critic",), "train": "1-1-7", "generate": "1-1-1-7"},
    }
    config = load_config(Config, str(CONFIGS / "ppo_tiny.py"), {"mesh.fsdp": "1"})
    config = dataclasses.replace(
        config,
        placement=placement,
        train=dataclasses.replace(config.train, rows=63),
        rollout=dataclasses.replace(config.rollout, slots=63, prefill_prompts=63),
    )
    rule = "h100:2x8, a process on each host: pool policy .* a multiple of 2"
    with pytest.raises(UserError, match=rule):
        trace_plan(config, Cluster.parse("h100:2x8"))


def test_a_layout_of_25_devices_is_told_the_next_topology_that_exists():
    changes = {"mesh.train": "1-1-25", "mesh.generate": "1-1-1-25", "mesh.fsdp": "1"}
    config = load_config(
        Config,
        str(CONFIGS / "grpo_tiny.py"),
        changes
        | {"mesh.simulated_devices": "0", "train.rows": "25", "rollout.slots": "25"}
        | {"rollout.prefill_prompts": "25"},
    )
    with pytest.raises(UserError, match=r"choose v5e:4x8 \(32 devices\)"):
        trace_plan(config, Cluster.parse("v5e:2x4"))


def test_the_load_is_what_the_dataflow_samples():
    dapo, ppo = (
        load_config(Config, str(CONFIGS / f"{n}.py"), {}) for n in ("dapo_qwen32b", "ppo_tiny")
    )
    assert load_of(dapo).prompts == dapo.rollout.generation_prompts
    assert load_of(dapo).work.sequences == 512 * 16
    assert load_of(dapo).work.response_lengths.mean == 4096
    given = load_of(ppo, response_lengths(ppo, 7.0))
    assert given.prompts == ppo.rollout.num_prompts and given.work.response_lengths.mean == 7


@pytest.mark.tpu
@pytest.mark.slow
def test_a_small_run_is_planned_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["plan", "--config", str(CONFIGS / "ppo_tiny.py"), *TINY, "--topology", "v5e:2x2"]
    assert cli.run("plan", [*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (pool,) = plan["pools"]
    titles = {(p["role"], p["name"]) for p in pool["programs"]}
    assert {
        ("actor", "update"),
        ("actor", "generate"),
        ("critic", "update"),
        ("critic", "values"),
    } <= titles
    assert {("actor", "prefill"), ("actor", "insert"), ("reference", "logprobs")} <= titles
    assert plan["fits"] and plan["predicted"]["step_s"] > plan["predicted"]["at_least_s"] > 0
    assert all(p["flops"] > 0 for p in pool["programs"] if p["name"] in ("update", "generate"))
    assert cli.run("plan", arguments) == 0
    out = capsys.readouterr()
    assert "PREDICTED" in out.out and "kept from before" in out.err
