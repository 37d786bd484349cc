"""One process pool for graders, reward functions and templates: what goes wrong costs one answer."""

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from processes import started, wait_for

from jaxrl.errors import UserError
from jaxrl.process_pool import Interrupted, ProcessPool, WorkerFault
from jaxrl.user_code import load_function

FUNCTIONS = """
    import gc, os, re, signal, socket, sys, time, types

    def double(number):
        return 2 * number

    def same(value):
        return value

    def pid(_):
        return os.getpid()

    def sleep(seconds):
        time.sleep(seconds)
        return seconds

    def doze(pieces):
        for _ in range(pieces):
            time.sleep(0.1)
        return pieces

    def match(_):
        # It does not let Python's other threads run, nor Python's handlers of signals.
        re.match(r"(a+)+$", "a" * 99 + "b")

    def leave_child(seconds):
        # It holds all files of its parent open.
        child = os.fork()
        if not child:
            time.sleep(seconds)
            os._exit(0)
        return child

    def leave_child_and_die(seconds):
        print(leave_child(seconds), flush=True)
        os._exit(5)

    def eat(size):
        return len(bytearray(size))

    def unknown(_):
        made = types.ModuleType("no_such_module")
        exec("class Thing: pass", made.__dict__)
        made.Thing.__module__ = made.__name__
        sys.modules[made.__name__] = made
        return made.Thing()

    def unpicklable(_):
        return lambda: 0

    def channel():
        (found,) = (one for one in gc.get_objects() if isinstance(one, socket.socket))
        return found.fileno()

    def torn(_):
        # As if the kernel had ended it in the middle of its answer.
        frame = sys._getframe()
        while "mark" not in frame.f_locals:
            frame = frame.f_back
        os.write(channel(), frame.f_locals["mark"] + (1 << 20).to_bytes(8, "little") + b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    def scribble(text):
        for number in range(3, 256):
            try:
                os.write(number, text)
            except OSError:
                pass
        return len(text)

    def close_all(_):
        os.closerange(3, 256)

    def surroundings(_):
        return os.environ["JAX_PLATFORMS"], os.getpgrp() == os.getpid(), sys.stdin.read()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(textwrap.dedent(FUNCTIONS))
    return file


@pytest.fixture
def pool_of(file):
    """Opens pools of functions of the file, by their bare names; what is opened is closed."""
    with contextlib.ExitStack() as opened:

        def open_(*names, **options):
            load = functools.partial(load_function, what="function")
            options = {"what": "function", "patience_s": 60.0, **options}
            pool = ProcessPool([f"{file}:{name}" for name in names], load, **options)
            opened.callback(pool.close)
            return pool, *(f"{file}:{name}" for name in names)

        yield open_


def test_few_questions_start_few_processes(pool_of):
    pool, double, sleep = pool_of("double", "sleep", workers=3)
    assert not pool._idle
    assert [pool.submit(double, n).result() for n in range(5)] == [0, 2, 4, 6, 8]
    assert len(pool._idle) == 1
    assert [f.result() for f in [pool.submit(sleep, 0.3) for _ in range(9)]] == [0.3] * 9
    assert 1 < len(pool._idle) <= 3


def test_a_worker_leaves_accelerators_and_terminal_to_the_run(pool_of):
    pool, surroundings = pool_of("surroundings")
    # A group of its own: Ctrl-C in a terminal goes to the group of the run.
    assert pool.call(surroundings, None) == ("cpu", True, "")


def test_a_worker_that_was_killed_while_idle_is_replaced(pool_of):
    pool, double, pid = pool_of("double", "pid", workers=2)
    first = pool.call(pid, None)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not runs(first))
    assert pool.call(double, 2) == 4 and pool.call(pid, None) != first


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("torn", "died", r"ended its process \(status -9\)"),
        ("unknown", "raised", "cannot be read here .No module named 'no_such_module'"),
        # Python 3.13 says "get local object".
        ("unpicklable", "raised", "Can't (pickle|get local)"),
        ("match", "timeout", "has taken 0.3 s of processor time and was ended"),
    ],
)
def test_no_other_question_is_touched(pool_of, name, kind, message):
    pool, bad, double, sleep = pool_of(name, "double", "sleep", workers=2, cpu_seconds=0.3)
    beside = pool.submit(sleep, 1.0)
    with pytest.raises(WorkerFault, match=message) as caught:
        pool.call(bad, None)
    assert caught.value.kind == kind
    assert beside.result() == 1.0
    assert [f.result() for f in [pool.submit(double, n) for n in range(9)]] == list(range(0, 18, 2))


@pytest.mark.parametrize(
    "text",
    [b"x", b"hello", b"\xff" * 12, bytes(64), b"many lines\n" * 1000, bytes(range(255)) * 99],
)
def test_a_function_that_writes_to_all_files_costs_its_result(pool_of, text):
    pool, scribble, double = pool_of("scribble", "double", patience_s=20.0)
    pool.start()
    began = time.monotonic()
    with pytest.raises(WorkerFault, match="has written to the socket") as caught:
        pool.call(scribble, text)
    assert caught.value.kind == "died" and time.monotonic() - began < 10
    assert pool.call(double, 21) == 42


def test_a_function_that_closes_all_files_costs_its_result(pool_of):
    pool, close_all, double = pool_of("close_all", "double", patience_s=20.0)
    with pytest.raises(WorkerFault, match="ended its process") as caught:
        pool.call(close_all, None)
    assert caught.value.kind == "died" and pool.call(double, 21) == 42


def test_large_questions_and_answers_arrive_whole(pool_of):
    pool, same = pool_of("same", patience_s=60.0)
    content = os.urandom(30_000_000)
    assert pool.call(same, content) == content


def test_limits_of_clock_time_are_of_a_call(pool_of):
    pool, sleep = pool_of("sleep", patience_s=0.2)
    with pytest.raises(WorkerFault, match=r"has not answered within 0.2 s and was ended") as caught:
        pool.call(sleep, 600)
    assert caught.value.kind == "timeout"
    assert pool.call(sleep, 0.5, patience_s=60.0) == 0.5


@pytest.fixture
def asking(file, tmp_path):
    """Runs lines in a process of its own, in which `ask` calls a function of the file by its bare name."""

    def run(*lines: str):
        (tmp_path / "ask.py").write_text(f"""
