"""The OpenAI-compatible HTTP endpoint of an online driver.

    GET  /health, /v1/models, /v1/models/NAME
    POST /v1/completions, /v1/chat/completions    whole, or as server-sent events

Requests are bounded in size and in the time they take to arrive, connections in their number and in the time
without a request on them. A client that goes away ends its requests, and their slots are free. There
is no encryption and no authentication: it is for this machine, or for a proxy that has both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import json
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxrl.errors import UserError
from jaxrl.rollout.request_errors import Overloaded, ServingError, Stopped
from jaxrl.serving.online_driver import Delta, OnlineDriver
from jaxrl.serving.openai.answers import Answer, ChatForm, CompletionForm, Form
from jaxrl.serving.openai.calls import (
    ApiError,
    Call,
    Json,
    Limits,
    Tokenizer,
    check_model,
    error_of,
    read_chat,
    read_completion,
)
from jaxrl.serving.openai.protocol import Model, ModelList

# A body that takes longer to arrive is given up.
_BODY_TIMEOUT_S = 60.0
# So is a connection on which no request has arrived for so long, its headers complete; and one whose client
# does not take what is sent to it.
_IDLE_TIMEOUT_S = 15.0
_WRITE_TIMEOUT_S = 60.0
# For sending what has been said.
_LAST_WORDS_S = 5
# Files that a server has open beside its connections.
_OTHER_FILES = 256
# What nginx writes into its log for a client that has gone; nobody reads the response.
_CLIENT_GONE = 499

Reader: TypeAlias = Callable[[Json, Tokenizer, Limits], Call]


class _Inbox:
    """Deltas of a call, brought from the driver's thread to the server's loop; closing it ends the call."""

    def __init__(self, driver: OnlineDriver, call: Call):
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Delta] | ServingError] = asyncio.Queue()
        n = call.requests[0].num_samples
        requests = [(r, self._listener(i * n)) for i, r in enumerate(call.requests)]
        self._tickets = driver.submit_all(requests)

    def _listener(self, first: int) -> Callable[[Delta | ServingError], None]:
        def listen(event: Delta | ServingError) -> None:
            item = event if isinstance(event, ServingError) else (first + event.index, event)
            # The loop is closed only when the server has stopped and nobody reads any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._events.put_nowait, item)

        return listen

    async def get(self) -> tuple[int, Delta]:
        """The next delta and the choice it belongs to; raises ServingError if there will be none."""
        item = await self._events.get()
        if isinstance(item, ServingError):
            raise item
        return item

    def close(self) -> None:
        """Ends what is not answered yet."""
        for ticket in self._tickets:
            self._driver.cancel(ticket)


class _Events(StreamingResponse):
    """Server-sent events that close their inbox, however they end."""

    def __init__(self, inbox: _Inbox, events: AsyncIterator[str]):
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
        self._inbox = inbox

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._inbox.close()


def build_app(
    driver: OnlineDriver, tokenizer: Tokenizer, limits: Limits, *, max_body_bytes: int
) -> Starlette:
    """The endpoint as an ASGI application.

    Args:
      driver: answers the requests.
      tokenizer: of the model.
      limits: of requests.
      max_body_bytes: larger bodies are refused.
    """

    async def health(request: Request) -> Response:
        waiting, running = driver.load
        body = {"alive": driver.alive, "waiting": waiting, "running": running}
        return JSONResponse(body, 200 if driver.alive else 503)

    model = Model(
        id=limits.model, created=int(time.time()), max_model_len=limits.max_context_tokens
    )

    async def models(request: Request) -> Response:
        return _json(ModelList(data=[model]).model_dump_json())

    async def one_model(request: Request) -> Response:
        check_model(request.path_params["name"], limits)
        return _json(model.model_dump_json())

    def endpoint(read: Reader, form: Form):
        async def answer(request: Request) -> Response:
            body = await _body_of(request, max_body_bytes)
            # A long text or a slow template shall not hold up the answers of others.
            call = await asyncio.to_thread(read, body, tokenizer, limits)
            inbox = _Inbox(driver, call)
            result = Answer(call, form, limits.model)
            if call.stream:
                return _Events(inbox, _event_stream(inbox, call, result))
            try:
                return await _unless_gone(request, _whole(inbox, result))
            finally:
                inbox.close()

        return answer

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            # A name may have slashes, as those of published models do.
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/completions", endpoint(read_completion, CompletionForm()), methods=["POST"]),
            Route("/v1/chat/completions", endpoint(read_chat, ChatForm()), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _refuse,
            UserError: _refuse,
            ServingError: _refuse,
            HTTPException: _refuse,
            # Starlette logs these with their traceback, after answering.
            Exception: _refuse,
        },
    )


async def _body_of(request: Request, max_bytes: int) -> Json:
    """The JSON object of a request."""
    too_large = ApiError(
        413, f"the request is larger than {max_bytes} bytes, which is what this server takes"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                content += part
                if len(content) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"the request did not arrive within {_BODY_TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(_CLIENT_GONE, "the client has gone") from error
    try:
        body = json.loads(content)
    # A deeply nested body exhausts the parser's stack.
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


async def _whole(inbox: _Inbox, answer: Answer) -> Response:
    while not answer.complete:
        answer.add(*await inbox.get())
    return _json(answer.whole())


async def _event_stream(inbox: _Inbox, call: Call, answer: Answer) -> AsyncIterator[str]:
    try:
        while not answer.complete:
            index, delta = await inbox.get()
            answer.add(index, delta)
            yield _event(answer.event(index))
    except ServingError as error:
        # The status has been sent; OpenAI's client raises what it finds here.
        yield _event(json.dumps(_as_api_error(error).body))
        return
    if call.include_usage:
        yield _event(answer.usage_event())
    yield "data: [DONE]\n\n"


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")


def _event(body: str) -> str:
    return f"data: {body}\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is cancelled if the client goes away."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=_CLIENT_GONE)
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = _as_api_error(error)
    return JSONResponse(refusal.body, refusal.status)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return error_of(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}: see /v1/models and the documentation")
    if not isinstance(error, ServingError):
        return ApiError(500, "the server has made a mistake; its log says which")
    status = 429 if isinstance(error, Overloaded) else 503 if isinstance(error, Stopped) else 500
    return ApiError(status, str(error))


class _Connection(H11Protocol):
    """A connection with deadlines; uvicorn's own waits for ever for a request that has begun to arrive.

        opened, or answered --> request's headers complete: idle_timeout_s, however many bytes come meanwhile
        sending --> taken by the client: write_timeout_s

    The application has a deadline of its own for the body.
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
            # Without waiting for its request: the connections in use are what there is too much of.
            transport.write(_too_many(self._max_connections))
            transport.close()
        self._set_deadline("request", self._idle_timeout_s)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        # A new cycle begins when the headers of a request are complete.
        if self.cycle is not before and not self.cycle.response_complete:
            self._drop_deadline("request")

    def on_response_complete(self) -> None:
        # Before what has arrived meanwhile is looked at, which may be the next request.
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
        # Closing would wait until everything is sent, and here that may be never.
        self._deadlines[name] = self.loop.call_later(seconds, self.transport.abort)

    def _drop_deadline(self, name: str) -> None:
        if name in self._deadlines:
            self._deadlines.pop(name).cancel()


def _too_many(max_connections: int) -> bytes:
    """The whole response to a connection that is one too many."""
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
    """Raises this process's limit of open files to `number`, where it is lower.

    Raises:
      UserError: the system does not let it.
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
    """An ASGI application served from a thread of its own.

    Attributes:
      port: it listens on.
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
          host, port: where to listen; port 0 takes a free one.
          max_connections: that are open at a time; further ones are answered with 503 at once.
          idle_timeout_s: how long a connection may be open without a request, its headers complete.
          write_timeout_s: how long a client may leave what is sent to it.

        Raises:
          UserError: the port cannot be had, or not so many connections.
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
        """Ends. Responses that are complete are sent; close the driver first, so that all are."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
