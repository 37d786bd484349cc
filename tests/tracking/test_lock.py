"""The lock of a run folder."""

import os
import signal
import sys

import pytest
from processes import started

from jaxrl.errors import UserError
from jaxrl.tracking.durable import run_lock

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 1 on elsewhere")
file.flush()
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_names_the_first(tmp_path):
    with run_lock(tmp_path / "run"):
        with (
            pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on .*, started 2"),
            run_lock(tmp_path / "run"),
        ):
            pass
        with run_lock(tmp_path / "other"):
            pass
    with run_lock(tmp_path / "run"):
        pass


def test_a_kill_releases_the_lock(tmp_path):
    with started([[sys.executable, "-c", HOLD, tmp_path / "lock"]]) as (process,):
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="process 1 on elsewhere"), run_lock(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with run_lock(tmp_path):
            pass


def test_an_old_lock_file_does_not_block(tmp_path):
    (tmp_path / "lock").write_bytes(b"\xff\x00")
    with run_lock(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / "lock").read_text()
