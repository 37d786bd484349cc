"""Two processes of two devices each are one program: the same run as one process of four."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from closeness import assert_close
from digits import write_problems
from processes import free_port, started
from recipe_files import write_recipe_file
from tiny_runs import SETTINGS, problems_in
from walking_sampler import UNSEEDED, WALK

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_TRY_AGAIN
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.trainer import program

ROOT = pathlib.Path(__file__).parents[1]
# On a busy machine a start takes minutes.
_PATIENCE_S = 600
MORE_SETTINGS = {
    "name": "tiny",
    "mesh.train": "1-2-2",
    "mesh.generate": "1-1-2-2",
    "mesh.fsdp": 2,
    "sft.num_steps": 3,
    "sft.examples_per_step": 16,
    "sft.optim.lr": 1e-2,
    "sft.optim.lr_warmup_steps": 5,
    "algorithm.dataflow": "grpo",
    # Few problems, so that a second epoch begins.
    "data.train.size": 12,
    "evaluation.every": 2,
    "evaluation.num_samples": 2,
    "run.num_steps": 2,
    "run.save_every": 1,
}


def write_recipe(folder: pathlib.Path, **changes) -> pathlib.Path:
    write_problems(folder)
    output = {"run.output": str(folder / "runs")}
    settings = SETTINGS | MORE_SETTINGS | problems_in(folder) | output | changes
    return write_recipe_file(folder, settings)


def start(recipes: list[pathlib.Path], *options: str) -> contextlib.AbstractContextManager:
    """One process for each recipe, of a run of as many."""
    address = f"localhost:{free_port()}"
    commands = [
        [
            sys.executable,
            ROOT / "launch/train.py",
            f"--config={recipe}",
            "--config.mesh.simulated_devices=4",
            f"--config.hosts.coordinator={address}",
            f"--config.hosts.num_processes={len(recipes)}",
            f"--config.hosts.process_id={i}",
            *options,
        ]
        for i, recipe in enumerate(recipes)
    ]
    return started(commands, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def finish(processes: list[subprocess.Popen], status: int = 0) -> list[tuple[str, str]]:
    """(stdout, stderr) of each; they end with `status`."""
    outputs = [process.communicate(timeout=_PATIENCE_S) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == status, "\n".join(errors[-3000:] for _, errors in outputs)
    return outputs


def run(recipes: list[pathlib.Path], status: int = 0) -> list[tuple[str, str]]:
    with start(recipes) as processes:
        return finish(processes, status)


def rows_of(folder: pathlib.Path, stage: str) -> list[dict]:
    rows = read_metrics(folder / "runs" / "tiny" / "seed0" / stage / "metrics.jsonl")
    return [without_timings(row) for row in rows]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    recipe = write_recipe(folder)
    return folder, run([recipe, recipe])


FIVE_STEPS = {"run.num_steps": 5, "evaluation.every": 5, "run.rollouts_every": 1}


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """The folder of a run of two processes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("five")
    run([write_recipe(folder, **FIVE_STEPS)] * 2)
    return folder


def check_equal(two: pathlib.Path, one: pathlib.Path, stage: str) -> None:
    """Both runs made the same rows of a stage."""
    expected = rows_of(one, stage)
    assert len(expected) == 3
    for ours, theirs in zip(rows_of(two, stage), expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            # One token's ratio, the furthest from 1, shows rounding that means do not.
            rtol = 1e-3 if name.endswith("ratio_max_deviation") else 1e-5
            assert_close(ours[name], theirs[name], rtol=rtol, scale=1, err_msg=name)


def both(
    tmp_path: pathlib.Path, processes: int = 2, **settings
) -> tuple[pathlib.Path, pathlib.Path]:
    """Folders of a run of several processes, of two devices each, and of one with all devices."""
    one, several, num_devices = tmp_path / "one", tmp_path / "several", 2 * processes
    recipes = []
    for folder in (one, several):
        folder.mkdir()
        recipes.append(write_recipe(folder, **settings))
    options = f"--config.mesh.simulated_devices={num_devices}"
    with start([recipes[1]] * processes, options) as children:
        finish(children)
    config = load_config(Config, str(recipes[0]), {})
    assert program.train(config, devices=jax.devices()[:num_devices]) == 0
    return several, one


def test_two_processes_fine_tune_as_one(tmp_path):
    settings = {"run.num_steps": 0, "data.evaluation.path": ""}
    check_equal(*both(tmp_path, **settings), "sft")


@pytest.mark.long
def test_two_processes_train_as_one(two, tmp_path):
    folder, _ = two
    recipe = write_recipe(tmp_path)
    assert program.train(load_config(Config, str(recipe), {}), devices=jax.devices()[:4]) == 0
    for stage in ("sft", "rl"):
        check_equal(folder, tmp_path, stage)
    # Their trainer's log-probabilities lie in rows of both processes.
    kept = [path / "runs/tiny/seed0/rollouts/step_1.jsonl" for path in (folder, tmp_path)]
    for lines in zip(*(path.read_text().splitlines() for path in kept), strict=True):
        ours, theirs = (json.loads(line)["token_pieces"] for line in lines)
        assert ours["text"] == theirs["text"]
        assert_close(*(np.array(x["old_logprob"]) for x in (ours, theirs)), rtol=1e-3, scale=1)


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True], ids=["whole batches", "partial"])
def test_two_processes_choose_prompts_as_one(partial, tmp_path):
    settings: dict = {"data.sampler": WALK, "algorithm.dataflow": "dapo"}
    settings |= {"rollout.on_shortage": "fill", "rollout.max_generation_batches": 2}
    if partial:
        settings |= {"rollout.max_staleness": 1, "rollout.slots": 16}
    check_equal(*both(tmp_path, **settings), "rl")


