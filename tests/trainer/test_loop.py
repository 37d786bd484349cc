"""The loop around a stage that counts: what is logged and saved, how it goes on, with real checkpoints."""

import contextlib
import math
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import pytest

from jaxrl.errors import UserError
from jaxrl.mesh.interrupt import StopRequested, StopSignal
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.metrics import MetricsWriter, read_metrics
from jaxrl.tracking.run_folder import StageFolder
from jaxrl.tracking.stage_checkpoints import StageCheckpoints, lost_rows
from jaxrl.trainer.loop import Loop, Schedule, TrainingStage

# A machine may be busy, and what is over time ends this process.
PATIENCE_S = 10_000


class Counter:
    """A learner whose weight is the number of its updates."""

    model = ModelConfig()

    def __init__(self):
        self.state = self._state_of(0)
        self.num_updates = 0

    @staticmethod
    def _state_of(count) -> TrainState:
        return TrainState({"w": jnp.full(2, float(count))}, {"m": jnp.zeros(1)}, jnp.int32(count))

    def for_training(self) -> TrainState:
        return self.state

    def abstract_state(self) -> TrainState:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state)

    def update(self) -> None:
        self.num_updates += 1
        self.state = self._state_of(int(self.state.step) + 1)


class Counting(TrainingStage):
    """Counts in steps; `before` and `between` (update and end of a step) may raise."""

    def __init__(self, counter, loop, *, metrics, before, between):
        self._counter = counter
        self._loop = loop
        self._metrics = metrics
        self._before = before
        self._between = between

    @property
    def learners(self):
        return {"actor": self._counter}

    def begin(self, record):
        assert record is None or set(record) >= {"at"}

    def step(self):
        step = self._loop.step + 1
        with self._loop.phase("before", may_stop=True):
            self._before(step)
        self._counter.update()
        if self._between is not None:
            self._between(step)
        return {"weight": self._counter.state.params["w"][0]} | self._metrics(step)

    def evaluate(self, when):
        return self._metrics(0) if when == "before" else {}

    def record(self):
        return {"at": self._loop.step}


def open_loop(
    folder,
    stop,
    *,
    num_steps=6,
    save_every=2,
    keep=1,
    may_restart=False,
    accepts_lost_rows=False,
    **options,
) -> Loop:
    stage = StageFolder(folder)
    schedule = Schedule(num_steps, save_every, evaluate_every=100)
    checkpoints = StageCheckpoints(stage, keep=keep, may_restart=may_restart)

    def open_log(step):
        return MetricsWriter(folder, resume_step=step, drops_damaged=accepts_lost_rows)

    parts = {"checkpoints": checkpoints, "open_log": open_log, "num_devices": 1, "stop": stop}
    return Loop("COUNT", stage, schedule, **parts, **options)


def run(
    folder,
    *,
    counter=None,
    metrics=lambda step: {},
    before=lambda step: None,
    between=None,
    **options,
):
    """Counts to the end, or to where a step raises."""
    counter = counter or Counter()
    with StopSignal(within_s=PATIENCE_S) as stop:
        loop = open_loop(folder, stop, **options)
        loop.run(Counting(counter, loop, metrics=metrics, before=before, between=between))
    return counter


def rows_of(folder) -> list[dict]:
    clock = ("time_s", "timing_s/", "timing_per_token_ms/", "perf/")
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]


def saved_steps(folder) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def fail_at(step):
    def before(now):
        if now == step:
            raise RuntimeError("the reward is broken")

    return before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "rl"
    run(folder)
    return rows_of(folder)


