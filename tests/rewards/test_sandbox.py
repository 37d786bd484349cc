"""The cage: what runs in it works, ends in time, and reaches nothing outside."""

import os
import pathlib
import signal
import socket
import time

import pytest

from jaxrl.rewards.sandbox import Cage, protections, run_caged

CAGE = Cage(seconds=1.0)


@pytest.fixture(scope="module")
def granted():
    return protections()


def test_what_it_prints_and_reports_comes_out():
    def body(report):
        os.write(1, os.read(0, 100).upper())
        report(f"{sorted(os.environ)} {len(os.listdir('.'))}".encode())

    outcome = run_caged(body, CAGE, stdin=b"hello")
    assert (outcome.status, outcome.output, outcome.report) == (0, b"HELLO", b"[] 0")


def test_an_exception_ends_it():
    def body(report):
        raise KeyError

    assert run_caged(body, CAGE).status == 1


def spin(report):
    while True:
        pass


def sleep(report):
    time.sleep(600)


def ignore(report):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


@pytest.mark.parametrize("body", [spin, sleep, ignore])
def test_it_ends_when_its_time_is_over(body):
    started = time.monotonic()
    assert run_caged(body, CAGE).status != 0
    assert time.monotonic() - started < 10


def test_nothing_that_it_started_outlives_it(granted):
    if not granted["own_processes"]:
        pytest.skip("the kernel grants no PID namespace here")

    def body(report):
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                os.execvp("sleep", ["sleep", "600.75"])
        time.sleep(0.3)
        report(b"started")

    assert run_caged(body, CAGE).report == b"started"
    time.sleep(0.2)
    commands = (p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline"))
    assert not any(b"600.75" in command for command in commands)


def test_memory_files_and_output_are_limited():
    def eat(report):
        report(bytes(bytearray(1 << 34))[:1])

    def write(report):
        pathlib.Path("file").write_bytes(b"0" * (1 << 23))
        report(b"written")

    def say(report):
        for _ in range(64):
            os.write(1, b"0" * (1 << 16))

    assert run_caged(eat, CAGE).report == b""
    assert run_caged(write, CAGE).report == b""
    assert len(run_caged(say, CAGE).output) < 1 << 21


def test_it_reaches_no_file_of_ours(granted, tmp_path):
    if not granted["own_files"]:
        pytest.skip("the kernel has no Landlock here")
    ours = tmp_path / "ours"
    ours.write_text("42")

    def body(report):
        for attempt in (ours.read_text, ours.unlink, lambda: (tmp_path / "new").mkdir()):
            try:
                attempt()
                report(b"x")
            except OSError:
                report(b".")
        pathlib.Path("mine").write_text("1")
        report(pathlib.Path("mine").read_bytes())

    assert run_caged(body, CAGE).report == b"...1"
    assert ours.read_text() == "42"


def test_it_has_no_network(granted):
    if not granted["no_network"]:
        pytest.skip("the kernel grants no network namespace here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def body(report):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=0.5)
                report(b"connected")
            except OSError:
                report(b"none")

        assert run_caged(body, CAGE).report == b"none"


def test_its_folder_is_gone_afterwards():
    folder = run_caged(lambda report: report(os.getcwd().encode()), CAGE).report.decode()
    assert folder and not pathlib.Path(folder).exists()
