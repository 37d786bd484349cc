"""Connections of rude clients, and who may ask: headers without an end, too many at once, no key."""

import contextlib
import http.client
import resource
import socket
import time

import pytest
from extras import import_extra

for package in ("pydantic", "starlette", "uvicorn"):
    import_extra("dev", package)

from jaxrl.errors import UserError  # noqa: E402
from jaxrl_serving.http_server import HttpServer  # noqa: E402

WHOLE = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF = WHOLE[:-2]


async def app(scope, receive, send):
    """Answers at once, whatever comes, and does not look at bodies."""
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def server(**settings) -> int:
            server = HttpServer(app, **{"host": "127.0.0.1", "port": 0, **settings})
            stack.callback(server.stop)
            return server.port

        yield server


@contextlib.contextmanager
def connection(port: int):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        yield client


def test_a_request_in_time_is_answered_again_and_again(start):
    with connection(start()) as client:
        for _ in range(4):
            for byte in WHOLE:
                client.send(bytes([byte]))
                time.sleep(0.01)
            time.sleep(0.1)
            assert client.recv(1000).endswith(b"\r\n\r\nok")


def test_requests_that_are_sent_at_once_are_answered_in_turn(start):
    large = WHOLE.replace(b"host:", b"content-length: 200000\r\nhost:") + b"x" * 200_000
    with connection(start()) as client:
        client.sendall(WHOLE + large + WHOLE[:-5])
        time.sleep(0.2)
        client.sendall(WHOLE[-5:])
        received = b""
        while received.count(b"\r\n\r\nok") < 3:
            part = client.recv(10_000)
            assert part, received
            received += part


def test_headers_without_an_end_are_cut_off_on_a_network(start, caplog):
    with connection(start(host="0.0.0.0", api_key="k")) as client:
        client.settimeout(5)
        client.sendall(HALF)
        with pytest.raises(ConnectionError):
            for _ in range(20_000):
                client.sendall(b"x-more: " + b"x" * 1000 + b"\r\n")
    # And who slow clients are left to.
    assert "without deadlines for slow clients: let a proxy" in caplog.text


def test_requests_beyond_the_limit_of_connections_are_refused(start):
    port = start(max_connections=2)
    with connection(port) as first, connection(port):
        first.sendall(WHOLE)
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        assert status_of(port) == 503
    time.sleep(0.2)
    assert status_of(port) == 200


def status_of(port: int, path: str = "/v1/models", at: str = "127.0.0.1", **headers: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(at, port, timeout=20)) as client:
        client.putrequest("GET", path, skip_host="host" in headers)
        for name, value in headers.items():
            client.putheader(name, value)
        client.endheaders()
        return client.getresponse().status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 421) for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "")),
        *((host, 421) for host in ("evil.example@127.0.0.2", "[::1")),
        *((host, 200) for host in ("localhost:8010", "LOCALHOST", "127.0.0.1:80", "[::1]:8010")),
    ],
)
def test_a_page_whose_name_was_pointed_to_this_machine_reads_nothing(start, host, status):
    assert status_of(start(), host=host) == status


def test_the_name_that_it_was_started_with_is_accepted(start):
    port = start(host="127.2")
    for host in ("127.2", "127.0.0.2"):
        assert status_of(port, at="127.0.0.2", host=f"{host}:{port}") == 200


def test_a_key_is_demanded_whatever_the_name(start):
    port = start(api_key="s3cret é")
    right = "Bearer s3cret é".encode().decode("latin-1")
    for given in (right, right.replace("Bearer", "bearer")):
        assert status_of(port, authorization=given, host="proxy.example") == 200
    for given in ("", "s3cret é", "Bearer", "Bearer s3cret", f"{right}x", f"Basic {right[7:]}"):
        assert status_of(port, authorization=given) == 401
    # The header of Tinker's clients.
    assert status_of(port, **{"x-api-key": right[7:]}) == 200
    assert status_of(port, **{"x-api-key": "tml-x"}) == 401
    assert status_of(port) == 401
    # For those that only ask whether it runs.
    assert status_of(port, "/health") == 200


@pytest.mark.parametrize("host", ["", "0.0.0.0", "0", "::"])
def test_without_a_key_only_this_machine_is_served(start, host):
    with pytest.raises(UserError, match="JAXRL_API_KEY"):
        start(host=host)
    at = "::1" if host == "::" else "127.0.0.1"
    assert status_of(start(host=host, api_key="k"), at=at, authorization="Bearer k") == 200


def test_more_connections_than_the_system_has_files_are_refused():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 2**40
    with pytest.raises(UserError, match="--max_connections"):
        HttpServer(app, host="127.0.0.1", port=0, max_connections=hard)
