import pathlib
import sys

import pytest
from processes import started


def test_no_process_outlives_the_test_that_started_it():
    sleep = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    with pytest.raises(AssertionError, match="of the test"), started([sleep, sleep]) as processes:
        assert [process.stdout.readline() for process in processes] == ["here\n"] * 2
        raise AssertionError("of the test")
    assert all(process.returncode == -9 for process in processes)


def test_no_test_starts_a_process_in_any_other_way():
    """`subprocess.run` ends what it started whatever happens."""
    here = pathlib.Path(__file__)
    for path in here.parent.rglob("*.py"):
        # The toy is no test: its mirror has to outlive it.
        if path.name not in ("processes.py", "toy_run.py", here.name):
            assert "Popen(" not in path.read_text(), path
