"""Heartbeats between processes: all others soon name a lost process, and no process is named wrongly."""

import contextlib
import json
import pathlib
import signal
import socket
import sys
import threading
import time

import jax
import pytest
from processes import started

from jaxrl.errors import EXIT_TRY_AGAIN, UserError
from jaxrl.mesh.host_watch import Heartbeat, HostWatch, Peers

ROOT = pathlib.Path(__file__).parents[2]


# What is known of others, by hand.


def test_silence_counts_from_the_last_sign_and_only_while_it_runs():
    peers = Peers((1, 2), now_s=100.0)
    limits = {"silent_s": 10, "failed_s": 5}
    peers.note([Heartbeat(1, "a", 1, "update"), Heartbeat(2, "b", 1, "update")], 101.0)
    peers.note([Heartbeat(1, "a", 1, "update"), Heartbeat(2, "b", 2, "generate")], 108.0)
    assert peers.lost(111.0, **limits) == ""
    assert peers.lost(111.5, **limits) == (
        "process 1 (host a, update) has given no sign of life for 10 s"
    )
    peers.note([Heartbeat(1, "a", 9, "report", "left")], 111.5)
    assert peers.lost(117.0, **limits) == ""
    assert "process 2 (host b, generate) has given no" in peers.lost(118.5, **limits)
    assert not peers.all_gone
    # Whoever fails is waited for: this process may end by the same error itself.
    peers.note([Heartbeat(2, "b", 3, "score", "failed")], 120.0)
    peers.note([Heartbeat(2, "b", 3, "score", "failed")], 124.0)
    assert peers.all_gone and peers.lost(124.9, **limits) == ""
    assert "(host b, score) has ended with an error" in peers.lost(125.1, **limits)


def test_a_loss_that_another_one_has_found_is_named_at_once():
    peers = Peers((0, 2), now_s=0.0)
    loss = "process 2 (host b, update) has given no sign of life for 15 s"
    peers.note([Heartbeat(0, "a", 3, "update", "failed", loss), Heartbeat(2, "b", 3, "x")], 1.0)
    assert peers.lost(1.0, silent_s=40, failed_s=40) == loss


def test_a_process_that_was_never_seen_is_lost_too():
    assert (
        Peers((0,), now_s=0.0)
        .lost(61.0, silent_s=60, failed_s=60)
        .startswith("process 0 (host unknown, never seen) has given no sign")
    )


# Watches of one process, which share a dict.


class Store(dict):
    """A store with the interface of JAX's distributed client, which counts what is read."""

    num_read = 0

    def key_value_try_get(self, key):
        if key not in self:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        self.num_read += 1
        return self[key]

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self
        self[key] = value

    def key_value_dir_get(self, key):
        found = [item for item in list(self.items()) if item[0].startswith(key)]
        self.num_read += len(found)
        return found


def watch_of(store, process, ends, *, num_processes=2, **changes):
    settings = {"lost_after_s": 0.6, "end": ends.append, **changes}
    return HostWatch(store, process, num_processes, **settings)


def wait_for(condition):
    """Sleeps until it holds. A busy machine may take its time; the silences here bear a second of it."""
    until_s = time.monotonic() + 30
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.05)


def test_two_that_live_and_leave_say_nothing(capfd):
    ends = []
    store = Store()
    with (
        watch_of(store, 0, ends, lost_after_s=1.5) as one,
        watch_of(store, 1, ends, lost_after_s=1.5) as other,
    ):
        one.phase, other.phase = "generate", "update"
        time.sleep(3)
    assert ends == [] and capfd.readouterr().err == ""
    states = [json.loads(text)["state"] for text in store.values()]
    assert states == ["left", "left"]


def test_one_that_falls_silent_ends_the_other(capfd):
    ends = []
    with watch_of(Store(), 1, ends) as watch:
        watch.phase = "step 3, update"
        wait_for(lambda: ends)
    assert ends == [EXIT_TRY_AGAIN]
    error = capfd.readouterr().err
    assert error.startswith("error: process 0 (host unknown, never seen) has given no sign of life")
    assert f"process 1 of 2 (host {socket.gethostname()}, step 3, update) ends with it" in error
    assert "start all processes again" in error and error.count("\n") == 1