def test_a_stage_begins_with_a_checkpoint_and_ends_with_one(tmp_path, whole):
    folder = tmp_path / "rl"
    with pytest.raises(RuntimeError):
        run(folder, before=fail_at(1))
    assert saved_steps(folder) == [0]
    assert [row["step"] for row in rows_of(folder)] == [0]
    counter = run(folder)
    assert int(counter.state.step) == 6
    assert rows_of(folder) == whole
    assert saved_steps(folder)[-1] == 6
    # A finished one is left alone.
    assert int(run(folder).state.step) == 6
    assert rows_of(folder) == whole


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"save_every": 0, "keep": None}, [0, 6]),
        ({"save_every": 2, "keep": None}, [0, 2, 4, 6]),
        ({"save_every": 2, "keep": 1}, [6]),
    ],
)
def test_an_interval_of_0_saves_the_last_step_alone(tmp_path, options, saved):
    run(tmp_path / "rl", **options)
    assert saved_steps(tmp_path / "rl") == saved


def test_an_interval_of_0_evaluates_never():
    evaluates = Schedule(num_steps=3, save_every=1, evaluate_every=0).evaluates
    assert [evaluates(step) for step in range(4)] == [False] * 4


# Errors


def test_an_error_in_a_step_saves_the_steps_before_it(tmp_path, whole, capsys):
    folder = tmp_path / "rl"
    with pytest.raises(RuntimeError, match="the reward is broken"):
        run(folder, before=fail_at(4), save_every=100)
    assert saved_steps(folder)[-1] == 3
    said = "COUNT: step 4 was not finished; the last checkpoint is of step 3"
    assert said in capsys.readouterr().out
    run(folder)
    assert rows_of(folder) == whole


@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_an_error_after_the_update_keeps_the_checkpoint_before(tmp_path, whole, capsys, fault):
    """The state of the last finished step is gone by then, and what is there must not be saved as it."""
    folder = tmp_path / "rl"
    if fault == "raises":
        with pytest.raises(RuntimeError):
            run(folder, between=fail_at(4))
    else:
        with pytest.raises(UserError, match=r"step 4: loss = nan; .*last checkpoint: step 2"):
            run(folder, metrics=lambda step: {"loss": float("nan")} if step == 4 else {})
    assert saved_steps(folder)[-1] == 2
    said = "COUNT: step 4 had started to change the weights; the last checkpoint is of step 2"
    assert said in capsys.readouterr().out
    run(folder)
    assert rows_of(folder) == whole


def test_an_error_that_saving_meets_does_not_hide_the_first(tmp_path, monkeypatch, capsys):
    def broken(self, step, states, record, **options):
        raise RuntimeError("the device is gone")

    def before(step):
        if step == 4:
            monkeypatch.setattr("jaxrl.tracking.checkpoints.Checkpoints.save", broken)
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        run(tmp_path / "rl", before=before)
    said = capsys.readouterr().out
    assert "could not be saved (RuntimeError('the device is gone'))" in said
    assert "the last checkpoint is of step 2" in said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_ends_the_run_by_its_name(tmp_path, value):
    with pytest.raises(UserError, match=f"COUNT step 3: actor/pg_loss = {value}; training stops"):
        run(tmp_path, metrics=lambda step: {"actor/pg_loss": value if step == 3 else 0.0, "x": 1.0})
    assert [row["step"] for row in rows_of(tmp_path)][-1] == 2


def test_a_stage_without_tokens_has_no_throughput(tmp_path):
    run(tmp_path)
    assert not any("perf/throughput" in row for row in read_metrics(tmp_path / "metrics.jsonl"))


def test_a_signal_saves_the_last_finished_step(tmp_path, whole):
    folder = tmp_path / "rl"

    def before(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopRequested):
        run(folder, before=before, save_every=100)
    assert saved_steps(folder)[-1] == 3
    run(folder)
    assert rows_of(folder) == whole


# Nothing begins again unasked


def lose_checkpoints(folder):
    for path in (folder / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def lose_manifests(folder):
    shutil.rmtree(folder / "checkpoints.manifests")


def lose_all(folder):
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "checkpoints.manifests")


