"""Programs of other people as agents: they reach the policy at an address of the network."""

import dataclasses
import json
import pathlib
import socket
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from agent_runs import OPTIONS, agent_backend, problems
from extras import import_extra

openai = import_extra("dev", "openai")

from jaxrl_agents.harnesses import session_url  # noqa: E402

AGENT = f"{pathlib.Path(__file__).with_name('harness_agents.py')}:agent"


def address() -> str:
    """An address of this machine that others reach, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "0.0.0.0"
        return probe.getsockname()[0]


@pytest.fixture(scope="module")
def backend():
    backend = agent_backend(seconds=120.0, agent=AGENT, agent_host=address())
    yield backend
    backend.close()


def test_programs_are_trained_on_what_they_asked_by_url_or_key(backend):
    done = backend.generate(problems(["url", "key", "killed", "wrong"]), OPTIONS)
    agents = done.of_agents
    assert agents.failures[:6] == (None,) * 6
    # Two turns; the signal that has killed it.
    assert agents.score_B.tolist()[:6] == [2, 2, 2, 2, -9, -9]
    # Its key was no session's: see the agent's assertion.
    assert all("ended without an answer" in each.message for each in agents.failures[6:])
    policy = [[turn.by_policy for turn in turns] for turns in done.turns]
    assert policy[:4] == [[True, False, True]] * 4
    # One that was killed has said something. One that had no key has said nothing.
    assert policy[4:6] == [[True]] * 2 and not any(map(any, policy[6:]))


def test_no_sample_is_lost_where_every_tenth_program_is_killed(backend):
    kinds = ["killed" if n % 10 == 9 else "url" for n in range(32)]
    done = backend.generate(problems(kinds), OPTIONS)
    expected = np.repeat([-9.0 if kind == "killed" else 2.0 for kind in kinds], 2)
    assert done.of_agents.failures == (None,) * 64
    assert done.of_agents.score_B.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/metrics", "/session/wrong/v1/models", "/session/"]
)
def test_who_has_no_key_learns_nothing(backend, path):
    backend.generate(problems(["url"]), OPTIONS)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(backend._endpoint._server.url + path)
    assert caught.value.code == 401
    assert json.load(caught.value)["error"]["code"] == "invalid_api_key"


def test_a_program_that_never_ends_ends_with_its_session(tmp_path):
    backend = agent_backend(seconds=6.0, agent=AGENT)
    try:
        given = problems(["stubborn", "url"])
        extras = ({"kind": "stubborn", "file": str(tmp_path / "pids")}, {"kind": "url"})
        given = dataclasses.replace(given, extras=extras)
        done = backend.generate(given, dataclasses.replace(OPTIONS, num_samples=1))
    finally:
        backend.close()
    late, other = done.of_agents.failures
    assert "longer than 6 s" in late.message and other is None
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        until = time.monotonic() + 30
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        # A process that nobody has waited for is dead.
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_url_of_a_session_may_name_this_machine_otherwise():
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:81/v1", api_key="a-key")
    assert session_url(client) == "http://127.0.0.1:81/session/a-key/v1"
    assert (
        session_url(client, host="host.docker.internal")
        == "http://host.docker.internal:81/session/a-key/v1"
    )
