"""Runs that sample while they learn: staleness, recorded schedules, checkpoints, errors on either side."""

import contextlib
import json
import random
import shutil
import time

import pytest
from slow_values import mostly_slow
from test_recipes import curve, folder, make_config  # noqa: F401, a fixture
from walking_sampler import WALK

from jaxrl.config.schema import Config
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.errors import UserError
from jaxrl.roles.policy import Actor
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.trainer import program

APART = {
    "placement": {
        "learn": {"roles": ("actor",), "train": "1-1-1"},
        "sample": {"roles": ("rollout",), "train": "1-1-1"},
    },
    "algorithm__correction__weights": "token",
    "rollout__max_staleness": 2,
    "optim__lr": 1e-2,
    "optim__lr_warmup_steps": 0,
    "run__rollouts_every": 1,
    # The policy answers nothing right, so DAPO fills its steps with groups that its filter drops.
    "rollout__on_shortage": "fill",
    "rollout__max_generation_batches": 2,
}


def free(folder, output, recipe="grpo", **changes):  # noqa: F811
    settings = {**APART, "run__num_steps": 4, "run__save_every": 2, "evaluation__every": 2}
    return make_config(folder, output, recipe, **{**settings, **changes})


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(config) -> dict:
    """Everything that a run has made: metrics without times, all samples, and the schedule."""
    samples = sorted((config.run_folder.path / "rollouts").glob("step_*.jsonl"))
    assert len(samples) == config.run.num_steps
    return {
        "metrics": curve(config),
        "samples": [rows_of(path) for path in samples],
        "schedule": rows_of(config.run_folder.rl.schedule),
    }


class Results:
    """Results of the learner that are there after some questions."""

    def __init__(self, draw: random.Random):
        self._draw, self._left = draw, draw.randrange(5)

    def is_ready(self) -> bool:
        time.sleep(self._draw.random() * 5e-3)
        self._left -= 1
        return self._left < 0


@contextlib.contextmanager
def sleeping(number: int):
    """Sampler and learner are slow, at random times."""
    meanwhile, finish = FreeRunning.meanwhile, DecodeLoop.finish
    draw = random.Random(number)

    def slow_finish(self):
        time.sleep(draw.random() * 5e-3)
        return finish(self)

    slow_meanwhile = lambda self, results: meanwhile(self, Results(draw))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeLoop, "finish", slow_finish)
        patch.setattr(FreeRunning, "meanwhile", slow_meanwhile)
        yield


# A recipe, changes, and the steps at which the recorded run ended; all but the last go on.
RECORDED = {
    "grpo, resumed": ("grpo", {}, (2, 4)),
    "dapo": ("dapo", {}, (4,)),
    "a user's sampler of prompts, resumed": ("grpo", {"data__sampler": WALK}, (2, 4)),
}


@pytest.fixture(scope="module", params=mostly_slow(RECORDED, fast=("grpo, resumed",)))
def recorded(request, folder, tmp_path_factory):  # noqa: F811
    """Makes the config of a run of this name with further changes. The run "first" is there."""
    recipe, changes, ends = request.param
    output = tmp_path_factory.mktemp("free")

    def config(name: str, **further) -> Config:
        return free(folder, output / name, recipe, **changes, **further)

    for number, num_steps in enumerate(ends):
        with sleeping(5 + number):
            assert program.train(config("first", run__num_steps=num_steps)) == 0
    return config


def test_the_schedule_has_every_dispatch_and_every_prompt(recorded):
    config = recorded("first")
    rows = rows_of(config.run_folder.rl.schedule)
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    resumed = "grpo" in config.algorithm.dataflow
    assert [row["restarted"] for row in rows] == [False, False, resumed, False]
    drawn = [n for row in rows for _, n in row["drawn"]]
    assert len(set(drawn)) == len(drawn) >= 4 * 8
    assert config.data.sampler or drawn == list(range(len(drawn)))
    for row in rows:
        dispatches = [dispatch for dispatch, _ in row["drawn"]]
        assert dispatches == sorted(dispatches)
        assert all(0 <= dispatch <= row["dispatches"] for dispatch in dispatches)
    trained = [sample["prompt_id"] for step in told(config)["samples"] for sample in step]
    assert len(trained) == 4 * 8 * 4 and len(set(trained)) == 4 * 8
    # What is learned from is sampled by weights that are a step old, or older.
    gap = [row["training/rollout_probs_diff_max"] for row in curve(config)[1:]]
    assert gap[0] < 1e-4 < max(gap[1:])


def test_a_recorded_run_is_repeated_bit_for_bit_whatever_the_clock_says(recorded):
    first = told(recorded("first"))
    again = recorded("again", rollout__schedule=str(recorded("first").run_folder))
    with sleeping(7):
        assert program.train(again) == 0
    repeated = told(again)
    # The run of two steps was evaluated at its end.
    metrics = [run.pop("metrics") for run in (repeated, first)]
    for rows in metrics:
        rows[2] = {name: value for name, value in rows[2].items() if not name.startswith("val-")}
    assert metrics[0] == metrics[1] and repeated == first


