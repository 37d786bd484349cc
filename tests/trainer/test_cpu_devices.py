"""Two cores are two devices where that is faster and nothing else is said of devices."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxrl.commands.run_commands import train_or_plan
from jaxrl.config.schema import Config
from jaxrl.models.model_config import ModelConfig
from jaxrl.trainer import open_settings
from jaxrl.trainer.open_settings import with_cpu_devices

WIDE = Config(model=ModelConfig(d_model=256, num_heads=8, num_kv_heads=4))


def changed(**changes) -> Config:
    groups = {
        name: dataclasses.replace(getattr(WIDE, name), **change)
        if isinstance(change, dict)
        else change
        for name, change in changes.items()
    }
    return dataclasses.replace(WIDE, **groups)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(open_settings.os, "sched_getaffinity", lambda _: {0, 1})
    assert getattr(jax.config, "jax_platforms") == "cpu"  # noqa: B009 pyright knows it not


def test_a_wide_model_takes_two_cores_for_two_devices(two_cores):
    mesh = with_cpu_devices(WIDE).mesh
    assert (mesh.simulated_devices, mesh.train) == (2, "1-1-2")


@pytest.mark.slow
def test_a_dry_run_plans_the_devices_that_the_run_takes(two_cores, capsys):
    model = dataclasses.replace(WIDE.model, num_layers=1, vocab_size=128, d_ff=64)
    train_or_plan(dataclasses.replace(WIDE, model=model), dry_run=True)
    assert "2 devices, training 1-1-2" in capsys.readouterr().out


def test_one_core_is_one_device(monkeypatch):
    monkeypatch.setattr(open_settings.os, "sched_getaffinity", lambda _: {0})
    assert with_cpu_devices(WIDE).mesh.simulated_devices == 0


@pytest.mark.parametrize("platforms", ["cuda,cpu", "tpu"])
def test_accelerators_are_taken_as_they_are(monkeypatch, two_cores, platforms):
    monkeypatch.setattr(open_settings.jax, "config", type("C", (), {"jax_platforms": platforms}))
    assert with_cpu_devices(WIDE).mesh.simulated_devices == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"d_model": 128}},
        {"weights": "somewhere"},
        {"mesh": {"train": "1-1-4"}},
        {"mesh": {"layout": "auto"}},
        {"train": {"rows": 3}},
        {"rollout": {"slots": 3}},
        {"rollout": {"prefill_prompts": 3}},
    ],
)
def test_what_speaks_of_devices_or_does_not_halve_leaves_one(two_cores, changes):
    config = changed(**changes)
    resolved = with_cpu_devices(config).mesh
    assert (resolved.simulated_devices, resolved.train) == (0, config.mesh.train)


def test_a_placement_leaves_one(two_cores):
    config = dataclasses.replace(WIDE, placement={"all": {"roles": ["actor"]}})
    assert with_cpu_devices(config).mesh.simulated_devices == 0


@pytest.mark.parametrize("given", [0, 4])
def test_a_number_stays(two_cores, given):
    config = changed(mesh={"simulated_devices": given})
    assert with_cpu_devices(config) is config
