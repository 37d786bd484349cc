"""`jaxrl plan` as a user calls it: what is refused before compiling, and a small run compiled for a slice."""

import importlib.util
import json
import pathlib

import jax
import pytest

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.hardware import accelerator
from jaxrl.planner.compile_plan import compile_plan
from jaxrl.planner.compiled.ahead import load_executable
from jaxrl.planner.hardware import topologies
from jaxrl.planner.step_load import assumed_lengths, load_of

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
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


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v9:2x2", "chip 'v9' is not one of"),
        ("h100:1x9", "comes as HOSTSx8"),
        ("v5p:3x4x4", "is no topology that exists"),
    ],
)
def test_an_impossible_topology_is_one_line(topology, words, capsys):
    error = refused(capsys, "--topology", topology)
    assert words in error and error.count("\n") == 1


def test_a_missing_compiler_is_one_line(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        topologies.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "libtpu" else found(name, *rest),
    )
    assert "pip install -e '.[aot]' in jaxrl's folder" in refused(capsys, "--topology", "v5e:2x2")


def test_a_topology_that_is_too_small_is_refused_with_those_that_exist():
    config = load_config(Config, str(CONFIGS / "dapo_qwen7b.py"), {"rollout.slots": "16"})
    # Eight simulated devices in the place of a slice's: nothing is compiled before this is counted.
    slice_of_8 = topologies.Topology("v5e:2x4", accelerator("v5e"), tuple(jax.devices()), 8)
    with pytest.raises(UserError, match=r"use v5e:4x4 \(16 devices\) or v5e:4x8 \(32 devices\)"):
        compile_plan(config, slice_of_8)


def test_a_recipe_alone_is_traced(capsys):
    arguments = ["--config", str(CONFIGS / "grpo_tiny.py")]
    assert cli.run("plan", ["plan", *arguments]) == 0
    traced = capsys.readouterr().out
    assert "learning, before temporaries" in traced and "actor update, traced" in traced
    assert cli.run("train", ["train", *arguments, "--dry_run"]) == 0
    assert capsys.readouterr().out == traced
    # The plan is there all the same.
    fault = "--config.rollout.environment=absent.py:f"
    assert cli.run("train", ["train", *arguments, "--dry_run", fault]) == 2
    out, error = capsys.readouterr()
    assert "actor update, traced" in out and error.count("\n") == 1
    assert "this run lacks one thing: (1) rollout.environment: " in error
    assert cli.run("plan", ["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["pools"][0]["bytes"]["learning"] > 0


@pytest.mark.parametrize(
    "option", ["--search", "--trace", "--save=here", "--response-tokens=9", "--cut-off=.1"]
)
def test_what_is_about_a_topology_wants_one(option, capsys):
    error = refused(capsys, option)
    assert "none is named; add --topology" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "many"])
def test_a_length_that_cannot_be_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        refused(capsys, "--topology", "v5e:2x2", "--response-tokens", text)


def test_the_load_is_what_the_dataflow_samples():
    dapo, ppo = (
        load_config(Config, str(CONFIGS / f"{n}.py"), {}) for n in ("dapo_qwen32b", "ppo_tiny")
    )
    assert load_of(dapo).prompts == dapo.rollout.generation_prompts
    assert load_of(dapo).kept == 512 * 16 and load_of(dapo).response_tokens == 4096
    given = load_of(ppo, assumed_lengths(ppo, 7.0))
    assert given.prompts == ppo.rollout.num_prompts and given.response_tokens == 7


@pytest.mark.tpu
@pytest.mark.slow
def test_a_small_run_is_planned_saved_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["plan", "--config", str(CONFIGS / "ppo_tiny.py"), *TINY, "--topology", "v5e:2x2"]
    saved = tmp_path / "saved"
    assert cli.run("plan", [*arguments, "--json", "--save", str(saved)]) == 0
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
    assert any(saved.glob("actor-update-0.executable"))
    # A machine without such a TPU cannot load it, and says so.
    with pytest.raises(UserError, match="cannot be loaded here"):
        load_executable(saved / "actor-update-0.executable")
    page = tmp_path / "plan.html"
    assert cli.run("plan", [*arguments, "--html", str(page)]) == 0
    out = capsys.readouterr()
    assert "PREDICTED" in out.out and "kept from before" in out.err
    assert "<html" in page.read_text()