@pytest.mark.slow
def test_processes_that_choose_other_prompts_are_told(tmp_path):
    recipe = write_recipe(tmp_path, **{"data.sampler": UNSEEDED})
    for _, errors in run([recipe] * 2, status=2):
        assert "error: the prompts of step 1 differ between processes" in errors


@pytest.mark.long
def test_pools_hand_weights_over_between_processes(tmp_path):
    """Both pools have devices of both processes, and split the weights differently."""
    pools = {
        "learn": {"roles": ("actor",), "train": "1-1-2", "generate": "", "fsdp": 2},
        "sample": {"roles": ("rollout",), "train": "1-2-1", "generate": "", "fsdp": 1},
    }
    two, one = both(tmp_path, placement=pools)
    for stage in ("sft", "rl"):
        check_equal(two, one, stage)
    received = {row["perf/handover_gb"] for row in rows_of(two, "rl")[1:]}
    assert len(received) == 1


@pytest.mark.slow
def test_each_sampling_process_samples_a_part_for_a_learner_apart(tmp_path):
    """Process 0 learns; 1 and 2 have a replica of two devices each, and sample without each other.

    A reward function and kept samples are read by process 0, which has sampled none, entropies by all. The
    function, which alone decides, abstains from some samples.
    """
    rules = tmp_path / "rules.py"
    rules.write_text(
        "def rule(responses):\n"
        "    sums = [int(tokens.sum()) for tokens in responses.tokens]\n"
        "    return [float(x % 7) if x % 4 else None for x in sums]\n"
    )
    pools = {
        "learn": {"roles": ("actor",), "train": "1-1-2", "generate": "", "fsdp": 2},
        "sample": {"roles": ("rollout",), "train": "1-2-2", "generate": "", "fsdp": 1},
    }
    settings = {"placement": pools, "hosts.pools_apart": True, "sft.num_steps": 0}
    settings["reward.functions"] = {"rule": {"path": f"{rules}:rule", "weight": 0.1}}
    settings["reward.grader_weight"] = 0.0
    settings |= {"algorithm.top_entropy_quantile": 0.5, "run.rollouts_every": 1}
    three, one = both(tmp_path, 3, **settings)
    check_equal(three, one, "rl")
    assert rows_of(three, "rl")[-1]["reward/abstained"] > 0
    kept = [path / "runs/tiny/seed0/rollouts/step_2.jsonl" for path in (three, one)]
    ours, theirs = ([json.loads(x) for x in path.read_text().splitlines()] for path in kept)
    assert [x["completion"] for x in ours] == [x["completion"] for x in theirs]


FREE = {
    "sft.num_steps": 0,
    "data.evaluation.path": "",
    "algorithm.correction.weights": "token",
    "run.num_steps": 4,
    "run.save_every": 2,
    "run.rollouts_every": 1,
    # A machine may be busy: no step is given up.
    "run.stop_within_s": 10_000.0,
    "placement": {
        "learn": {"roles": ("actor",), "train": "1-1-2", "generate": "", "fsdp": 2},
        "sample": {"roles": ("rollout",), "train": "1-2-1", "generate": "", "fsdp": 1},
    },
}


