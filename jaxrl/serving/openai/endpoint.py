"""The OpenAI-compatible endpoint of an online driver, as an ASGI application.

    GET  /health, /metrics, /v1/models, /v1/models/NAME
    POST /v1/completions, /v1/chat/completions    whole, or as server-sent events
    POST /inference/v1/generate                   whole

Bodies are limited in size and in arrival time. If a client disconnects, its requests end and their slots are
freed. Bodies must be declared as JSON: a browser then lets no page of another site send one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl.data.tool_calls import AnswerParser
from jaxrl.errors import UserError
from jaxrl.rollout.live_loop import LiveError, Overloaded, Stopped
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving.online_driver import Delta, LiveText
from jaxrl.serving.openai.calls import (
    Answer,
    Call,
    ChatChoice,
    Choice,
    CompletionChoice,
    GenerateChoice,
    Json,
    RequestReader,
)
from jaxrl.serving.openai.chat_prompts import ChatPrompts, RenderedPrompts
from jaxrl.serving.openai.protocol import ApiError

# A body that takes longer to arrive is refused.
_BODY_TIMEOUT_S = 60.0
# nginx's status code for a client that has disconnected; nobody reads the response.
_CLIENT_GONE = 499


class _Inbox:
    """Passes the deltas of a call from the driver's thread to the event loop; closing it ends the call.

    A chat that was answered before gets the same answer once more, with the text of each token.
    """

    def __init__(self, driver: LiveText, call: Call, decode_text: Callable[[np.ndarray], str]):
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._streams = call.stream
        self._held: list[tuple[int, Delta] | LiveError] = []
        self._events: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()
        n = call.requests[0].options.num_samples
        self._tickets: Sequence[int] = ()
        if call.turn is not None and call.turn.known:
            add = TextStream(decode_text).add
            for delta in call.turn.known:
                again = dataclasses.replace(delta, pieces=add(delta.tokens)[0], text="")
                self._events.put_nowait((0, again))
            return
        self._tickets = driver.submit_all(
            [(r, functools.partial(self._put, i * n)) for i, r in enumerate(call.requests)],
            # The view of a whole chat is made of its ids.
            texts=call.stream or call.logprobs or call.turn is None,
        )

    def _put(self, first: int, event: Delta | LiveError) -> None:
        """Takes an event of a request, of which `first` is the index of the first choice."""
        ended = isinstance(event, LiveError)
        self._held.append(event if ended else (first + event.index, event))
        # Waking the event loop costs more than all else that is done for a delta.
        if not (self._streams or ended or event.finish):
            return
        items, self._held = self._held, []
        # The loop is closed only after the server has stopped, so nobody reads any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pass_on, items)

    def _pass_on(self, items: list[tuple[int, Delta] | LiveError]) -> None:
        for item in items:
            self._events.put_nowait(item)

    async def get(self) -> tuple[int, Delta]:
        """The next delta with the index of its choice; raises the error if the call has failed."""
        item = await self._events.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self, error: Exception | None = None) -> None:
        """Cancels the requests that are not answered yet, and lets `get` raise an error."""
        for ticket in self._tickets:
            self._driver.cancel(ticket)
        if error is not None:
            self._events.put_nowait(error)


class _Events(StreamingResponse):
    """Server-sent events that always close their inbox, even after a disconnect."""

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
    driver: LiveText,
    tokenizer: Tokenizer,
    model: str,
    sizes: EngineConfig,
    *,
    max_body_bytes: int,
    prompts: ChatPrompts | None = None,
) -> Starlette:
    """Makes the endpoint as an ASGI application.

    Args:
      driver: driver that answers the requests.
      tokenizer: tokenizer of the model.
      model: name of the model, which requests must give.
      sizes: sizes of its engine.
      max_body_bytes: maximum size of a body; larger ones are refused.
      prompts: where chats get their prompts from; by default each request is rendered by itself. With a
        source that keeps conversations there are no completions, since it would not know of them.
    """
    parser = AnswerParser(tokenizer)
    source = RenderedPrompts(tokenizer, parser) if prompts is None else prompts
    reader = RequestReader(tokenizer, model, sizes, source, parser)

    async def health(request: Request) -> Response:
        waiting, running = driver.load
        body = {"alive": driver.alive, "waiting": waiting, "running": running}
        return JSONResponse(body, 200 if driver.alive else 503)

    async def metrics(request: Request) -> Response:
        counts = driver.counts
        content = "".join(
            f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {getattr(counts, field)}\n"
            for field, name, kind, text in _METRICS
        )
        # The type by which Prometheus knows its text format.
        return Response(content, media_type="text/plain; version=0.0.4")

    described = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "jaxrl",
        # As in vLLM, for clients that query the limit.
        "max_model_len": sizes.max_context_tokens,
    }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    async def one_model(request: Request) -> Response:
        reader.check_model(request.path_params["name"])
        return JSONResponse(described)

    def endpoint(read: Callable[[Json, Sequence[str]], Call], form: type[Choice]):
        async def answer(request: Request) -> Response:
            if prompts is not None and form is CompletionChoice:
                raise ApiError(
                    f"{request.url.path} would not be part of a conversation, which this server keeps; ask "
                    "/v1/chat/completions, or /inference/v1/generate with token ids",
                )
            body = await body_of(request, max_body_bytes)
            # On another thread: a long text or a slow template must not delay other answers.
            call = await asyncio.to_thread(read, body, keys_of(request))
            inbox = _Inbox(driver, call, parser.decode)
            result = Answer(call, form, model, parser)
            if call.stream:
                return _Events(inbox, _event_stream(inbox, call, result))
            return await _whole(request, inbox, result)

        return answer

    return Starlette(
        routes=[
            # The first that matches, and the most frequent.
            Route("/v1/chat/completions", endpoint(reader.chat, ChatChoice), methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            # Model names may contain slashes, as on the Hugging Face Hub.
            Route("/v1/models/{name:path}", one_model),
            Route(
                "/v1/completions", endpoint(reader.completion, CompletionChoice), methods=["POST"]
            ),
            Route(
                "/inference/v1/generate",
                endpoint(reader.generate, GenerateChoice),
                methods=["POST"],
            ),
        ],
        # Starlette logs an `Exception` with its traceback after sending the answer.
        exception_handlers=dict.fromkeys(
            (ApiError, UserError, LiveError, HTTPException, Exception), _refuse
        ),
    )


def keys_of(request: Request) -> tuple[str, str]:
    """The client's names for its conversation: its header X-Session-ID and its bearer token, or "" each."""
    session = request.headers.get("x-session-id", "").strip()
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return session, token.strip() if scheme.lower() == "bearer" else ""


