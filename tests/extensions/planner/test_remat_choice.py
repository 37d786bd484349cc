"""train.remat "auto": the least recomputation that fits, by the traced update and by shapes."""

import dataclasses
import pathlib

import jax
import pytest
from plans import TINY_TRAIN, tiny_config

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.trainer import open_settings
from jaxrl.trainer.findings import PREFERENCES, REINFORCEMENT, fine_tuning
from jaxrl.trainer.resolved import resolve
from jaxrl_planner import remat_choice
from jaxrl_planner.hardware.cluster import read_topology
from jaxrl_planner.make_plan import trace_plan
from jaxrl_planner.planned_roles import abstract_meshes
from jaxrl_planner.remat_choice import update_bytes, with_remat

RECIPE = pathlib.Path(__file__).parents[3] / "configs/dapo_qwen15b_math.py"


def open_config(**changes) -> Config:
    """The tiny plan on one device, with `remat` left open."""
    train = dataclasses.replace(TINY_TRAIN, remat="auto", **changes)
    return tiny_config(mesh=LayoutConfig(), train=train)


def on_shapes(config: Config, remat: str = "auto"):
    train = dataclasses.replace(config.train, remat=remat)
    resolved = resolve(dataclasses.replace(config, train=train))
    return resolved, abstract_meshes(resolved.pools)


def chosen(config: Config, memory: float) -> str:
    return with_remat(*on_shapes(config), int(memory)).config.train.remat


@pytest.mark.long
def test_the_bytes_are_those_of_compiled_updates():
    """The update of 1.5B with a row of 8,192 tokens, compiled for an H200: 51.0, 41.9 and 29.7 GB."""
    config = load_config(Config, str(RECIPE), {})
    compiled = {"none": 51.0e9, "projections": 41.9e9, "full": 29.7e9}
    for remat, peak in compiled.items():
        assert 0.95 * peak < update_bytes(*on_shapes(config, remat)) < 1.1 * peak
    # What a run on a GPU of 80 GB may use, and three smaller ones: nine tenths count.
    fitting = {memory: chosen(config, memory * 1e9) for memory in (63.7, 50, 40, 24)}
    assert fitting == {63.7: "none", 50: "projections", 40: "full", 24: "full"}


def test_the_first_that_fits_into_nine_tenths_is_taken(monkeypatch):
    config, ways = open_config(), ("none", "projections")
    # Each is traced once.
    nbytes = {remat: update_bytes(*on_shapes(config, remat)) for remat in ways}
    monkeypatch.setattr(
        remat_choice, "update_bytes", lambda resolved, _: nbytes[resolved.config.train.remat]
    )
    none, projections = (-(-nbytes[remat] * 10 // 9) for remat in ways)
    assert chosen(config, none) == "none"
    assert chosen(config, none - 2) == chosen(config, projections) == "projections"
    assert chosen(config, projections - 2) == chosen(config, 1) == "full"
    named = on_shapes(config, "offload")
    assert with_remat(*named, 1) is named[0]


def test_more_logits_at_once_are_counted():
    """Of each of 8 more positions four float32 arrays of 64 logits."""
    few, many = (
        update_bytes(*on_shapes(open_config(logprob_chunk_tokens=chunk))) for chunk in (8, 16)
    )
    assert many - few == 4 * 4 * 8 * 64


def test_a_plan_says_what_was_chosen():
    notes = dict(trace_plan(open_config()).notes)
    assert notes["train.remat"] == "none, the least recomputation that fits 80.0 GB by shapes"


@pytest.mark.tpu
def test_a_run_on_accelerators_chooses_and_one_on_cpu_keeps_everything(tmp_path, capsys):
    changes = {"data.train.size": "8", "data.evaluation.size": "2", "run.output": str(tmp_path)}
    config = load_config(Config, "configs/grpo_tiny.py", {"mesh.train": "1-1-4"} | changes)
    devices = read_topology("v5p:2x2x1").devices
    found = open_settings.resolved(config, devices, kind=REINFORCEMENT)
    assert found == dataclasses.replace(
        config, train=dataclasses.replace(config.train, remat="none")
    )
    assert "train.remat: none, the least" in capsys.readouterr().out
    # The frozen model that it compares with is not counted.
    assert open_settings.resolved(config, devices, kind=PREFERENCES) is config
    assert [config.train.remat_on(on) for on in ("tpu", "cpu", None)] == ["full", "none", "none"]
    assert open_settings.resolved(config, jax.devices(), kind=REINFORCEMENT) is config
    # Supervised learning alone: with what it would sample with, and where six slots go with no mesh of four.
    for slots, chosen in (("8", "none"), ("6", "auto")):
        changes["rollout.slots"] = slots
        config = load_config(Config, "configs/sft_tiny.py", {"mesh.train": "1-1-4"} | changes)
        found = open_settings.resolved(config, devices, kind=fine_tuning(config))
        assert found.train.remat == chosen