def told(folder: pathlib.Path) -> tuple:
    """Rows without times, samples, and the schedule."""
    run = folder / "runs" / "tiny" / "seed0"
    samples = [path.read_text() for path in sorted((run / "rollouts").glob("step_*.jsonl"))]
    return rows_of(folder, "rl"), samples, (run / "rl" / "schedule.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "staleness", "processes", "members"),
    [
        (True, 1, 2, []),
        (False, 2, 2, []),
        (True, 2, 3, []),
        # Two groups sample without each other: of processes 1 and 2, or of one device of each process. The
        # last run ends after two steps and goes on.
        (True, 2, 3, [0, 1]),
        (False, 2, 2, [0, 1]),
    ],
)
def test_processes_run_free_and_one_repeats_them(apart, staleness, processes, members, tmp_path):
    """Pools have processes of their own, or devices of all. The third step has an evaluation beside it."""
    settings = FREE | {"rollout.max_staleness": staleness, "hosts.pools_apart": apart}
    del settings["data.evaluation.path"]
    if apart:
        # The first minibatch, which is the only one, takes its log-probabilities from its own update.
        settings["algorithm.updates_per_step"] = 1
    if members:
        learn, sample = FREE["placement"].values()
        layout = "1-2-2" if apart else "1-1-2"
        settings["placement"] = {"learn": learn, "sample": sample | {"train": layout}}
    elif processes == 3:
        learn, sample = FREE["placement"].values()
        reference = learn | {"roles": ("reference",), "train": "1-2-1", "fsdp": 1}
        settings["placement"] = {"learn": learn, "look": reference, "sample": sample}
        settings["algorithm.kl.reward_coef"] = 0.05
    recipe, num_devices = write_recipe(tmp_path, **settings), 2 * processes
    resumed = bool(members) and not apart
    for num_steps in (2, 4) if resumed else (4,):
        options = f"mesh.simulated_devices={num_devices}", f"run.num_steps={num_steps}"
        with start([recipe] * processes, *(f"--config.{each}" for each in options)) as children:
            finish(children)
    rows, samples, schedule = told(tmp_path)
    assert [row.get("val-aux/version") for row in rows] == [None, None, None, 2, None]
    if resumed:
        # It was evaluated after two steps.
        rows[2] = {name: x for name, x in rows[2].items() if not name.startswith("val-")}
        assert [json.loads(x)["restarted"] for x in schedule.splitlines()] == [
            False,
            False,
            True,
            False,
        ]
    assert all(json.loads(line)["members"] == members for line in schedule.splitlines())
    before, *rows = rows
    assert all(row["rollout/dropped_stale_groups"] == 0 for row in rows)
    assert 0 < max(row["rollout/staleness"] for row in rows) <= staleness
    assert any(row["rollout/unfinished_groups"] for row in rows)
    again = tmp_path / "again"
    recorded = tmp_path / "runs" / "tiny" / "seed0"
    where = {"rollout.schedule": str(recorded), "run.output": str(again / "runs")}
    config = load_config(Config, str(recipe), where)
    assert program.train(config, devices=jax.devices()[:num_devices]) == 0
    assert told(again) == ([before, *rows], samples, schedule)
    if not resumed:
        replay = [sys.executable, "-m", "jaxrl", "replay", str(recorded), "--step", "3"]
        done = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, "equal: 3 rows, " in done.stdout) == (0, True), done


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_learner_or_sampler_ends_the_other_and_the_run_goes_on(lost, tmp_path):
    """Process 0 learns, and process 1 samples."""
    more = {
        "rollout.max_staleness": 1,
        "hosts.pools_apart": True,
        "run.save_every": 1,
        "run.num_steps": 8,
    }
    recipe = write_recipe(tmp_path, **FREE | more | {"hosts.lost_after_s": 30.0})
    with start([recipe, recipe]) as processes:
        wait_for_step(tmp_path, processes)
        processes[lost].kill()
        killed_s = time.monotonic()
        (_, errors), *_ = finish([processes[1 - lost]], EXIT_TRY_AGAIN)
        assert time.monotonic() - killed_s < 60
        assert f"process {lost} " in errors
    run([recipe, recipe])
    rows, samples, schedule = told(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 9)) and len(samples) == 8
    assert sum(json.loads(line)["restarted"] for line in schedule.splitlines()) == 1
    assert all(row["rollout/dropped_stale_groups"] == 0 for row in rows)


