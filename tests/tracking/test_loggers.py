"""TensorBoard, wandb and trackio, each read back from what it wrote on this machine."""

import json
import os
import subprocess
import sys
import time
import types

import pytest
from extras import import_extra, needs_extra
from tensorboardX.proto import event_pb2

from jaxrl.errors import UserError
from jaxrl.tracking.loggers import LOGGER_KINDS, LoggedRun
from jaxrl.tracking.metrics import MetricsWriter, read_metrics
from jaxrl.tracking.run_folder import LOGGERS, RunConfig

RUN = LoggedRun("sums", "sums-seed1-rl", {"optim.lr": 1e-6, "seed": 1})


def _write(directory, steps, *names, **kwargs):
    with MetricsWriter(directory, loggers=names, run=RUN, **kwargs) as writer:
        for step in steps:
            writer.write(step, {"actor/entropy": 1 / step, "val-core/a/acc/mean@4": step / 8})


def _events(directory):
    """TFRecord framing: 8 bytes of length, 4 of CRC, the event, 4 of CRC."""
    events = []
    for path in sorted((directory / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_tensorboard_gets_the_values_and_purges_repeated_steps(tmp_path):
    _write(tmp_path, [1, 2, 3], "tensorboard")
    _write(tmp_path, [3], "tensorboard", resume_step=2)
    events = _events(tmp_path)
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert (2, "actor/entropy", 0.5) in scalars
    assert [step for step, tag, _ in scalars if tag == "actor/entropy"] == [1, 2, 3, 3]
    # TensorBoard forgets steps from the one of a session start on.
    assert [e.step for e in events if e.HasField("session_log")] == [0, 3]


def test_without_loggers_there_is_metrics_jsonl_alone(tmp_path):
    _write(tmp_path, [1])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def _wandb_records(path):
    """The records of wandb's offline file: LevelDB's log format with a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, content = path.read_bytes(), 7, b""
    records = []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the end of a block is filled with zeros
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(content))
            content = b""
    return records


def _wandb_history(record):
    items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
    return {key: json.loads(value) for key, value in items.items()}


def test_wandb_writes_the_values_offline_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    wandb = import_extra("wandb", "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    _write(tmp_path, [1, 2], "wandb")
    time.sleep(1.1)  # wandb names its folder by the second
    _write(tmp_path, [3], "wandb:other", resume_step=2)
    wandb.teardown()  # its process writes for a moment after a run has finished
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    whole = [_wandb_records(path) for path in files]
    rows = [_wandb_history(r) for records in whole for r in records if r.HasField("history")]
    assert [(row["_step"], row["actor/entropy"]) for row in rows] == [(1, 1), (2, 0.5), (3, 1 / 3)]
    assert rows[2]["val-core/a/acc/mean@4"] == 3 / 8
    first, second = (r.run for records in whole for r in records if r.HasField("run"))
    assert first.run_id == second.run_id and first.display_name == "sums-seed1-rl"
    assert (first.project, second.project) == ("sums", "other")
    settings = {item.key: item.value_json for item in first.config.update}
    assert float(settings["optim.lr"]) == 1e-6


# trackio reads its folder from the environment when it is imported.
TRACKIO = """
import sys, trackio
from jaxrl.tracking.loggers import LoggedRun
from jaxrl.tracking.metrics import MetricsWriter

run = LoggedRun("sums", "sums-seed1-rl", {"optim.lr": 1e-6})
for steps, resume_step in (([1, 2], None), ([3], 2)):
    with MetricsWriter(sys.argv[1], loggers=["trackio"], run=run, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, {"actor/entropy": 1 / step})
from trackio.sqlite_storage import SQLiteStorage

(record,) = SQLiteStorage.get_run_records("sums")
rows = SQLiteStorage.get_logs("sums", record["name"], run_id=record["id"])
(run,) = trackio.Api().runs("sums")
print("FOUND", record["name"], [(row["step"], row["actor/entropy"]) for row in rows], run.config["optim.lr"])
"""


@needs_extra("trackio", "trackio")
def test_trackio_writes_the_values_on_this_machine_and_a_resumed_run_goes_on(tmp_path):
    env = {key: text for key, text in os.environ.items() if not key.startswith("TRACKIO")}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "rl")],
        env=env | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found == ["FOUND sums-seed1-rl [(1, 1.0), (2, 0.5), (3, 0.3333333333333333)] 1e-06"], (
        done.stderr
    )
    assert list((tmp_path / "trackio").glob("sums*.db"))


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{package}.* pip install {package}, or") as error:
        MetricsWriter(tmp_path, loggers=("tensorboard", package))
    assert "\n" not in str(error.value)


class _Refusing(types.ModuleType):
    class Error(Exception):
        pass

    def init(self, **_):
        raise self.Error("no API key")


def test_wandb_that_does_not_start_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", _Refusing("wandb"))
    with pytest.raises(UserError, match=r"did not start \(no API key\); run `wandb login`"):
        MetricsWriter(tmp_path, loggers=("wandb",))
    _write(tmp_path, [1])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_every_name_has_a_logger():
    assert tuple(LOGGER_KINDS) == LOGGERS
    entries = ("tensorboard", "wandb:my project", "trackio")
    assert RunConfig(loggers=entries).loggers == entries


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("mlflow",), r"loggers\[0\] = 'mlflow': is no logger; use tensorboard, wandb, trackio"),
        (("wandb:",), r"is no logger; use .* wandb:PROJECT"),
        (("tensorboard:x",), r"is no logger"),
        (("wandb", "wandb:x"), r"has a logger twice"),
        ("wandb", r"loggers = 'wandb': "),
    ],
)
def test_entries_that_name_no_logger_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(loggers=entries)