def lose_all_but_set_aside(folder):
    (folder / "checkpoints").rename(folder / "checkpoints.damaged")
    shutil.rmtree(folder / "checkpoints.manifests")
    (folder / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    "lose",
    [
        lose_checkpoints,
        pytest.param(lose_manifests, marks=pytest.mark.long),
        pytest.param(lose_all, marks=pytest.mark.long),
        lose_all_but_set_aside,
    ],
    ids=lambda f: f.__name__,
)
def test_a_stage_whose_checkpoints_are_lost_is_refused_each_time(tmp_path, lose, whole, capsys):
    folder = tmp_path / "rl"
    run(folder)
    lose(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(UserError, match=r"no intact checkpoint is left \(.*resume=or_restart"):
            run(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    # Told to, it begins again; what was there stays.
    run(folder, may_restart=True)
    assert "COUNT: begins again; what was there is in" in capsys.readouterr().out
    assert rows_of(folder) == whole
    (aside,) = tmp_path.glob("rl.aside.*")
    assert sorted(path.read_bytes() for path in aside.rglob("*") if path.is_file()) == sorted(
        before.values()
    )
    # And then it goes on, though it is still told to.
    run(folder, num_steps=8, may_restart=True)
    assert [row["step"] for row in rows_of(folder)] == list(range(9))
    assert len(list(tmp_path.glob("rl.aside.*"))) == 1


def test_a_death_before_the_first_checkpoint_begins_again(tmp_path, whole):
    folder = tmp_path / "rl"
    (folder / "checkpoints" / "0").mkdir(parents=True)
    (folder / "checkpoints" / "0" / "half").write_text("written")
    (folder / "metrics.jsonl").touch()
    run(folder)
    assert rows_of(folder) == whole


def test_a_death_before_the_row_of_step_0(tmp_path, whole):
    folder = tmp_path / "rl"
    with pytest.raises(RuntimeError):
        run(folder, before=fail_at(1))
    (folder / "metrics.jsonl").write_text("")
    run(folder)
    assert rows_of(folder) == whole


def test_a_manifest_is_written_after_the_row_of_its_step(tmp_path, monkeypatch):
    """A death between the two then repeats the step; the other way round its row would be missing."""
    for step, last in ((4, 2), (5, 4)):
        folder = tmp_path / str(step)
        monkeypatch.setattr("jaxrl.tracking.metrics.MetricsWriter.write", fail_write_at(step))
        with pytest.raises(OSError, match="disk"):
            run(folder)
        assert StoredCheckpoints(folder / "checkpoints").newest_intact() == last


def fail_write_at(bad_step):
    def write(self, step, metrics):
        if step == bad_step:
            raise OSError("the disk is full")

    return write


def test_a_log_that_cannot_be_read_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "rl"
    run(folder, num_steps=4)
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([rows[0], b"\xff\n", *rows[2:]]))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    begun = []
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a row of metrics"):
        run(folder, on_begin=lambda: begun.append(1))
    assert not begun
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_damaged_rows_are_dropped_if_their_loss_is_accepted(tmp_path):
    folder = tmp_path / "rl"
    run(folder)
    log = folder / "metrics.jsonl"
    rows = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*rows[:2], b"\xff\n", rows[3], rows[3], *rows[4:]]))
    run(folder, num_steps=8, accepts_lost_rows=True)
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 3, 4, 5, 6, 7, 8]
    # What is left is what the next checkpoint was saved with.
    assert lost_rows(StageFolder(folder)) is None


def test_what_is_refused_has_written_nothing(tmp_path):
    folder = tmp_path / "rl"
    run(folder, num_steps=4)
    shutil.copytree(folder / "checkpoints" / "4", folder / "checkpoints" / "5")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    begun = []
    wide = Counter()
    wide.state = TrainState({"w": jnp.zeros(3)}, {"m": jnp.zeros(1)}, jnp.int32(0))
    with pytest.raises(
        UserError, match=r"does not fit .* \(actor: \['w'\] is \[2\] there and \[3\]"
    ):
        run(folder, counter=wide, on_begin=lambda: begun.append(1))
    assert not begun
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_finished_stage_is_read_without_owning_it(tmp_path):
    folder = tmp_path / "sft"
    held = []

    @contextlib.contextmanager
    def ownership():
        held.append(True)
        yield

    run(folder, ownership=ownership())
    assert held == [True]
    run(folder, ownership=ownership())
    assert held == [True]
