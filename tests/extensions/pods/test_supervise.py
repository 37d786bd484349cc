"""A supervisor starts a command again after a loss, up to a limit, and never twice at the same time."""

import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import threading
import time

import pytest
from processes import started

from jaxrl import cli
from jaxrl.errors import UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.tracking.durable import take_lock
from jaxrl_pods import rendezvous, supervise
from jaxrl_pods.rendezvous import Rendezvous
from jaxrl_pods.supervise import keep_running

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"

# Ends with the statuses of its list, one after the other; of "save" it leaves a checkpoint.
SCRIPT = """
import os, pathlib, sys
folder, *ends = sys.argv[1:]
log = pathlib.Path(folder) / "starts"
number = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (number + 1))
end = ends[min(number, len(ends) - 1)]
if end == "save":
    manifests = pathlib.Path(folder) / "rl" / "checkpoints.manifests"
    manifests.mkdir(parents=True, exist_ok=True)
    (manifests / f"{number}.json").touch()
    sys.exit(75)
if end == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(end))
"""


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(supervise, "_PAUSE_S", 0.0)


def ended(folder, *ends: str) -> tuple[int, int]:
    """The status of a supervised command with these ends, and how often it was started."""
    command = [sys.executable, "-c", SCRIPT, str(folder), *ends]
    status = keep_running(command, folder, hosts=HostsConfig())
    return status, len((folder / "starts").read_text())


@pytest.mark.parametrize(
    "ends, expected",
    [
        (["0"], (0, 1)),
        (["75", "kill", "0"], (0, 3)),
        # A wrong setting is not tried again; a restarted process that is too early for the others is.
        (["2"], (2, 1)),
        (["75", "2", "0"], (0, 3)),
        (["75", "1"], (1, 2)),
    ],
)
def test_it_starts_again_after_a_loss(ends, expected, tmp_path):
    assert ended(tmp_path, *ends) == expected


def test_it_gives_up_without_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "_MOST_FAILURES", 3)
    with pytest.raises(UserError, match="ended 3 times without a new checkpoint"):
        ended(tmp_path / "a", "75")
    # Progress counts from the start again.
    assert ended(tmp_path / "b", "75", "75", "save", "75", "75", "0") == (0, 6)


@pytest.mark.parametrize(
    "ends, expected",
    [
        # What refuses the settings for one host, as training does, is not tried again.
        (["75", "2"], (2, 2)),
        # One that has run with them may come too early.
        (["75", "75", "2", "0"], (0, 4)),
    ],
)
def test_refused_settings_for_fewer_hosts_end_it(ends, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.02)
    here, gone = (
        HostsConfig("127.0.0.1:81", 2, number, fewer={"1": ""}, fewer_after_s=0.5)
        for number in (0, 1)
    )

    def start_once() -> list[str] | int | None:
        with Rendezvous(gone, tmp_path) as other:
            return other.wait(lambda: False)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(start_once)
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), *ends]
        status = keep_running(command, tmp_path, hosts=here)
    assert first.result() == []
    assert (status, len((tmp_path / "starts").read_text())) == expected


def two_hosts(tmp_path, monkeypatch, *, other: str | None, coordinator="127.0.0.1:81", **hosts):
    """Seconds between the two starts of host 1, of which the first is lost; host 0 has left this file."""
    other_file = tmp_path / "supervisor.0.training"
    script = (
        "import pathlib, sys, time\n"
        "log = pathlib.Path(sys.argv[1]) / 'times'\n"
        "first = not log.exists()\n"
        "log.open('a').write(f'{time.time()}\\n')\n"
        "sys.exit(75 if first else 0)\n"
    )
    monkeypatch.setattr(supervise, "_ENDING_S", 1.0)
    if other is not None:
        other_file.write_text(other)
    command = [sys.executable, "-c", script, str(tmp_path)]
    config = HostsConfig(coordinator, **{"num_processes": 2, "process_id": 1, **hosts})
    assert keep_running(command, tmp_path, hosts=config) == 0
    first, second = map(float, (tmp_path / "times").read_text().split())
    return second - first


def test_a_lost_process_starts_again_once_the_others_have_ended(tmp_path, monkeypatch, capfd):
    ends = threading.Timer(4.0, lambda: (tmp_path / "supervisor.0.training").write_text("ended"))
    ends.start()
    waited_s = two_hosts(tmp_path, monkeypatch, other="begun", lost_after_s=500.0)
    ends.join()
    # The interpreter starts in less than the rest.
    assert 2.5 < waited_s < 200
    assert "waits until the other processes have ended, for 501 s at most" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "other"),
    [
        ({}, "begun"),
        # Hosts that share no folder.
        ({}, None),
        # JAX numbers the hosts.
        ({"coordinator": "auto", "num_processes": 1, "process_id": 0}, "begun"),
    ],
)
def test_it_waits_no_longer_than_a_loss_takes_to_notice(hosts, other, tmp_path, monkeypatch):
    assert two_hosts(tmp_path, monkeypatch, other=other, lost_after_s=2.0, **hosts) > 3


