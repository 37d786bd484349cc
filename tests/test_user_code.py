"""Functions that a config names: what ends the process does not pass for the end of the work."""

import hashlib
import pathlib
import subprocess
import sys

import pytest

from jaxrl.user_code import source_digest

COMMAND = """
import sys
from jaxrl.errors import exit_status
from jaxrl.user_code import load_function
sys.exit(exit_status(lambda: load_function(sys.argv[1], "reward function")() or 0))
"""
ENDS = {
    "os._exit": "import os\nos._exit(0)",
    "posix": "import posix\nposix._exit(0)",
    "its name": "from os import _exit\n_exit(0)",
    "deeper": "import os\ndef leave():\n    os._exit(0)\nleave()",
    "exec": "import os\nos.execvp('true', ['true'])",
    "C _exit": "import ctypes\nctypes.CDLL(None)._exit(0)",
    "C _Exit": "import ctypes\nctypes.PyDLL(None)._Exit(0)",
    "C exit": "import ctypes\nctypes.cdll.LoadLibrary(None).exit(0)",
    "C quick": "import ctypes\nctypes.CDLL('libc.so.6').quick_exit(0)",
    "C Python": "import ctypes\nctypes.pythonapi.Py_Exit(0)",
    "sys.exit": "import sys\nsys.exit()",
    "exit": "exit(0)",
    "SystemExit": "raise SystemExit",
    "a subclass": "class Done(SystemExit): pass\nraise Done(0)",
    "BaseException": "class Done(BaseException): pass\nraise Done",
    "GeneratorExit": "raise GeneratorExit",
    "a parser": "import argparse\nargparse.ArgumentParser().parse_args(['-h'])",
    "unfinished try": "import os\ntry:\n    os._exit(0)\nfinally:\n    print('so long')",
}


def ended(path):
    return subprocess.run(
        [sys.executable, "-c", COMMAND, f"{path}:f"], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("end", ENDS)
def test_an_import_that_ends_the_process_is_named_with_a_status(end, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENDS[end] + "\ndef f(): pass\n")
    done = ended(path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"{path}:" in done.stderr


def test_what_ends_the_process_after_all_is_done_may(tmp_path):
    """It is called without a frame of Python."""
    path = tmp_path / "mine.py"
    path.write_text("import atexit, os\natexit.register(os._exit, 0)\ndef f(): pass\n")
    done = ended(path)
    assert (done.returncode, done.stderr) == (0, "")


AFTERWARDS = {
    "itself": "atexit.register(os._exit, 0)",
    "a function": "atexit.register(lambda: os._exit(0))",
    "its own": "from os import _exit\natexit.register(lambda: _exit(0))",
    "posix": "import posix\natexit.register(posix._exit, 0)",
    "exec": "atexit.register(os.execvp, 'true', ['true'])",
    "C": "import ctypes\natexit.register(ctypes.CDLL(None)._exit, 0)",
    "C later": "import ctypes\natexit.register(lambda: ctypes.CDLL(None).exit(0))",
    "SystemExit": "import sys\natexit.register(sys.exit, 0)",
    "an object": "class Kept:\n    def __del__(self): os._exit(0)\nkept = Kept()",
    "a thread": "import threading, time\n"
    "def late(end=os._exit):\n    time.sleep(1)\n    end(0)\nthreading.Thread(target=late).start()",
}


@pytest.mark.parametrize("what", AFTERWARDS)
@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("from jaxrl.errors import UserError; raise UserError('no')", 2),
        ("return 75", 75),
        ("raise KeyError", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_what_runs_at_the_end_does_not_hide_a_failure(what, call, status, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"import atexit, os\n{AFTERWARDS[what]}\ndef f():\n    {call}\n")
    assert ended(path).returncode == status


def test_a_watch_of_our_own_ends_a_failed_process_with_its_status(tmp_path):
    """As `jaxrl.mesh.hosts` does if another process is lost meanwhile."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import atexit\n"
        "exec('import os\\ndef lost(): os._exit(75)', ours := {'__name__': 'jaxrl.mesh.hosts'})\n"
        "atexit.register(ours['lost'])\ndef f(): return 2\n"
    )
    assert ended(path).returncode == 75


def test_nothing_of_it_is_left_to_a_command_that_succeeds(tmp_path):
    """A process may run several."""
    path = tmp_path / "mine.py"
    path.write_text("import atexit, os\natexit.register(os._exit, 7)\ndef f(): return 2\n")
    twice = f"{COMMAND.rpartition('sys.exit')[0]}load = lambda: load_function(sys.argv[1], 'x')()\n"
    twice += "assert exit_status(load) == 2 and exit_status(lambda: 0) == 0"
    command = [sys.executable, "-c", twice, f"{path}:f"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 7


# A call may raise what it likes, with its traceback; only what looks like success is refused.
@pytest.mark.parametrize("end", [end for end in ENDS if "E" not in end or end == "SystemExit"])
def test_a_call_that_ends_the_process_is_named_with_a_status(end, tmp_path):
    path = tmp_path / "mine.py"
    body = "\n".join(f"    {line}" for line in ENDS[end].splitlines())
    path.write_text(f"def f():\n{body}\n")
    done = ended(path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "has ended the program" in done.stderr


def test_other_statuses_and_forked_processes_are_left_alone(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\n"
        "def f():\n"
        "    pid = os.fork()\n"
        "    if not pid: os._exit(7)\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert ended(path).returncode == 7


def test_files_of_extensions_are_none_of_the_users(tmp_path, monkeypatch):
    """In a clone they are found like a user's own, and an update of the program changes them."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "extensions")
    monkeypatch.syspath_prepend(tmp_path)
    text = b"import jaxrl_verl\nfrom jaxrl_serving import server\n"
    (tmp_path / "mine.py").write_bytes(text)
    alone = hashlib.sha256(b"__main__\0" + text).hexdigest()
    assert source_digest(str(tmp_path / "mine.py")) == alone
    assert source_digest("jaxrl_verl.verl_files") == ""
    assert source_digest("mine") == hashlib.sha256(b"mine\0" + text).hexdigest()


@pytest.mark.long
def test_a_run_whose_rewards_end_the_process_fails(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("import os\nos._exit(0)\n")
    functions = {"mine": {"path": f"{path}:f", "weight": 1.0}}
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from jaxrl.config.config_tree import to_config_dict\nfrom jaxrl.config.schema import Config\n"
        "def get_config():\n    config = to_config_dict(Config())\n"
        f"    config.run.output = {str(tmp_path / 'runs')!r}\n"
        f"    config.reward.functions = {functions!r}\n    return config\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl", "train", "--config", str(recipe)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and f"{path}:2" in done.stderr
