"""An HTTP server on its own thread, which limits the number of connections and the time they stay unused.

It has no encryption, and no deadlines for clients that send or read slowly: use it on one machine, or behind
a proxy that has both. On a network it says so.

    listens on     without a key                                             with a key
    this machine   requests must name it as localhost (or 127.0.0.1, ::1)    requests must send the key
    a network      refused at the start                                      requests must send the key

The name stops pages of other sites that have their own name point to 127.0.0.1 (DNS rebinding): a browser
would let them read the answers.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import resource
import socket
import threading
import urllib.parse
from collections.abc import Collection

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl.errors import UserError
from jaxrl_serving.openai.protocol import ApiError
from jaxrl_serving.serve_config import needs_key

_LOG = logging.getLogger(__name__)

# Time that a connection may stay without another request after an answer.
_IDLE_TIMEOUT_S = 15
# Time for sending the remaining answers at shutdown.
_LAST_WORDS_S = 5
# Open files of a server besides its connections.
_OTHER_FILES = 256


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
    """Refuses requests without the key, which /health does not need; without a key, those for other `hosts`.

    No `hosts` are all of them.
    """

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
            if hosts and name not in hosts:
                fault = f"this server answers to {', '.join(hosts)}, unless it is started with --api_key"
                refusal = ApiError(fault, status=421)
        await (JSONResponse(refusal.body, refusal.status) if refusal else app)(scope, receive, send)

    return answer


class HttpServer:
    """Serves an ASGI application from its own thread.

    Attributes:
      port: port that it listens on.
      url: address for programs on this machine.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        api_key: str = "",
        max_connections: int = 1000,
        checks_keys: bool = False,
    ):
        """Starts serving.

        Args:
          app: the application.
          host, port: address to listen on; port 0 chooses a free port.
          api_key: key that requests must send; "" for none.
          max_connections: maximum number of open connections; while there are more, requests get status 503.
          checks_keys: whether the application itself refuses requests without one of its keys.

        Raises:
          UserError: the port is not available, the system does not allow so many connections, or the address
            can be reached from elsewhere and there is no key.
        """
        _allow_open_files(max_connections + _OTHER_FILES)
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
        is_local = ipaddress.ip_address(address).is_loopback
        if not is_local:
            if not (api_key or checks_keys):
                self._socket.close()
                raise UserError(needs_key(host))
            _LOG.warning(
                "%s:%d is open to a network without encryption, and without deadlines for slow clients: "
                "let a proxy that has both answer there, and this server on 127.0.0.1",
                *(host, self.port),
            )
        hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", address, host.lower()])
        if checks_keys and not is_local:
            hosts = {}
        # A wildcard is no address to ask.
        here = ipaddress.ip_address(address)
        here = f"{here}" if not here.is_unspecified else "::1" if here.version == 6 else "127.0.0.1"
        self.url = f"http://{f'[{here}]' if ':' in here else here}:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                _guarded(app, hosts, api_key),
                # httptools is quicker, .1 ms a request (2026-11-26), but takes headers of any size; h11's end
                # at 64 KiB.
                http="httptools" if is_local else "h11",
                limit_concurrency=max_connections + 1,
                timeout_keep_alive=_IDLE_TIMEOUT_S,
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