def test_a_supervisor_that_was_killed_waits_at_its_start(tmp_path, monkeypatch):
    (tmp_path / "supervisor.1.training").write_text("begun")
    (tmp_path / "supervisor.0.training").write_text("begun")
    monkeypatch.setattr(supervise, "_ENDING_S", 1.0)
    hosts = HostsConfig("127.0.0.1:81", 2, 1, lost_after_s=2.0)
    began_s = time.monotonic()
    assert keep_running([sys.executable, "-c", ""], tmp_path, hosts=hosts) == 0
    assert time.monotonic() - began_s > 3
    # It has ended in order: the next start does not wait.
    began_s = time.monotonic()
    hosts = dataclasses.replace(hosts, lost_after_s=600.0)
    assert keep_running([sys.executable, "-c", ""], tmp_path, hosts=hosts) == 0
    assert time.monotonic() - began_s < 300


@pytest.mark.parametrize("num_processes", [1, 2])
def test_nobody_is_waited_for_without_need(num_processes, tmp_path, monkeypatch):
    """A single process; and another one that has started anew already, after it noticed the loss."""
    if num_processes == 1:
        hosts = {"coordinator": "", "num_processes": 1, "process_id": 0}
        two_hosts(tmp_path, monkeypatch, other=None, lost_after_s=3000.0, **hosts)
        return
    other = tmp_path / "supervisor.0.training"
    later = time.time() + 3600

    def write(path, content, write_atomically=supervise.write_atomically):
        write_atomically(path, content)
        if content == b"ended":
            other.write_text("begun")
            os.utime(other, (later, later))

    monkeypatch.setattr(supervise, "write_atomically", write)
    two_hosts(tmp_path, monkeypatch, other="begun", lost_after_s=3000.0)


def test_two_supervisors_of_one_process(tmp_path):
    with take_lock(tmp_path / "supervisor.0.lock"):
        with pytest.raises(UserError, match=r"is in use by process \d+"):
            ended(tmp_path, "0")
        command = [sys.executable, "-c", "", str(tmp_path)]
        assert keep_running(command, tmp_path, hosts=HostsConfig("a:1", 2, 1)) == 0


def test_hosts_that_jax_numbers_have_a_supervisor_each(monkeypatch):
    places = []
    monkeypatch.setattr(
        supervise, "keep_running", lambda *_, hosts: places.append(hosts.place) or 0
    )
    for hosts in (["coordinator=auto"], ["coordinator=a:1", "num_processes=3", "process_id=2"]):
        options = [f"--config.hosts.{setting}" for setting in hosts]
        assert cli.main(["jaxrl", "train", "--supervise", "--config=dapo_tiny", *options]) == 0
    assert places == [socket.gethostname(), "2"]


def test_arguments_are_passed_on(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(supervise, "keep_running", lambda c, *_, **__: commands.append(c[4:]) or 0)
    recipe = tmp_path / "supervised.py"
    recipe.write_text((CONFIGS / "dapo_tiny.py").read_text())
    monkeypatch.chdir(tmp_path)
    rest = ["--config", "supervised.py", "--config.seed=1"]
    for switch in ("--supervise", "-supervise=true"):
        assert cli.main(["jaxrl", "train", switch, *rest]) == 0
        assert commands.pop() == rest


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_both(number, status, tmp_path):
    child = "import time; print('up', flush=True); time.sleep(600)"
    code = f"""
import pathlib, sys
from jaxrl_pods.supervise import keep_running
from jaxrl.mesh.hosts import HostsConfig
command = [sys.executable, "-c", {child!r}]
sys.exit(keep_running(command, pathlib.Path({str(tmp_path)!r}), hosts=HostsConfig()))
"""
    with started([[sys.executable, "-c", code]], env=dict(os.environ)) as (supervisor,):
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        supervisor.send_signal(number)
        assert supervisor.wait(timeout=60) == status
        # The child has the other end, too.
        assert supervisor.stdout.read() == ""


@pytest.mark.parametrize(
    ("fewer", "message"),
    [
        ("mesh.train=1-1-2", ""),
        ("mesh.trian=1-1-2", 'error: hosts.fewer.1: unknown setting "mesh.trian"'),
        ("", "error: hosts.fewer.1: its layout has 4 devices, and 1 of 2 hosts have 2 of 4"),
    ],
)
def test_settings_for_fewer_hosts_are_checked_at_the_start(fewer, message, monkeypatch, capsys):
    monkeypatch.setattr(supervise, "keep_running", lambda *_, **__: 0)
    settings = ["hosts.coordinator=a:1", "hosts.num_processes=2", "mesh.train=1-1-4"]
    options = [f"--config.{each}" for each in (*settings, f"hosts.fewer.1={fewer}")]
    status = cli.main(["jaxrl", "train", "--supervise", "--config=dapo_tiny", *options])
    assert status == (2 if message else 0) and message in capsys.readouterr().err
