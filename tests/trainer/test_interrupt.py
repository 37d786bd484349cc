"""Signals: remembered where something could be torn, at once where not, in time wherever the program is."""

import dataclasses
import os
import pathlib
import signal
import sys
import threading
import time

import pytest
from beside import report_of
from processes import started
from recipe_files import write_recipe_file
from test_program import make_config, problems, warm, whole  # noqa: F401

from jaxrl.config.config_tree import flatten_config
from jaxrl.errors import EXIT_INTERRUPTED, EXIT_TRY_AGAIN
from jaxrl.mesh.interrupt import StopRequested, StopSignal
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.tracking.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
# For what happens in well under a second on a machine that does nothing else.
PATIENCE_S = 120


@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, EXIT_TRY_AGAIN), (signal.SIGINT, EXIT_INTERRUPTED)]
)
def test_a_run_that_does_not_answer_is_ended_with_its_last_acts(number, status, capsys):
    ends, acts, ended = [], [], threading.Event()

    def end(with_status):
        ends.append(with_status)
        ended.set()

    def act(name):
        return lambda seconds: acts.append((name, 0 < seconds <= 10)) or f"{name} is done"

    def fails(seconds):
        raise OSError("the disk is full")

    with (
        StopSignal(within_s=1.0, end=end) as stop,
        stop.last_act(act("report")),
        stop.last_act(fails),
        stop.last_act(act("checkpoint")),
    ):
        with stop.last_act(act("of an earlier stage")):
            pass
        os.kill(os.getpid(), number)
        assert ended.wait(PATIENCE_S)
    assert ends == [status]
    assert [name for name, _ in acts] == ["checkpoint", "report"]
    out, err = capsys.readouterr()
    assert out.splitlines() == ["checkpoint is done", "report is done"]
    said, failed = err.splitlines()
    assert said.startswith(f"stopped by {number.name} in the middle of a step")
    assert failed == "OSError: the disk is full"


def test_a_last_act_that_hangs_is_not_waited_for():
    ended = threading.Event()
    hang = threading.Event()
    with (
        StopSignal(within_s=1.0, end=lambda status: ended.set()) as stop,
        stop.last_act(lambda seconds: str(hang.wait())),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(PATIENCE_S)
    hang.set()


def test_saving_is_not_cut_short():
    ends = []
    with StopSignal(within_s=0.5, end=ends.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with stop.saving():
            time.sleep(2)
            assert not ends
        with pytest.raises(StopRequested):
            stop.check()
    assert not ends


def test_a_run_that_answers_ends_by_itself():
    ends = []
    with pytest.raises(StopRequested), StopSignal(within_s=1000, end=ends.append) as stop:
        assert not stop.pending
        os.kill(os.getpid(), signal.SIGTERM)
        stop.check()
    assert not ends and stop.exit_status == EXIT_TRY_AGAIN
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not [thread for thread in threading.enumerate() if thread.name == "stop-signal"]


def test_before_there_is_anything_to_save_a_signal_ends_the_program_at_once(capsys):
    with StopSignal(within_s=1000) as stop:
        with pytest.raises(SystemExit) as end, stop.ends_at_once():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE_S)
        assert end.value.code == EXIT_TRY_AGAIN
        assert "nothing to save" in capsys.readouterr().out
    with StopSignal(within_s=1000) as stop, pytest.raises(KeyboardInterrupt), stop.ends_at_once():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(PATIENCE_S)


# XLA evaluates this sum of 10 billion numbers while it compiles, in many minutes.
COMPILES_LONG = """
import pathlib
import jax
import numpy as np
from jaxrl.rollout import drivers
from jaxrl.rollout.driver import OfflineBackend

class Compiling(OfflineBackend):
    def generate(self, prompts, options, **further):
        log = pathlib.Path({log!r})
        if log.exists() and len(log.read_bytes().splitlines()) >= 2:
            pathlib.Path({begun!r}).touch()
            numbers = np.arange(200_000, dtype=np.float32)
            sums = lambda: jax.lax.reduce_window(numbers, 0.0, jax.lax.add, (100_001,), (1,), "SAME")
            jax.jit(sums)()
        return super().generate(prompts, options, **further)

def compiled(model, mesh, config, decode_texts):
    offline = drivers.build_backend("offline", model, mesh, config, decode_texts)
    return Compiling(offline.engine, decode_texts)
"""


@pytest.mark.slow
def test_a_long_compilation_does_not_keep_a_run_alive(tmp_path, problems, whole):  # noqa: F811
    begun = tmp_path / "begun"
    config = make_config(tmp_path, problems)
    log = config.run_folder.rl.metrics
    (tmp_path / "tools.py").write_text(COMPILES_LONG.format(log=str(log), begun=str(begun)))
    rollout = dataclasses.replace(whole.rollout, driver=f"{tmp_path}/tools.py:compiled")
    run = dataclasses.replace(config.run, stop_within_s=20)
    train = TrainConfig(rows=4, row_tokens=64)
    config = warm(dataclasses.replace(config, rollout=rollout, run=run, train=train), whole)
    recipe = write_recipe_file(tmp_path, flatten_config(config))
    command = [sys.executable, ROOT / "launch/train.py", "--config", recipe]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with started([command], env=environment) as (process,):
        until_s = time.monotonic() + 500
        while not begun.exists():
            assert process.poll() is None and time.monotonic() < until_s, process.communicate()
            time.sleep(0.1)
        time.sleep(3)  # it is in the compiler by then
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        # 20 s where nothing else runs; the compiler alone takes many minutes.
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_TRY_AGAIN, err
    assert "stopped by SIGTERM in the middle of a step" in err
    assert "the last checkpoint is of step 1" in out
    assert report_of(config.run_folder).count("<svg") >= 1
    assert read_metrics(log)[-1]["step"] == 1