def test_a_store_that_cannot_be_reached_blocks_nobody(capfd):
    """As when the network of process 0 is cut: nothing is refused, and nothing arrives."""
    store, ends, cut = Store(), [], threading.Event()
    with watch_of(store, 0, [], lost_after_s=3), watch_of(store, 1, ends, lost_after_s=3):
        wait_for(lambda: "jaxrl/signs_of_life/1" in store)
        time.sleep(1)
        store.key_value_set = lambda *_, **__: cut.wait()
        wait_for(lambda: ends)
        cut.set()
    assert ends == [EXIT_TRY_AGAIN]
    named = f"error: process 0 (host {socket.gethostname()}, starting) has given no sign of life"
    assert named in capfd.readouterr().err


def test_process_0_names_the_lost_one_to_all_others(capfd):
    ends = [[], [], []]
    store = Store()
    with contextlib.ExitStack() as stack:
        for i in range(3):
            stack.enter_context(watch_of(store, i, ends[i], num_processes=4, lost_after_s=2))
        wait_for(lambda: all(ends))
    assert ends == [[EXIT_TRY_AGAIN]] * 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(
        "error: process 3 (host unknown, never seen) has given no sign" in line for line in lines
    )


def test_reads_grow_with_the_number_of_processes_and_not_with_its_square():
    """Beats of 12 processes in 2 s: 1 read for each, and 12 for process 0; 144 in all if all read all."""
    store, ends = Store(), []
    with contextlib.ExitStack() as stack:
        for i in range(12):
            stack.enter_context(watch_of(store, i, ends, num_processes=12, lost_after_s=3))
        time.sleep(2)
        num_beats = json.loads(store["jaxrl/signs_of_life/0"])["count"]
        num_read = store.num_read
    assert ends == [] and 10 * num_beats < num_read < 30 * num_beats


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        (jax.errors.JaxRuntimeError, False),
        pytest.param(ValueError, True, marks=pytest.mark.long),
    ],
)
def test_a_program_that_breaks_off_is_explained_sooner(kind, waits, capfd):
    """Also where the process then waits for others."""
    broken = kind("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    ends = []

    def end(status):
        ends.append((status, time.monotonic()))

    began = time.monotonic()
    with contextlib.suppress(kind), watch_of(Store(), 1, [], lost_after_s=6, end=end) as watch:
        if waits:
            watch.suspect_loss(broken)
            time.sleep(6)
        raise broken
    assert ends[0][0] == EXIT_TRY_AGAIN and ends[0][1] - began < 5.5
    first, second = capfd.readouterr().err.splitlines()[:2]
    assert "could not go on (UNKNOWN: Gloo AllGather failed" in first
    assert "process 0 (host unknown, never seen) has given no sign of life" in second


def test_who_was_seen_before_a_program_broke_off_keeps_host_and_phase():
    store = Store()
    with watch_of(store, 0, [], lost_after_s=6), watch_of(store, 1, [], lost_after_s=6) as watch:
        wait_for(lambda: "never seen" not in watch.names_of_first_and_own()[0])
        watch.suspect_loss(jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed"))
        named = watch.names_of_first_and_own()[0]
    assert named == f"process 0 (host {socket.gethostname()}, starting)"


def test_a_fault_keeps_its_traceback_and_is_told_to_the_other(capfd):
    store, ends, others = Store(), [], []
    with watch_of(store, 0, others, lost_after_s=2):
        with pytest.raises(KeyError), watch_of(store, 1, ends):
            raise KeyError("a fault")
        assert ends == [1]
        wait_for(lambda: others)
    assert others == [EXIT_TRY_AGAIN]
    error = capfd.readouterr().err
    assert "KeyError: 'a fault'" in error
    assert "error: process 1 (host" in error and "has ended with an error" in error


def test_a_user_error_passes_through(capfd):
    ends = []
    with pytest.raises(UserError), watch_of(Store(), 1, ends):
        raise UserError("a setting")
    assert ends == [] and capfd.readouterr().err == ""
    assert not [t for t in threading.enumerate() if t.name == "host-watch"]


# Processes.

PROGRAM = """
import sys, time
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import simulate

config = hosts.HostsConfig(
    coordinator=sys.argv[1], num_processes=2, process_id=int(sys.argv[2]), lost_after_s=8
)
simulate(2, processes=2)
hosts.start(config)
with hosts.watched(config):
    for n in range(10_000):
        hosts.enter_phase(f"step {n}")
        hosts.largest(n)
        print(n, flush=True)
        time.sleep(0.05)
"""


def commands_of(program: str) -> list[list[str]]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    return [[sys.executable, "-c", program, address, str(i)] for i in range(2)]


@pytest.mark.long
def test_an_abort_of_its_own_is_no_loss_of_process_0():
    """Such as a failed assertion of XLA."""
    aborts = "\n        if n == 3 and sys.argv[2] == '1': __import__('os').abort()\n"
    program = PROGRAM.replace("\n        time.sleep", f"{aborts}        time.sleep")
    with started(commands_of(program), cwd=ROOT) as processes:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    assert processes[1].returncode == -signal.SIGABRT
    assert processes[0].returncode == EXIT_TRY_AGAIN, errors[0]
    assert "is gone" not in errors[1]


@pytest.mark.long
def test_process_0_that_dies_when_all_have_just_met_is_named():
    """Before the others have asked for a device, or watch it."""
    dies = "if sys.argv[2] == '0': os.kill(os.getpid(), 9)\nwith hosts.watched"
    program = f"import os\n{PROGRAM}".replace("with hosts.watched", dies)
    with started(commands_of(program), cwd=ROOT) as processes:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, EXIT_TRY_AGAIN]
    assert "error: process 0 (localhost:" in errors[1].splitlines()[-1]


@pytest.mark.long
def test_process_0_that_dies_before_all_have_met_is_named():
    """The others are inside JAX, which would look for it for minutes. One that starts late is not gone."""
    program = PROGRAM.replace("num_processes=2", "num_processes=3")
    program = program.replace("hosts.start", "print('starts', flush=True)\nhosts.start")
    first, second = commands_of(program)
    with started([second], cwd=ROOT) as (survivor,):
        assert survivor.stdout.readline() == "starts\n"
        time.sleep(1)
        with started([first], cwd=ROOT) as (victim,):
            assert victim.stdout.readline() == "starts\n"
            time.sleep(3)
            assert survivor.poll() is None, survivor.stderr.read()
            victim.kill()
        error = survivor.communicate(timeout=30)[1]
    assert survivor.returncode == EXIT_TRY_AGAIN
    assert "error: process 0 (localhost:" in error.splitlines()[-1] and "is gone" in error


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_process_is_named(victim):
    commands = commands_of(PROGRAM)
    with started(commands, cwd=ROOT) as processes:
        survivor = processes[1 - victim]
        while survivor.stdout.readline() != "3\n":
            assert survivor.poll() is None, survivor.stderr.read()
        processes[victim].send_signal(signal.SIGKILL)
        errors = [process.communicate(timeout=60)[1].splitlines() for process in processes]
    if victim:
        assert survivor.returncode == EXIT_TRY_AGAIN
        assert "error: process 1 (host " in errors[0][-1] and "step " in errors[0][-1]
        assert not [line for line in errors[0] if "stack trace" in line or "Traceback" in line]
    else:
        assert survivor.returncode == EXIT_TRY_AGAIN
        assert "error: process 0 (host " in errors[1][-1] and "step " in errors[1][-1]
        assert "is gone" in errors[1][-1] and "process 1 of 2 (host " in errors[1][-1]
    assert "start all processes again with the same command" in errors[1 - victim][-1]
