"""Settings that a recipe leaves open are decided before the run, and never inside it."""

import dataclasses

import jax
import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.trainer import open_settings, program
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl_planner import resolve
from jaxrl_planner.resolve import resolved


def tiny(tmp_path, **changes) -> Config:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    sizes = {"data.train.size": "20", "data.evaluation.size": "5", "run.output": str(tmp_path)}
    return load_config(Config, "configs/grpo_tiny.py", sizes | changes)


def test_a_settled_config_is_handed_back(tmp_path):
    config = tiny(tmp_path)
    assert open_settings.resolved(config, jax.devices()[:1], kind=REINFORCEMENT) is config
    assert not config.run_folder.path.exists()


def test_slots_are_decided_and_nothing_else_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_planner.slot_choice.memory_bytes", lambda device: 10**9)
    monkeypatch.setattr("jaxrl_planner.slot_choice.peak_here", lambda program: 10**6)
    config = tiny(tmp_path, rollout__slots="auto", mesh__simulated_devices="0")
    found = resolved(config, jax.devices()[:1], kind=REINFORCEMENT)
    assert found.rollout.slots > 0
    rollout = dataclasses.replace(found.rollout, slots="auto")
    assert dataclasses.replace(found, rollout=rollout) == config


def test_what_is_missing_is_told_before_anything_is_compiled(tmp_path, monkeypatch):
    def never(*args):
        raise AssertionError("slots are compiled")

    monkeypatch.setattr(resolve, "with_chosen_slots", never)
    config = tiny(tmp_path, rollout__slots="auto", weights="nowhere", reward__model="gone")
    with pytest.raises(UserError, match=r"this run lacks 2 things: .*nowhere.*gone/config.json"):
        resolved(config, jax.devices()[:1], kind=REINFORCEMENT)


def test_a_run_does_not_accept_open_settings(tmp_path):
    config = tiny(tmp_path, rollout__slots="auto")
    with pytest.raises(UserError, match=r"open_settings\.resolved decides"):
        program.train(config, devices=jax.devices()[:1])
