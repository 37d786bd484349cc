"""An HTTP server on its own thread, with limits that protect it from slow or numerous clients.

The server limits the number of connections, the time a connection may stay without a request, and the time a
client may take to read an answer. It has no encryption: use it on one machine or behind a proxy with TLS.

    listens on     without a key                                             with a key
    this machine   requests must name it as localhost (or 127.0.0.1, ::1)    requests must send the key
    a network      refused at the start                                      requests must send the key

The name stops pages of other sites that have their own name point to 127.0.0.1 (DNS rebinding): a browser
would let them read the answers.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import http
import ipaddress
import json
import resource
import socket
import threading
import urllib.parse
from collections.abc import Collection
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxrl.errors import UserError
from jaxrl_serving.openai.protocol import ApiError
from jaxrl_serving.serve_config import needs_key

# A connection is closed if no complete request headers arrive within this time, or if its client does not
# read what is sent to it.
_IDLE_TIMEOUT_S = 15.0
_WRITE_TIMEOUT_S = 60.0
# The most bytes of headers that are not complete.
_MOST_HEAD_BYTES = 64 * 1024
# Time for sending the remaining answers at shutdown.
_LAST_WORDS_S = 5
# Open files of a server besides its connections.
_OTHER_FILES = 256


class _Connection(HttpToolsProtocol):
    """A connection with deadlines. uvicorn itself waits without limit for the rest of a request.

        opened, or answered --> headers complete: idle_timeout_s, even if bytes keep arriving
        sending --> read by the client: write_timeout_s

    The application has its own deadline for the body.
    """

    def __init__(
        self,
        *args: Any,
        max_connections: int,
        idle_timeout_s: float,
        write_timeout_s: float,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._write_timeout_s = write_timeout_s
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        # Requests that have started, and bytes of headers that are not complete.
        self._requests, self._in_head, self._head_bytes = 0, False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            # Refused before its request is read, because connections are the scarce resource. So there is no
            # uvicorn to write the answer.
            most = self._max_connections
            fault = f"all {most} connections of this server are in use; come again later"
            error = ApiError(fault, status=503)
            content = json.dumps(error.body).encode()
            head = (
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            transport.write(head.encode() + content)
            transport.close()
        self._set_deadline("request", self._idle_timeout_s)

    def data_received(self, data: bytes) -> None:
        requests = self._requests
        super().data_received(data)
        # llhttp, the parser, takes headers of any size.
        same = self._in_head and requests == self._requests
        self._head_bytes = self._head_bytes + len(data) if same else 0
        if self._head_bytes > _MOST_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self._drop_deadline("request")

    def on_response_complete(self) -> None:
        # The next request may have come already.
        if not self.pipeline:
            self._set_deadline("request", self._idle_timeout_s)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline("write", self._write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drop_deadline("write")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._deadlines):
            self._drop_deadline(name)
        super().connection_lost(exc)

    def _set_deadline(self, name: str, seconds: float) -> None:
        self._drop_deadline(name)
        # `close` would wait until everything is sent, which may never happen; so abort.
        self._deadlines[name] = self.loop.call_later(seconds, self.transport.abort)

    def _drop_deadline(self, name: str) -> None:
        if name in self._deadlines:
            self._deadlines.pop(name).cancel()


def _allow_open_files(number: int) -> None:
    """Raises this process's limit of open files to at least `number`.

    Raises:
      UserError: the system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise UserError(
            f"{number - _OTHER_FILES} connections need {number} open files, and this process may have {hard} "
            f"(ulimit -Hn); choose --max_connections {max(hard - _OTHER_FILES, 1)} at most"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def _guarded(app: ASGIApp, hosts: Collection[str], api_key: str) -> ASGIApp:
    """Refuses requests without the key, which /health does not need; without a key, those for other hosts."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers, refusal = Headers(scope=scope), None
        if api_key:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                # The header of Tinker's clients.
                given = headers.get("x-api-key", "")
            # starlette decodes headers as Latin-1.
            # In constant time: how long a refusal takes tells nothing of the key.
            known = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
            if scope["path"] != "/health" and not known:
                fault = "send the key of this server: Authorization: Bearer KEY"
                refusal = ApiError(fault, status=401, code="invalid_api_key")
        else:
            try:
                name = urllib.parse.urlsplit(f"//{headers.get('host', '')}").hostname
            except ValueError:
                name = None
            if name not in hosts:
                fault = f"this server answers to {', '.join(hosts)}, unless it is started with --api_key"
                refusal = ApiError(fault, status=421)
        await (JSONResponse(refusal.body, refusal.status) if refusal else app)(scope, receive, send)

    return answer


class HttpServer:
    """Serves an ASGI application from its own thread.

    Attributes:
      port: port that it listens on.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        api_key: str = "",
        max_connections: int = 1000,
        idle_timeout_s: float = _IDLE_TIMEOUT_S,
        write_timeout_s: float = _WRITE_TIMEOUT_S,
    ):
        """Starts serving.

        Args:
          app: the application.
          host, port: address to listen on; port 0 chooses a free port.
          api_key: key that requests must send; "" for none.
          max_connections: maximum number of open connections; further ones get status 503 at once.
          idle_timeout_s: maximum time in seconds until the headers of a request are complete.
          write_timeout_s: maximum time in seconds for a client to read what is sent to it.

        Raises:
          UserError: the port is not available, the system does not allow so many connections, or the address
            can be reached from elsewhere and there is no key.
        """
        _allow_open_files(max_connections + _OTHER_FILES)
        protocol = functools.partial(
            _Connection,
            max_connections=max_connections,
            idle_timeout_s=idle_timeout_s,
            write_timeout_s=write_timeout_s,
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # Bound on this thread, so that a port in use is an error of the caller, and port 0 is a number at
            # once.
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise UserError(
                f"HTTP cannot listen on {host}:{port} ({error.strerror}); choose another --host or "
                "--http_port"
            ) from error
        address, self.port = self._socket.getsockname()[:2]
        if not api_key and not ipaddress.ip_address(address).is_loopback:
            self._socket.close()
            raise UserError(needs_key(host))
        hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", address, host.lower()])
        self._server = uvicorn.Server(
            uvicorn.Config(
                _guarded(app, hosts, api_key),
                http=protocol,  # pyright: ignore[reportArgumentType]
                log_level="warning",
                access_log=False,
                # Any client can send these headers, and nothing here asks for its address.
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http-server", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops the server after sending complete responses. Close the driver first, to complete them all."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