def test_an_evaluation_beside_a_step_is_that_of_a_drained_sampler(recorded):
    """The run of two steps was evaluated at its end, and the one that went on beside its third step."""
    rows = curve(recorded("first"))
    assert [row.get("val-aux/version") for row in rows] == [None, None, None, 2, None]
    found = [
        {name: row[name] for name in row if name.startswith("val-") and "version" not in name}
        for row in rows[2:4]
    ]
    assert found[1] and (found[0] or "dapo" in recorded("first").algorithm.dataflow)
    assert found[0] in ({}, found[1])


def test_the_last_row_has_the_accuracy_of_the_last_weights(folder, tmp_path):  # noqa: F811
    config = free(folder, tmp_path, run__num_steps=2, evaluation__every=1)
    assert program.train(config) == 0
    before, during, last = curve(config)
    assert not any(name.startswith("val-") for name in during)
    # An evaluation beside it, of the weights of one step, does not leave its number there.
    assert {n for n in last if n.startswith("val-")} == {n for n in before if n.startswith("val-")}


def test_an_evaluation_may_be_the_one_before_the_first_step(folder, tmp_path):  # noqa: F811
    config = free(folder, tmp_path, run__num_steps=2, evaluation__every=-1)
    assert program.train(config) == 0
    assert [any(name.startswith("val-") for name in row) for row in curve(config)] == [1, 0, 0]


@pytest.mark.long
def test_another_clock_gives_another_run(recorded):
    other = recorded("other")
    with sleeping(4):
        assert program.train(other) == 0
    for name in ("schedule", "samples"):
        assert told(other)[name] != told(recorded("first"))[name]


def test_a_schedule_of_another_run_is_refused(recorded, tmp_path):
    where = tmp_path / "recorded"
    shutil.copytree(recorded("first").run_folder.path, where)
    for changes, message in (
        ({"rollout__max_staleness": 3}, r"other settings \(rollout.max_staleness: 2 -> 3\)"),
        ({"seed": 5}, r"other settings \(seed: 0 -> 5\)"),
        (
            {"rollout__schedule": str(tmp_path)},
            "does not exist; set rollout[.]schedule to the folder",
        ),
        ({"rollout__max_staleness": 0}, "this run does not; leave rollout[.]schedule out"),
    ):
        settings = {"rollout__schedule": str(where), **changes}
        with pytest.raises(UserError, match=message):
            program.train(recorded("refused", **settings))
    damaged = where / "rl" / "schedule.jsonl"
    whole = damaged.read_text()
    for before, after in (
        ('"version"', '"vision"'),
        ('"members": []', '"members": [0, 2]'),
        (', "members": []', ""),
    ):
        assert before in whole
        damaged.write_text(whole.replace(before, after))
        with pytest.raises(UserError, match=r"schedule\.jsonl:1: not a row of a schedule"):
            program.train(recorded("refused", rollout__schedule=str(where)))


@pytest.mark.long
def test_prompts_that_differ_from_the_recorded_ones_end_the_run(recorded, tmp_path):
    shutil.copytree(recorded("first").run_folder.path, tmp_path / "recorded")
    path = tmp_path / "recorded" / "rl" / "schedule.jsonl"
    row, *_ = rows_of(path)
    where = {"rollout__schedule": str(tmp_path / "recorded")}
    path.write_text(json.dumps(row | {"drawn": row["drawn"][:-1]}) + "\n")
    with pytest.raises(UserError, match="step 1 does not repeat the recorded schedule"):
        program.train(recorded("differs", **where))
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(
        UserError, match=r"has 1 steps, and this is step 2: set run[.]num_steps to 1"
    ):
        program.train(recorded("longer", **where))


@pytest.mark.long
@pytest.mark.parametrize("side", ["sampler", "learner"])
def test_an_error_on_either_side_ends_the_run_and_loses_no_step(
    side,
    folder,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    owner, name = (DecodeLoop, "finish") if side == "sampler" else (Actor, "update")
    whole, calls = getattr(owner, name), []

    def fails(self, *args, **further):
        calls.append(self)
        if len(calls) > (12 if side == "sampler" else 2):
            raise RuntimeError("the device is gone")
        return whole(self, *args, **further)

    config = free(folder, tmp_path, evaluation__every=10)
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            program.train(config)
    assert program.train(config) == 0
    drawn = [n for row in rows_of(config.run_folder.rl.schedule) for _, n in row["drawn"]]
    assert drawn == list(range(len(drawn)))
    assert [row["step"] for row in curve(config)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "hosts__pools_apart": True,
                "placement": {"a": APART["placement"]["sample"], "b": APART["placement"]["learn"]},
            },
            "the first, which writes checkpoints, has all roles that learn",
        ),
        ({"rollout__driver": "jetstream"}, "rollout.driver='offline'"),
        ({"algorithm__correction__weights": "none"}, "nothing corrects for it"),
        ({"placement": {}}, "give the role rollout a pool of its own"),
    ],
)
def test_settings_that_cannot_run_free(changes, message, folder, tmp_path):  # noqa: F811
    with pytest.raises(UserError) as error:
        program.train(free(folder, tmp_path, **changes))
    assert message in str(error.value)
