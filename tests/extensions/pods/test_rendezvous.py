"""Supervisors agree on the hosts that start: all, or after a while those for which there are settings."""

import concurrent.futures
import contextlib
import os

import pytest

from jaxrl.mesh.hosts import HostsConfig
from jaxrl_pods import rendezvous
from jaxrl_pods.rendezvous import Rendezvous

FEWER = {"2": "mesh.train=1-1-4 mesh.fsdp=4", "1": ""}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.02)


@contextlib.contextmanager
def supervisors(folder, *numbers, after_s=0.4):
    """Supervisors of a run of three hosts."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in numbers:
            hosts = HostsConfig("127.0.0.1:81", 3, number, fewer=FEWER, fewer_after_s=after_s)
            found.append(stack.enter_context(Rendezvous(hosts, folder)))
        yield found


def started(*meetings):
    """What all find that wait at the same time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(meeting.wait, lambda: False) for meeting in meetings]
        return [future.result(10.0) for future in futures]


def arguments(number: int, *, num_hosts: int = 2):
    return [
        f"--config.hosts.coordinator={'127.0.0.1:81' if num_hosts > 1 else ''}",
        f"--config.hosts.num_processes={num_hosts}",
        f"--config.hosts.process_id={number}",
        *(("--config.mesh.train=1-1-4", "--config.mesh.fsdp=4") if num_hosts > 1 else ()),
    ]


def test_all_start_as_they_were_told_to(tmp_path):
    with supervisors(tmp_path, 0, 1, 2, after_s=1e4) as meetings:
        assert started(*meetings) == [[], [], []]
        # All of them have lost somebody's process.
        assert started(*meetings) == [[], [], []]


def test_those_that_are_left_get_new_numbers(tmp_path, capfd):
    with supervisors(tmp_path, 0, 1, 2) as (_, *left):
        # The first one is there and trains: the others wait for its end, as long as it is there.
        _._tell(state="training", members=(0, 1, 2))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            futures = [pool.submit(meeting.wait, lambda: False) for meeting in left]
            assert not concurrent.futures.wait(futures, 1.0).done
            os.utime(tmp_path / "supervisor.0.json", (0, 0))
            assert [future.result(10.0) for future in futures] == [arguments(0), arguments(1)]
        assert "hosts [1, 2] of 3 go on without the others" in capfd.readouterr().err


def test_one_that_comes_back_waits_for_the_next_start(tmp_path):
    with supervisors(tmp_path, 0) as (first,):
        assert started(first) == [arguments(0, num_hosts=1)]
        with supervisors(tmp_path, 1, 2) as late, concurrent.futures.ThreadPoolExecutor() as pool:
            futures = [pool.submit(meeting.wait, lambda: False) for meeting in late]
            assert not concurrent.futures.wait(futures, 1.0).done
            assert started(first) == [[]]
            assert [future.result(10.0) for future in futures] == [[], []]


def test_one_that_was_left_out_ends_with_the_others(tmp_path):
    with supervisors(tmp_path, 0) as (first,):
        started(first)
        with supervisors(tmp_path, 1) as (late,), concurrent.futures.ThreadPoolExecutor() as pool:
            future = pool.submit(late.wait, lambda: False)
            assert not concurrent.futures.wait([future], 0.3).done
            first.end(3)
            assert future.result(10.0) == 3
    # A new start does not take the old end for its own.
    with supervisors(tmp_path, 0, 1, 2) as meetings:
        assert started(*meetings) == [[], [], []]


def test_a_round_that_one_host_refuses_ends_for_all_of_it(tmp_path):
    with supervisors(tmp_path, 0, 1, 2) as (first, second, third):
        started(first, second, third)
        first.end(75)
        # Another end is that of one host.
        assert started(second, third) == [arguments(0), arguments(1)]
        second.end(2)
        assert third.wait(lambda: False) == 2


def test_a_supervisor_that_is_started_again_does_not_join_the_round_that_it_has_lost(tmp_path):
    with supervisors(tmp_path, 0, 1, after_s=0.2) as (first, second):
        assert started(first, second) == [arguments(0), arguments(1)]
        with supervisors(tmp_path, 1) as (again,):
            stops = iter([False, False, True])
            assert again.wait(lambda: next(stops)) is None
