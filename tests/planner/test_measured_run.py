"""Lengths and seconds of a run that has been: what a plan takes from its files, and what it compares."""

import dataclasses
import json
import pathlib

import pytest
from plans import tiny_config
from toy_clusters import toy

from jaxrl import cli
from jaxrl.config.config_tree import format_config
from jaxrl.errors import UserError
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.hardware_files import write_accelerator
from jaxrl.planner.measured_run import read_measured_run
from jaxrl.planner.trace_plan import trace_plan

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CONFIG = tiny_config()
# Ten steps; the first half compiles and counts for nothing.
GEN_S = [60.0] * 5 + [3.0, 4.0, 2.0, 3.0, 9.0]


def write_run(path, *, samples=True, clip_ratio=0.25) -> pathlib.Path:
    (path / "rl").mkdir(parents=True)
    text = format_config(CONFIG).replace("train.rows = 4", "train.rows = 8")
    assert "train.rows = 8" in text
    (path / "config.txt").write_text(text)
    rows = [
        {
            "step": step,
            "time_s": 0.0,
            "prompt_length/mean": 5.0,
            "response_length/mean": 6.0,
            "response_length/clip_ratio": clip_ratio,
            "train/num_gen_batches": 3.0,
            "timing_s/gen": seconds,
            "timing_s/update_weights": 0.5,
            "timing_s/old_log_prob": 1.0,
            "timing_s/update_actor": 2.0,
            "timing_s/step": seconds + 4.0,
        }
        for step, seconds in enumerate(GEN_S, 1)
    ]
    # Evaluated in one step alone.
    rows[7]["timing_s/testing"] = 1.0
    (path / "rl/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if samples:
        (path / "rollouts").mkdir()
        for step, lengths in ((1, [1] * 9), (6, [2, 4, 10]), (9, [10, 4])):
            lines = (json.dumps({"length": n, "completion": "x"}) + "\n" for n in lengths)
            (path / f"rollouts/step_{step}.jsonl").write_text("".join(lines))
    return path


def test_lengths_and_seconds_are_those_of_the_last_half(tmp_path):
    run = read_measured_run(write_run(tmp_path / "run"), CONFIG)
    assert run.steps == (6, 10)
    responses = run.lengths.responses
    assert responses.quantiles(5).tolist() == [2, 4, 4, 10, 10]
    assert (responses.mean, responses.cut_off) == (6.0, 0.4)
    assert run.lengths.batches == 3 and run.lengths.prompts.mean == 5
    assert run.seconds == {"generation": 3.5, "preparation": 1.0, "training": 2.0}
    assert run.step_s == 7.0
    assert run.differing == ("train.rows",)


def test_without_saved_samples_the_metrics_give_the_spread(tmp_path):
    run = read_measured_run(write_run(tmp_path / "run", samples=False), CONFIG)
    found = run.lengths.responses
    assert found.kind == "log-normal" and found.mean == 6
    assert found.cut_off == pytest.approx(0.25, abs=0.02)


def test_a_plan_counts_every_generation_batch_of_the_run(tmp_path):
    cluster = Cluster(toy(per_host=8), (1, 8))
    lengths = read_measured_run(write_run(tmp_path / "run"), CONFIG).lengths
    single = dataclasses.replace(lengths, batches=1.0)
    one, three = (trace_plan(CONFIG, cluster, lengths=each).times for each in (single, lengths))
    assert one is not None and three is not None
    assert three.stage_s("generation") == pytest.approx(3 * one.stage_s("generation"))
    least = [times.stage_s("generation", at_least=True) for times in (one, three)]
    assert least[1] == pytest.approx(3 * least[0])
    assert three.stage_s("training") == pytest.approx(one.stage_s("training"))


@pytest.fixture
def machine(tmp_path):
    write_accelerator(toy(per_host=1), tmp_path / "here.json")
    return f"{tmp_path / 'here.json'}:1x1"


def planned(capsys, *arguments: str) -> tuple[int, str, str]:
    recipe = ["--config", str(CONFIGS / "grpo_tiny.py"), "--config.mesh.simulated_devices=0"]
    status = cli.run("plan", ["plan", *recipe, *arguments])
    return (status, *capsys.readouterr())


def test_the_prediction_is_held_against_the_run(tmp_path, machine, capsys):
    run = str(write_run(tmp_path / "run"))
    status, text, _ = planned(capsys, "--topology", machine, "--lengths", run)
    assert status == 0
    assert "off by" in text and "medians of steps 6 to 10" in text and "other settings" in text
    status, text, _ = planned(capsys, "--topology", machine, "--lengths", run, "--json")
    found = json.loads(text)
    assert found["measured"]["seconds"]["generation"] == 3.5
    assert {phase["stage"] for phase in found["predicted"]["phases"]} == set(
        found["measured"]["seconds"]
    )
    assert "measured in" in found["predicted"]["lengths"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--response-tokens", "9"], "has the lengths already; leave out --response-tokens"),
        (["--cut-off", ".1"], "has the lengths already"),
        (["--save", "here"], "compiles nothing; leave one of them out"),
    ],
)
def test_what_contradicts_a_run_is_refused(tmp_path, machine, capsys, arguments, words):
    run = str(write_run(tmp_path / "run"))
    status, _, error = planned(capsys, "--topology", machine, "--lengths", run, *arguments)
    assert status == 2 and words in error and error.count("\n") == 1


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no run"):
        read_measured_run(tmp_path, CONFIG)
    run = write_run(tmp_path / "run")
    (run / "rollouts/step_9.jsonl").write_text('{"completion": "x"}\n')
    with pytest.raises(UserError, match=r"step_9.jsonl holds no saved samples"):
        read_measured_run(run, CONFIG)
