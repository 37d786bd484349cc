"""An HTTP server on its own thread, with limits that protect it from slow or numerous clients.

The server limits the number of connections, the time a connection may stay without a request, and the time a
client may take to read an answer. It has no encryption: use it on one machine or behind a proxy with TLS.
"""

from __future__ import annotations

import asyncio
import functools
import http
import json
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxrl.errors import UserError
from jaxrl.serving.openai.calls import ApiError

# A connection is closed if no complete request headers arrive within this time, or if its client does not
# read what is sent to it.
_IDLE_TIMEOUT_S = 15.0
_WRITE_TIMEOUT_S = 60.0
# Time for sending the remaining answers at shutdown.
_LAST_WORDS_S = 5
# Open files of a server besides its connections.
_OTHER_FILES = 256


class _Connection(H11Protocol):
    """A connection with deadlines. uvicorn itself waits without limit for a request that has begun to arrive.

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            # Refused before its request is read, because connections are the scarce resource.
            transport.write(_too_many(self._max_connections))
            transport.close()
        self._set_deadline("request", self._idle_timeout_s)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        # uvicorn makes a new cycle object when the headers of a request are complete.
        if self.cycle is not before and not self.cycle.response_complete:
            self._drop_deadline("request")

    def on_response_complete(self) -> None:
        # Must come before buffered bytes are parsed: they may hold the next request.
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


def _too_many(max_connections: int) -> bytes:
    """The full HTTP response to a connection above the limit."""
    error = ApiError(
        503, f"all {max_connections} connections of this server are in use; come again later"
    )
    content = json.dumps(error.body).encode()
    return (
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    ).encode() + content


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


class HttpServer:
    """Serves an ASGI application from its own thread.

    Attributes:
      port: port that it listens on.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        host: str,
        port: int,
        max_connections: int = 1000,
        idle_timeout_s: float = _IDLE_TIMEOUT_S,
        write_timeout_s: float = _WRITE_TIMEOUT_S,
    ):
        """Starts serving.

        Args:
          app: the application.
          host, port: address to listen on; port 0 chooses a free port.
          max_connections: maximum number of open connections; further ones get status 503 at once.
          idle_timeout_s: maximum time in seconds until the headers of a request are complete.
          write_timeout_s: maximum time in seconds for a client to read what is sent to it.

        Raises:
          UserError: the port is not available, or the system does not allow so many connections.
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
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise UserError(
                f"HTTP cannot listen on {host}:{port} ({error.strerror}); choose another --host or "
                "--http_port"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol,  # pyright: ignore[reportArgumentType]
                log_level="warning",
                access_log=False,
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
