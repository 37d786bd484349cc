"""Reward functions in a process of their own: that they work there, and that any of them can be ended."""

import contextlib
import os
import pathlib
import re
import sys
import textwrap
import time

import numpy as np
import pytest
from tiny_runs import tiny_config

from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.errors import UserError
from jaxrl.rewards.user import UserRewards
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.run_rewards import reward_functions

FUNCTIONS = """
    import os, time

    calls = []

    def brevity(responses):
        calls.append(1)
        return [-len(tokens) / 10 for tokens in responses.tokens]

    def count(responses):
        return [len(calls)] * len(responses)

    def pid(responses):
        return [os.getpid()] * len(responses)

    def hang(responses):
        time.sleep(600)

    def spin(responses):
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600.25")
        while True:
            pass

    def fail(responses):
        raise KeyError("lost")

    def leave(responses):
        os._exit(7)

    def backend(responses):
        import jax
        return [float(jax.default_backend() == "cpu")] * len(responses)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "my_rewards.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


@pytest.fixture
def rewards(path):
    """Opens functions of the file; what is opened is closed."""
    opened = []

    def open_(*names, timeout_s=60.0, **options):
        opened.append(
            UserRewards([f"{path}:{name}" for name in names], timeout_s=timeout_s, **options)
        )
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@pytest.fixture
def completions(make_scored):
    return make_scored([5, 9], num_samples=2).completions


def test_functions_share_a_process_and_its_state(rewards, path, completions):
    worker = rewards("brevity", "count", "pid", "backend")
    scores = worker.scores(f"{path}:brevity", completions)
    np.testing.assert_allclose(scores, -completions.lengths_B / 10, rtol=1e-6)
    worker.scores(f"{path}:brevity", completions)
    assert worker.scores(f"{path}:count", completions) == [2] * 4
    assert worker.scores(f"{path}:pid", completions)[0] != np.float32(os.getpid())
    # It leaves the accelerators to the run.
    assert worker.scores(f"{path}:backend", completions) == [1] * 4


def test_a_module_is_found_where_this_process_finds_it(path, completions, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    worker = UserRewards(["my_rewards:brevity"], timeout_s=60)
    assert len(worker.scores("my_rewards:brevity", completions)) == 4
    worker.close()
    assert "my_rewards" not in sys.modules


def test_the_limit_of_a_run_is_a_setting(path, completions, tmp_path):
    function = {"path": f"{path}:hang", "weight": 1.0}
    settings = {"reward.functions": {"hang": function}, "reward.functions_timeout_s": 3.0}
    config = tiny_config(tmp_path, settings)
    with contextlib.closing(reward_functions(config, NoTimer())) as rewards:
        began = time.monotonic()
        with pytest.raises(UserError, match=r"within 3 s .* raise reward\.functions_timeout_s"):
            rewards.scores(f"{path}:hang", completions)
        assert 3 <= time.monotonic() - began < 60


def test_a_reward_model_has_the_weight_of_its_setting(tmp_path):
    settings = {"reward.model": "weights/judge", "reward.model_weight": 0.25}
    config = tiny_config(tmp_path, settings)
    term = ROLES["reward"].reward(object(), config)
    assert (term.name, term.weight) == ("model", 0.25)
    config.reward.check_several_terms("gdpo")
    without = tiny_config(tmp_path, settings, reward__model_weight=0.0)
    with pytest.raises(UserError, match="grader alone"):
        without.reward.check_several_terms("gdpo")


@pytest.mark.parametrize("name", ["hang", "spin"])
def test_one_that_hangs_is_ended_at_the_time_limit(rewards, path, completions, name):
    worker = rewards("brevity", name)
    worker.scores(f"{path}:brevity", completions)
    worker._pool._patience_s = 0.3
    (process,) = worker._pool._idle
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"{name}' has not answered within 0.3 s and was ended"):
        worker.scores(f"{path}:{name}", completions)
    assert time.monotonic() - started < 60
    assert process.ended and "600.25" not in commands()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", r"raised KeyError: 'lost' \(.*my_rewards\.py:\d+, the traceback is above\)"),
        ("leave", r"leave' ended its process \(status 7\)"),
    ],
)
def test_what_goes_wrong_is_one_line(rewards, path, completions, name, message, capfd):
    with pytest.raises(UserError, match=message) as error:
        rewards(name).scores(f"{path}:{name}", completions)
    assert re.search(re.escape(f"reward function '{path}:{name}'"), str(error.value))
    assert ("Traceback" in capfd.readouterr().err) == (name == "fail")


@pytest.mark.parametrize(
    ("source", "message", "start_s"),
    [
        ("import no_such_thing", "ModuleNotFoundError", 60),
        ("import time\ntime.sleep(600)", "has not answered within 1 s", 1),
        ("import os\nos._exit(3)", r"ended its process \(status 3\)", 60),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_at_the_start(tmp_path, source, message, start_s):
    (tmp_path / "file.py").write_text(source)
    with pytest.raises(UserError, match=message):
        UserRewards([f"{tmp_path}/file.py:f"], start_s=start_s)


def commands() -> str:
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((process / "cmdline").read_text(errors="replace"))
    return "\n".join(found)