async def body_of(request: Request, max_bytes: int) -> Json:
    """Reads the body of a request as a JSON object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        fault = f"the body is declared as {kind[:80]!r}; send content-type: application/json"
        raise ApiError(fault, status=415)
    return object_of(await read_body(request, max_bytes))


def object_of(content: bytes) -> Json:
    """The JSON object in a body."""
    try:
        body = json.loads(content)
    # A deeply nested body raises RecursionError in the parser.
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; ApiError if it is too large or does not arrive in time."""
    fault = f"the request is larger than {max_bytes} bytes, which is what this server takes"
    too_large = ApiError(fault, status=413)
    declared = request.headers.get("content-length", "")
    # Refused before any of it is read.
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                content += part
                # What was declared may be wrong, and a body in chunks declares nothing.
                if len(content) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        fault = f"the request did not arrive within {_BODY_TIMEOUT_S:g} s"
        raise ApiError(fault, status=408) from error
    except ClientDisconnect as error:
        raise ApiError("the client has gone", status=_CLIENT_GONE) from error
    return bytes(content)


async def _whole(request: Request, inbox: _Inbox, answer: Answer) -> Response:
    """The whole answer; ends the call if the client disconnects."""
    # Nothing is written before the answer is complete, so a lost connection shows in no other way.
    watching = asyncio.create_task(_close_if_gone(request, inbox))
    try:
        while not answer.complete:
            answer.add(*await inbox.get())
        return JSONResponse(answer.whole())
    finally:
        watching.cancel()
        inbox.close()


async def _close_if_gone(request: Request, inbox: _Inbox) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    inbox.close(ApiError("the client has gone", status=_CLIENT_GONE))


async def _event_stream(inbox: _Inbox, call: Call, answer: Answer) -> AsyncIterator[str]:
    try:
        while not answer.complete:
            index, delta = await inbox.get()
            answer.add(index, delta)
            yield _event(answer.event(index))
    except LiveError as error:
        # The status was already sent, so the error goes into an event; OpenAI's client raises it.
        yield _event(as_api_error(error).body)
        return
    if call.include_usage:
        yield _event(answer.usage_event())
    yield "data: [DONE]\n\n"


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = as_api_error(error)
    return JSONResponse(refusal.body, refusal.status)


def as_api_error(error: Exception) -> ApiError:
    """The answer to a request that has raised an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(str(error))
    if isinstance(error, HTTPException):
        fault = f"{error.detail}: see /v1/models and the documentation"
        return ApiError(fault, status=error.status_code)
    if not isinstance(error, LiveError):
        return ApiError("the server has made a mistake; its log says which", status=500)
    status = 429 if isinstance(error, Overloaded) else 503 if isinstance(error, Stopped) else 500
    return ApiError(str(error), status=status)


# Field of the counts, name and type of the metric, help.
_METRICS = (
    ("waiting", "jaxrl_samples_waiting", "gauge", "Samples that wait for a slot."),
    ("running", "jaxrl_samples_running", "gauge", "Samples in the decode loop."),
    ("sampled", "jaxrl_sampled_tokens_total", "counter", "Tokens sampled."),
    ("prompt", "jaxrl_prompt_tokens_total", "counter", "Tokens of prompts."),
    ("known", "jaxrl_prompt_tokens_cached_total", "counter", "Tokens of prompts from known pages."),
)
