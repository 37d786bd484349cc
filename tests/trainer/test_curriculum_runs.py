"""Runs whose prompts a user's sampler chooses: killed and continued, and refused before they begin."""

import dataclasses

import jax
import pytest
from slow_values import mostly_slow
from test_recipes import curve, folder, make_config  # noqa: F401, a fixture
from walking_sampler import FILE, WALK

from jaxrl.commands.run_commands import check_for_plan
from jaxrl.config.schema import Config
from jaxrl.data.data_config import SourceConfig
from jaxrl.errors import UserError
from jaxrl.trainer import program

RUNS = {
    "whole batches": {},
    # The policy answers nothing right, so steps are filled with groups that the filter drops.
    "dynamic": {
        "algorithm__dataflow": "dapo",
        "rollout__on_shortage": "fill",
        "rollout__max_generation_batches": 2,
    },
    "several sources": {"sources": {"b": SourceConfig(path=f"{FILE}:make", size=9)}},
}
RUNS["partial"] = RUNS["dynamic"] | {"rollout__max_staleness": 1, "rollout__slots": 16}


def chosen(folder, output, sources=None, **changes) -> Config:  # noqa: F811
    settings = {"data__sampler": WALK, "run__save_every": 1, "run__rollouts_every": 1}
    config = make_config(folder, output, "grpo", **settings | changes)
    data = dataclasses.replace(config.data, sources=sources or {})
    return dataclasses.replace(config, data=data)


def trained(folder, output, *ends: int, **changes) -> tuple:  # noqa: F811
    """Metrics and samples of a run that ends at these steps and goes on."""
    for num_steps in ends:
        config = chosen(folder, output, run__num_steps=num_steps, **changes)
        assert program.train(config, devices=jax.devices()[:1]) == 0
    files = config.run_folder.rollouts.steps()
    # The last step of a shorter run is evaluated.
    rows = [{k: v for k, v in row.items() if not k.startswith("val-")} for row in curve(config)]
    return rows, {step: path.read_bytes() for step, path in files.items()}


@pytest.mark.parametrize("changes", mostly_slow(RUNS, fast=(), long=("partial",)))
def test_a_run_that_was_killed_goes_on_to_the_same_numbers(changes, folder, tmp_path):  # noqa: F811
    whole = trained(folder, tmp_path / "whole", 4, **changes)
    assert trained(folder, tmp_path / "again", 1, 3, 4, **changes) == whole
    assert len(whole[0]) == 5 and len(whole[1]) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__sampler": "nowhere.py:Walk"}, "data.sampler 'nowhere.py:Walk' is not there"),
        ({"data__sampler": "json:dumps"}, "data.sampler 'json:dumps' is dumps"),
    ],
)
def test_a_sampler_that_is_missing_is_named_before_the_run(changes, message, folder, tmp_path):  # noqa: F811
    config = chosen(folder, tmp_path, **changes)
    for check in (program.train, check_for_plan):
        with pytest.raises(UserError, match=message):
            check(config)


def test_a_sampler_that_cannot_begin_ends_the_run_before_supervised_training(folder, tmp_path):  # noqa: F811
    file = tmp_path / "mine.py"
    file.write_text(
        "from walking_sampler import Walk\n\n"
        "class Mine(Walk):\n"
        "    def __init__(self, prompts, seed):\n"
        "        self.levels = [extra['level'] for extra in prompts.extras]\n"
    )
    config = chosen(folder, tmp_path / "run", data__sampler=f"{file}:Mine", sft__num_steps=5)
    with pytest.raises(UserError, match=r"__init__\(\) raised .*mine.py:5: KeyError: 'level'"):
        program.train(config, devices=jax.devices()[:1])
    assert not (config.run_folder.path / "sft").exists()
