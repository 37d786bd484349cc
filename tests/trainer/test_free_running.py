"""Runs that sample while they learn: staleness, recorded schedules, checkpoints, errors on either side."""

import json
import random
import time

import pytest
from test_recipes import curve, folder, make_config  # noqa: F401, a fixture

from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.errors import UserError
from jaxrl.roles.policy import Actor
from jaxrl.rollout.sample_groups import GroupLoop
from jaxrl.trainer import program

APART = {
    "placement": {
        "learn": {"roles": ("actor",), "train": "1-1-2"},
        "sample": {"roles": ("rollout",), "train": "1-1-2"},
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
    settings = {**APART, "run__num_steps": 4, "run__save_every": 2, "evaluation__every": 3}
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


@pytest.fixture
def sleeps(monkeypatch):
    """A function that makes sampler and learner slow, at random times."""
    meanwhile, finish = FreeRunning.meanwhile, GroupLoop.finish

    def seed(number: int) -> None:
        draw = random.Random(number)

        def slow_finish(self):
            time.sleep(draw.random() * 5e-3)
            return finish(self)

        slow_meanwhile = lambda self, results: meanwhile(self, Results(draw))  # noqa: E731
        monkeypatch.setattr(GroupLoop, "finish", slow_finish)
        monkeypatch.setattr(FreeRunning, "meanwhile", slow_meanwhile)

    return seed


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("dapo", {}),
        pytest.param("grpo", {}, marks=pytest.mark.slow),
    ],
)
def test_a_recorded_run_is_repeated_bit_for_bit_whatever_the_clock_says(
    recipe,
    changes,
    folder,  # noqa: F811
    tmp_path,
    sleeps,
):
    first = free(folder, tmp_path / "first", recipe, **changes)
    sleeps(1)
    assert program.train(first) == 0
    recorded = told(first)
    # Another clock gives another run.
    other = free(folder, tmp_path / "other", recipe, **changes)
    sleeps(2)
    assert program.train(other) == 0
    assert told(other)["schedule"] != recorded["schedule"]
    assert told(other)["samples"] != recorded["samples"]
    changes = changes | {"rollout__schedule": str(first.run_folder)}
    again = free(folder, tmp_path / "again", recipe, **changes)
    sleeps(3)
    assert program.train(again) == 0
    repeated = told(again)
    assert repeated["schedule"] == recorded["schedule"]
    assert repeated["metrics"] == recorded["metrics"]
    assert repeated["samples"] == recorded["samples"]


def test_the_schedule_has_every_dispatch_and_every_prompt(folder, tmp_path, sleeps):  # noqa: F811
    config = free(folder, tmp_path)
    sleeps(4)
    assert program.train(config) == 0
    rows = rows_of(config.run_folder.rl.schedule)
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    drawn = [n for row in rows for _, n in row["drawn"]]
    assert drawn == list(range(len(drawn))) and len(drawn) >= 4 * 8
    for row in rows:
        dispatches = [dispatch for dispatch, _ in row["drawn"]]
        assert dispatches == sorted(dispatches) and not row["restarted"]
        assert all(0 <= dispatch <= row["dispatches"] for dispatch in dispatches)
    # What is learned from is sampled by weights that are a step old, or older.
    gap = [row["training/rollout_probs_diff_max"] for row in curve(config)[1:]]
    assert gap[0] < 1e-4 < max(gap[1:])


def test_a_resumed_run_goes_on_with_its_groups_and_is_repeated_too(folder, tmp_path, sleeps):  # noqa: F811
    config = free(folder, tmp_path / "first", run__num_steps=2)
    sleeps(5)
    assert program.train(config) == 0
    longer = free(folder, tmp_path / "first")
    sleeps(6)
    assert program.train(longer) == 0
    recorded = told(longer)
    assert [row["restarted"] for row in recorded["schedule"]] == [False, False, True, False]
    drawn = [n for row in recorded["schedule"] for _, n in row["drawn"]]
    assert drawn == list(range(len(drawn)))
    trained = [sample["prompt_id"] for step in recorded["samples"] for sample in step]
    assert len(trained) == 4 * 8 * 4 and len(set(trained)) == 4 * 8
    again = free(folder, tmp_path / "again", rollout__schedule=str(longer.run_folder))
    sleeps(7)
    assert program.train(again) == 0
    repeated = told(again)
    # The run of two steps was evaluated at its end.
    metrics = [row.pop("metrics") for row in (repeated, recorded)]
    for rows in metrics:
        rows[2] = {name: value for name, value in rows[2].items() if not name.startswith("val-")}
    assert metrics[0] == metrics[1] and repeated == recorded


def test_a_schedule_of_another_run_is_refused(folder, tmp_path):  # noqa: F811
    config = free(folder, tmp_path / "first", run__num_steps=1)
    assert program.train(config) == 0
    where = str(config.run_folder)
    for changes, message in (
        ({"rollout__max_staleness": 3}, r"other settings \(rollout.max_staleness: 2 -> 3\)"),
        ({"seed": 5}, r"other settings \(seed: 0 -> 5\)"),
        ({"run__num_steps": 2}, "has 1 steps, and this is step 2: set run[.]num_steps to 1"),
        (
            {"rollout__schedule": str(tmp_path)},
            "does not exist; set rollout[.]schedule to the folder",
        ),
        ({"rollout__max_staleness": 0}, "this run does not; leave rollout[.]schedule out"),
    ):
        settings = {"run__num_steps": 1, "rollout__schedule": where, **changes}
        with pytest.raises(UserError, match=message):
            program.train(free(folder, tmp_path / "again", **settings))
    damaged = config.run_folder.rl.schedule
    damaged.write_text(damaged.read_text().replace('"version"', '"vision"'))
    with pytest.raises(UserError, match=r"schedule\.jsonl:1: not a row of a schedule"):
        program.train(free(folder, tmp_path / "again", run__num_steps=1, rollout__schedule=where))


def test_prompts_that_differ_from_the_recorded_ones_end_the_run(folder, tmp_path):  # noqa: F811
    config = free(folder, tmp_path / "first", run__num_steps=1)
    assert program.train(config) == 0
    path = config.run_folder.rl.schedule
    (row,) = rows_of(path)
    path.write_text(json.dumps(row | {"drawn": row["drawn"][:-1]}) + "\n")
    again = free(
        folder,
        tmp_path / "again",
        run__num_steps=1,
        rollout__schedule=str(config.run_folder),
    )
    with pytest.raises(UserError, match="step 1 does not repeat the recorded schedule"):
        program.train(again)


@pytest.mark.parametrize("side", ["sampler", "learner"])
def test_an_error_on_either_side_ends_the_run_and_loses_no_step(
    side,
    folder,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    owner, name = (GroupLoop, "finish") if side == "sampler" else (Actor, "update")
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
        ({"hosts__num_processes": 2, "hosts__coordinator": "a:1"}, "use hosts.num_processes=1"),
        ({"rollout__driver": "jetstream"}, "rollout.driver='offline'"),
        ({"algorithm__correction__weights": "none"}, "nothing corrects for it"),
        ({"placement": {}}, "give the role rollout a pool of its own"),
    ],
)
def test_settings_that_cannot_run_free(changes, message, folder, tmp_path):  # noqa: F811
    with pytest.raises(UserError) as error:
        program.train(free(folder, tmp_path, **changes))
    assert message in str(error.value)
