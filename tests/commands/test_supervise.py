"""A supervisor starts a command again after a loss, up to a limit, and never twice at the same time."""

import concurrent.futures
import os
import pathlib
import signal
import socket
import sys

import pytest
from processes import started

from jaxrl import cli
from jaxrl.commands import rendezvous, supervise
from jaxrl.commands.rendezvous import Rendezvous
from jaxrl.commands.supervise import keep_running
from jaxrl.errors import UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.tracking.durable import take_lock

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"

# Ends with the statuses of its list, one after the other; of "save" it leaves a checkpoint.
SCRIPT = """
import os, pathlib, sys
folder, *ends = sys.argv[1:]
log = pathlib.Path(folder) / "starts"
number = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (number + 1))
end = ends[min(number, len(ends) - 1)]
if end == "save":
    seals = pathlib.Path(folder) / "rl" / "checkpoints.seals"
    seals.mkdir(parents=True, exist_ok=True)
    (seals / f"{number}.json").touch()
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
from jaxrl.commands.supervise import keep_running
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