import functools, signal
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.user_code import load_function
load = functools.partial(load_function, what="function")
names = {{name: f"{file}:{{name}}" for name in ("doze", "match", "pid")}}
pool = ProcessPool([*names.values()], load, what="function", patience_s=5.0, cpu_seconds=0.3)
def ask(name, argument=None, patience_s=60.0):
    try:
        print(pool.call(names[name], argument, patience_s=patience_s), flush=True)
    except WorkerFault as fault:
        print(fault.reason, flush=True)
{chr(10).join(lines)}
pool.close()
""")
        return started([[sys.executable, tmp_path / "ask.py"]])

    return run


def test_processor_time_is_limited_whatever_signals_are_ignored(asking):
    """libtpu makes its process ignore the signal of the kernel's timer, and workers inherit that."""
    with asking("signal.signal(signal.SIGPROF, signal.SIG_IGN)", "ask('match')") as (process,):
        answer = process.communicate(timeout=110)[0]
    assert answer == "has taken 0.3 s of processor time and was ended\n"


@pytest.mark.long
def test_a_machine_that_stood_still_uses_up_no_time(asking):
    """Both processes are stopped for longer than the call may take, as when a laptop sleeps."""
    with asking("ask('pid')", "ask('doze', 20, 5.0)") as (process,):
        assert process.stdout
        both = process.pid, int(process.stdout.readline())
        time.sleep(0.5)
        for kind, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
            for pid in both:
                os.kill(pid, kind)
            time.sleep(seconds)
        assert process.communicate(timeout=60)[0] == "20\n"


def test_memory_is_limited_beyond_what_the_functions_hold(pool_of):
    pool, eat, pid = pool_of("eat", "pid", memory_bytes=1 << 28)
    before = pool.call(pid, None)
    assert pool.call(eat, 1 << 27) == 1 << 27
    with pytest.raises(WorkerFault, match="took more memory than it may") as caught:
        pool.call(eat, 1 << 29)
    assert caught.value.kind == "memory" and pool.call(pid, None) == before


def test_what_a_function_has_started_ends_with_its_process(pool_of, capfd):
    pool, leave, die = pool_of("leave_child", "leave_child_and_die")
    children = [pool.call(leave, 600)]
    with pytest.raises(WorkerFault, match="status 5"):
        pool.call(die, 600)
    children.append(int(capfd.readouterr().out))
    children.append(pool.call(leave, 600))
    assert runs(children[2])
    pool.close()
    wait_for(lambda: not any(map(runs, children)))


def test_a_wait_ends_when_it_is_not_wanted_any_more(pool_of):
    pool, sleep = pool_of("sleep", workers=2)
    pool.call(sleep, 0)
    with pytest.raises(Interrupted):
        pool.call(sleep, 600, interrupted=lambda: True)
    asked = [pool.submit(sleep, 600) for _ in range(4)]
    wait_for(lambda: asked[1].running())
    pool.close()
    pool.close()
    faults = [type(future.exception()) for future in asked]
    assert set(faults) <= {Interrupted, WorkerFault} and WorkerFault in faults
    with pytest.raises(WorkerFault, match="the pool was closed"):
        pool.call(sleep, 0)


def test_what_cannot_be_loaded_is_told_at_the_start(pool_of):
    pool, _ = pool_of("no_such_function")
    for ask in (pool.start, lambda: pool.call("any", None)):
        with pytest.raises(UserError, match="is not there"):
            ask()
    assert not pool._idle


SCRIPT = """
import functools, os, sys, time
from jaxrl.process_pool import ProcessPool
from jaxrl.user_code import load_function

print("ran", flush=True)
function = sys.argv[1]
pool = ProcessPool(
    [function], functools.partial(load_function, what="function"), what="function", patience_s=600.0
)
"""


def test_a_script_needs_no_main_guard(tmp_path, file):
    (tmp_path / "script.py").write_text(f"{SCRIPT}print(pool.call(function, 21))\npool.close()\n")
    command = [sys.executable, "-W", "error", str(tmp_path / "script.py"), f"{file}:double"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("ran\n42\n", "")


@pytest.mark.parametrize("name", ["sleep", "match", "pid"])
def test_workers_end_with_the_run_however_that_ends(tmp_path, file, name):
    """Also in the midst of a call that lets no other thread of theirs run."""
    ask = "pool.call(function, None)" if name == "pid" else "pool.submit(function, 600)"
    script = f"{SCRIPT}pool.start()\nprint(pool._idle[0]._process.pid, flush=True)\n{ask}\n"
    (tmp_path / "script.py").write_text(f"{script}time.sleep(600)\n")
    with started([[sys.executable, tmp_path / "script.py", f"{file}:{name}"]]) as (run,):
        assert run.stdout.readline() == "ran\n"
        worker = int(run.stdout.readline())
        time.sleep(0.5)
        assert runs(worker)
        run.kill()
        wait_for(lambda: not runs(worker))


def runs(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
