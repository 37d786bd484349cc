"""metrics.jsonl after kills and resumes; timers."""

import json
import math

import pytest

from jaxrl.errors import UserError
from jaxrl.tracking import metrics
from jaxrl.tracking.durable import ensure_writable
from jaxrl.tracking.metrics import MetricsWriter, Timers, read_metrics, without_timings


def _run(directory, steps, **kwargs):
    with MetricsWriter(directory, **kwargs) as writer:
        for step in steps:
            writer.write(step, {"actor/entropy": 1 / step, "critic/rewards/mean": step / 7})


def _without_times(path):
    return [{k: v for k, v in row.items() if k != "time_s"} for row in read_metrics(path)]


def test_rows_come_back_as_written(tmp_path):
    _run(tmp_path, [1, 2])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["actor/entropy"] == 0.5
    assert rows[0]["time_s"] <= rows[1]["time_s"]


def test_a_killed_and_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    _run(whole, range(1, 9))
    _run(resumed, range(1, 6))  # killed after step 5; the last checkpoint holds step 3
    _run(resumed, range(4, 9), resume_step=3)
    assert _without_times(resumed / "metrics.jsonl") == _without_times(whole / "metrics.jsonl")


def test_a_new_run_drops_earlier_rows(tmp_path):
    _run(tmp_path, range(1, 4))
    _run(tmp_path, [1])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_cut_short_by_a_kill_is_dropped_with_a_warning(tmp_path):
    _run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:3: dropped the last line"):
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
    with pytest.warns(UserWarning, match="cut short"):
        _run(tmp_path, [3, 4], resume_step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b'{"time_s": 1}', b'{"step": 1, "a": null}'])
def test_damage_inside_the_file_names_the_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"step": 2, "time_s": 1.0}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: not a row"):
        read_metrics(path)


def test_a_row_that_stands_twice_counts_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _run(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[-1])
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    _run(tmp_path, [3], resume_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_values_that_are_not_finite_survive_as_valid_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["b"] == "inf"
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_a_step_is_written_once_and_in_order(tmp_path):
    _run(tmp_path, [1, 2])
    with (
        MetricsWriter(tmp_path, resume_step=2) as writer,
        pytest.raises(AssertionError, match="step 2 after step 2"),
    ):
        writer.write(2, {})


def test_each_row_is_on_disk_before_the_next_step(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0})
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_an_unwritable_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the output folder"):
        ensure_writable(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot write"):
        MetricsWriter(tmp_path / "file")


def test_timers_accumulate_and_start_again(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    timers = Timers()
    for _ in range(2):
        with timers("gen"):
            pass
    assert timers.take() == {"timing_s/gen": 3.5}
    assert timers.take() == {}
    with pytest.raises(RuntimeError), timers("gen"):
        raise RuntimeError
    assert timers.take() == {"timing_s/gen": 0.5}


def test_evaluation_accuracy_is_found_by_name():
    row = {
        "val-core/chain_sum/acc/mean@4": 0.5,
        "val-core/org/aime-2024/acc/mean@32": 0.25,
        "val-core/chain_sum/reward/mean@4": 1.0,
        "val-aux/chain_sum/acc/mean@4": 1.0,
    }
    assert metrics.evaluation_accuracy(row) == {
        "chain_sum mean@4": 0.5,
        "org/aime-2024 mean@32": 0.25,
    }


def test_rows_of_equal_runs_differ_only_in_timings():
    run = {"step": 3, "perf/update_tflop": 2.0, "perf/padding": 0.1, "critic/score/mean": 0.5}
    clock = {"time_s": 1.7e9, "timing_s/step": 2.0, "perf/tflops_per_device": 9.0, "perf/mfu": 0.4}
    clock |= {"perf/peak_memory_gb": 1.5, "agent/seconds/mean": 0.2}
    assert without_timings(run | clock) == run


@pytest.mark.parametrize("resume_step", [None, 1])
def test_a_folder_instead_of_the_metrics_file_is_refused(tmp_path, resume_step):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        UserError,
        match=r"metrics\.jsonl (is a folder, and a file|cannot be read \(Is a directory\))",
    ):
        MetricsWriter(tmp_path, resume_step=resume_step)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
