"""The OpenAI-compatible endpoint of an online driver, as an ASGI application.

    GET  /health, /metrics, /v1/models, /v1/models/NAME
    POST /tokenize, /detokenize
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl.errors import UserError
from jaxrl.rollout.live_loop import LiveCounts, LiveError, Overloaded, Stopped
from jaxrl.rollout.settings import EngineConfig
from jaxrl_serving.online_driver import LENGTH, STOP, Delta, LiveText
from jaxrl_serving.openai.calls import (
    Answer,
    Call,
    ChatChoice,
    Choice,
    CompletionChoice,
    GenerateChoice,
    Json,
    RequestReader,
)
from jaxrl_serving.openai.chat_prompts import ChatPrompts, RenderedPrompts
from jaxrl_serving.openai.protocol import ApiError
from jaxrl_serving.tool_calls import AnswerParser

# A body that takes longer to arrive is refused.
_BODY_TIMEOUT_S = 60.0
# nginx's status code for a client that has disconnected; the response is not read.
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
            shows_stop=call.shows_stop,
        )

    def _put(self, first: int, event: Delta | LiveError) -> None:
        """Takes an event of a request, of which `first` is the index of the first choice."""
        ended = isinstance(event, LiveError)
        self._held.append(event if ended else (first + event.index, event))
        # Waking the event loop costs more than all else that is done for a delta.
        if not (self._streams or ended or event.finish):
            return
        items, self._held = self._held, []
        # The loop is closed only after the server has stopped, so nothing is read any more.
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
    reader = RequestReader(tokenizer, model, sizes, source, parser, driver.max_waiting)

    async def health(request: Request) -> Response:
        waiting, running = driver.load
        body = {"alive": driver.alive, "waiting": waiting, "running": running}
        return JSONResponse(body, 200 if driver.alive else 503)

    # What the driver has done so far was asked by no client: the first samples compile the programs.
    before = driver.counts

    async def metrics(request: Request) -> Response:
        return _metrics(driver.counts, before, model)

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

    def conversion(read: Callable[[Json], Json], field: str):
        async def answer(request: Request) -> Response:
            body = await body_of(request, max_body_bytes)
            with naming(field, body):
                return JSONResponse(await asyncio.to_thread(read, body))

        return answer

    def endpoint(read: Callable[[Json, Sequence[str]], Call], form: type[Choice], field: str):
        async def answer(request: Request) -> Response:
            if prompts is not None and form is CompletionChoice:
                raise ApiError(
                    f"{request.url.path} would not be part of a conversation, which this server keeps; ask "
                    "/v1/chat/completions, or /inference/v1/generate with token ids",
                )
            body = await body_of(request, max_body_bytes)
            # On another thread: a long text or a slow template must not delay other answers.
            with naming(field, body):
                call = await asyncio.to_thread(read, body, keys_of(request))
                inbox = _Inbox(driver, call, parser.decode)
            result = Answer(call, form, model, parser)
            if call.stream:
                return _Events(inbox, _event_stream(inbox, call, result))
            return await _whole(request, inbox, result)

        return answer

    # The first route that matches is taken, so the most frequent stands first.
    posts = {
        "/v1/chat/completions": endpoint(reader.chat, ChatChoice, "messages"),
        "/v1/completions": endpoint(reader.completion, CompletionChoice, "prompt"),
        "/inference/v1/generate": endpoint(reader.generate, GenerateChoice, "token_ids"),
        "/tokenize": conversion(reader.tokenize, "prompt"),
        "/detokenize": conversion(reader.detokenize, "tokens"),
    }
    # Model names may contain slashes, as on the Hugging Face Hub.
    gets = {"/health": health, "/metrics": metrics}
    gets |= {"/v1/models": models, "/v1/models/{name:path}": one_model}
    return Starlette(
        routes=[
            Route(path, answer, methods=[method])
            for method, answers in (("POST", posts), ("GET", gets))
            for path, answer in answers.items()
        ],
        # Starlette logs an `Exception` with its traceback after sending the answer.
        exception_handlers=dict.fromkeys(
            (ApiError, UserError, LiveError, HTTPException, Exception), _refuse
        ),
    )


@contextlib.contextmanager
def naming(prompt: str, body: Json) -> Iterator[None]:
    """Names the field in errors of a request inside a `with` block that do not name one.

    Args:
      prompt: field of the prompt, for errors that begin with no field of `body`.
      body: the request.
    """
    try:
        yield
    except (ApiError, UserError) as error:
        refusal = as_api_error(error)
        of_error = refusal.body["error"]
        if refusal.status == 400:
            # Errors of settings begin with their name.
            name = of_error["param"] or of_error["message"].split(maxsplit=1)[0].rstrip(":")
            params = body.get("sampling_params")
            if isinstance(params, dict) and name in params:
                of_error["param"] = f"sampling_params.{name}"
            elif of_error["param"] is None:
                of_error["param"] = name if name in body else prompt
        raise refusal from error


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


# Field of the counts; name, further labels, type and help of the metric, as in vLLM. Of its others there is
# nothing true to say here.
_METRICS = (
    ("waiting", "vllm:num_requests_waiting", "", "gauge", "Samples that wait for a slot."),
    ("running", "vllm:num_requests_running", "", "gauge", "Samples in the decode loop."),
    ("sampled", "vllm:generation_tokens_total", "", "counter", "Tokens sampled."),
    ("prompt", "vllm:prompt_tokens_total", "", "counter", "Tokens of prompts."),
    ("prompt", "vllm:prefix_cache_queries_total", "", "counter", "Tokens of prompts."),
    ("known", "vllm:prefix_cache_hits_total", "", "counter", "Tokens of prompts in known pages."),
    *(
        (field, "vllm:request_success_total", f',finished_reason="{reason}"', "counter", "Answers.")
        for field, reason in (("stopped", STOP), ("full", LENGTH))
    ),
)


def _metrics(counts: LiveCounts, before: LiveCounts, model: str) -> Response:
    """The metrics as Prometheus' text; counters are those since `before`."""
    content, last = "", ""
    for field, name, labels, kind, text in _METRICS:
        content += f"# HELP {name} {text}\n# TYPE {name} {kind}\n" * (name != last)
        value, last = getattr(counts, field), name
        if kind == "counter":
            value -= getattr(before, field)
        # The names of models are names of folders: they may have any character.
        of_model = json.dumps(model, ensure_ascii=False)
        content += f"{name}{{model_name={of_model}{labels}}} {value}\n"
    # The type by which Prometheus knows its text format.
    return Response(content, media_type="text/plain; version=0.0.4")