@pytest.mark.long
def test_settings_that_differ_end_every_process(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    recipes = [write_recipe(tmp_path), write_recipe(other, **{"rollout.num_samples": 2})]
    for _, errors in run(recipes, status=2):
        assert "the settings differ between processes: 1 disagree with process 0" in errors


def wait_for_step(folder: pathlib.Path, processes: list[subprocess.Popen]) -> None:
    """Returns once the first step of reinforcement learning is logged."""
    log = folder / "runs" / "tiny" / "seed0" / "rl" / "metrics.jsonl"
    until = time.monotonic() + _PATIENCE_S
    while not log.exists() or len(read_metrics(log)) < 2:
        assert time.monotonic() < until and all(p.poll() is None for p in processes)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_the_next_run_goes_on(two, tmp_path):
    # A machine may be busy: no step is given up.
    patient = {"run.stop_within_s": 10_000.0}
    recipe = write_recipe(tmp_path, **{"run.num_steps": 8, "evaluation.every": 8} | patient)
    with start([recipe, recipe]) as processes:
        wait_for_step(tmp_path, processes)
        processes[1].send_signal(signal.SIGTERM)
        finish(processes, EXIT_TRY_AGAIN)
    stopped = rows_of(tmp_path, "rl")
    assert 2 <= len(stopped) < 9
    # The same command with as many processes goes on to the numbers of a run that was never stopped.
    run([recipe, recipe])
    folder, _ = two
    resumed = rows_of(tmp_path, "rl")
    assert len(resumed) == 9
    ours, theirs = resumed[1], rows_of(folder, "rl")[1]
    assert_close(ours["actor/pg_loss"], theirs["actor/pg_loss"], scale=1)
    assert resumed[: len(stopped)] == stopped


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_supervised_processes_go_on_after_a_kill(five, tmp_path, lost):
    recipe = write_recipe(tmp_path, **FIVE_STEPS | {"hosts.lost_after_s": 20.0})
    with start([recipe] * 2, "--supervise") as supervisors:
        wait_for_step(tmp_path, supervisors)
        supervisor = supervisors[lost].pid
        (child,) = (
            pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        )
        os.kill(int(child), signal.SIGKILL)
        told = [errors for _, errors in finish(supervisors)]
        assert all("supervisor: ended with status" in errors for errors in told)
        # The other one names the lost one, and JAX ends nobody.
        assert f"error: process {lost} " in told[1 - lost]
        assert not any(word in errors for errors in told for word in ("SIGABRT", "Fatal Python"))
    assert rows_of(tmp_path, "rl") == rows_of(five, "rl")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_does_not_come_back_is_done_without(five, tmp_path, lost):
    """The other one goes on alone, in a layout that the recipe has for one host, to the same samples."""
    one_host = "mesh.train=1-2-1 mesh.generate=1-1-2-1 mesh.fsdp=1 mesh.simulated_devices=2"
    # On a busy machine one supervisor starts seconds after the other, which must wait for it.
    fewer = {"hosts.fewer": {"1": one_host}, "hosts.fewer_after_s": 30.0}
    recipe = write_recipe(tmp_path, **FIVE_STEPS | fewer | {"hosts.lost_after_s": 20.0})
    with start([recipe] * 2, "--supervise") as supervisors:
        wait_for_step(tmp_path, supervisors)
        supervisor = supervisors[lost].pid
        child = pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
        # As if the whole host were gone.
        for process in (supervisor, int(child)):
            os.kill(process, signal.SIGKILL)
        ((_, errors),) = finish([supervisors[1 - lost]])
        assert f"hosts [{1 - lost}] of 2 go on without the others" in errors
    ours, theirs = (rows_of(folder, "rl") for folder in (tmp_path, five))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, wanted in zip(ours, theirs, strict=True):
        # It compares the devices of a layout.
        for name in wanted.keys() - {"perf/imbalance"}:
            rtol = 1e-2 if name.endswith("ratio_max_deviation") else 1e-4
            assert_close(row[name], wanted[name], rtol=rtol, scale=1, err_msg=name)
    kept = [sorted((f / "runs/tiny/seed0/rollouts").glob("step_*")) for f in (tmp_path, five)]
    assert len(kept[0]) == len(kept[1]) == 5
    for mine, other in zip(*kept, strict=True):
        tokens = [
            [json.loads(line)["completion"] for line in f.read_text().splitlines()]
            for f in (mine, other)
        ]
        assert tokens[0] == tokens[1]
