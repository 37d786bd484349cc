"""The endpoint of a run's agents, on loopback: their requests, and the worker processes that run them.

    POST /v1/chat/completions    by an agent, with the key of its session
    POST /agents/next, /done     by a worker, with its own key: `worker`

A session's answers are drawn as the run samples, whatever temperature its requests name: training computes the
probabilities of that distribution. Requests of one session are told apart by their messages; repeated ones get
the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import zlib
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.agents.conversation import ChatModel, Conversation, Turn
from jaxrl.agents.runner import Runner
from jaxrl.agents.sessions import Session, Sessions
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import AssistantMessage
from jaxrl.errors import UserError
from jaxrl.rollout.live_loop import LiveError, LiveLoop, Request
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.sampling import SamplingOptions, turn_seed
from jaxrl.serving.http_server import HttpServer
from jaxrl.serving.online_driver import Delta, LiveText
from jaxrl.serving.openai.calls import ApiError
from jaxrl.serving.openai.endpoint import _as_api_error, _body_of
from jaxrl.types import Prompts

# A worker's question is answered after so long, if no session opens before.
_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.02
_MAX_BODY_BYTES = 10_000_000


@dataclasses.dataclass
class _Sampling:
    """How the sessions of a batch are answered."""

    text: LiveText
    options: SamplingOptions


class Endpoint:
    """The sessions of a run, answered over HTTP.

    Attributes:
      sessions: the sessions.
    """

    def __init__(self, settings: RolloutConfig, tokenizer: Tokenizer, context_tokens: int):
        """Listens on a free port, and starts the workers.

        Args:
          settings: settings of sampling, with an agent.
          tokenizer: tokenizer of the policy.
          context_tokens: limit of a conversation.

        Raises:
          UserError: the agent cannot be loaded, or the tokenizer has no chat template.
        """
        self._settings, self._context_tokens = settings, context_tokens
        self._model = ChatModel(tokenizer)
        self._decode = tokenizer.decode
        self.sessions = Sessions(settings.agent_seconds)
        self._sampling: _Sampling | None = None
        # Answers that are being sampled, by session and turn. Used by the event loop of the server alone.
        self._pending: dict[tuple[str, str], asyncio.Task[AssistantMessage]] = {}
        self._runner = Runner(settings.agent, self.sessions, seconds=settings.agent_seconds)
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/agents/next", self._next, methods=["POST"]),
                Route("/agents/done", self._done, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((ApiError, UserError, LiveError, Exception), _refuse),
        )
        self._server = HttpServer(app, host="127.0.0.1", port=0, max_connections=10_000)
        try:
            self._runner.start(f"http://127.0.0.1:{self._server.port}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends workers and server."""
        self._runner.close()
        self._server.stop()

    def begin(self, live: LiveLoop, options: SamplingOptions, prompts: Prompts) -> None:
        """Opens G sessions for each prompt, which `live` answers with these options."""
        one = options.replace(num_samples=1)
        self._sampling = _Sampling(LiveText(live, self._decode), one)
        sessions = [
            Session(
                prompt=n,
                sample=sample,
                prompt_id=int(prompts.ids_N[n]),
                problem=_problem(prompts, n, sample),
                conversation=Conversation(self._model, history=self._settings.history),
            )
            for n in range(len(prompts))
            for sample in range(options.num_samples)
        ]
        self.sessions.open(sessions)

    def take_done(self) -> list[Session]:
        """The sessions that have ended since the last call; what they still ask for is dropped."""
        self.sessions.end_late()
        done, sampling = self.sessions.take_done(), self._sampling
        assert sampling is not None, "sessions open with a batch"
        for session in done:
            for ticket in list(session.tickets):
                sampling.text.cancel(ticket)
        return done

    # Requests of workers

    async def _next(self, request: HttpRequest) -> Response:
        worker = _key_of(request)
        most = self._runner.heard(worker)
        until = time.monotonic() + _PATIENCE_S
        while not (taken := self.sessions.take(worker, most)) and time.monotonic() < until:
            if self.sessions.closed:
                return JSONResponse({"closed": True})
            most = self._runner.heard(worker)
            await asyncio.sleep(_LOOK_EVERY_S)
        return JSONResponse(
            {"sessions": [{"key": session.key, "problem": session.problem} for session in taken]}
        )

    async def _done(self, request: HttpRequest) -> Response:
        self._runner.heard(_key_of(request))
        body = await _body_of(request, _MAX_BODY_BYTES)
        score, error = body.get("score"), str(body.get("error", ""))
        if score is not None and not np.isfinite(score):
            score, error = None, f"gave the score {score}"
        self.sessions.end(str(body["key"]), score, error)
        return JSONResponse({})

    # Requests of agents

    async def _chat(self, request: HttpRequest) -> Response:
        session = self._session_of(request)
        body = await _body_of(request, _MAX_BODY_BYTES)
        async with session.lock:
            turn = await asyncio.to_thread(
                session.conversation.extend, body["messages"], body.get("tools") or ()
            )
        if turn.answer is None:
            key = session.key, turn.key
            if key not in self._pending:
                self._check_room(session, turn)
                task = asyncio.create_task(self._sampled(session, turn, body))
                self._pending[key] = task
                task.add_done_callback(lambda _: self._pending.pop(key, None))
            # A client that goes away may come again: its answer is sampled all the same.
            await asyncio.shield(self._pending[key])
        answer = turn.answer
        assert answer is not None, "sampled above, or before"
        finish = "tool_calls" if answer.view.calls else answer.finish
        usage = {
            "prompt_tokens": len(turn.prompt_ids),
            "completion_tokens": len(answer.tokens),
            "total_tokens": len(turn.prompt_ids) + len(answer.tokens),
        }
        choice = {"index": 0, "message": answer.view.to_message(), "finish_reason": finish}
        return JSONResponse(
            {
                "id": f"chatcmpl-{turn.key}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model", "policy"),
                "choices": [choice],
                "usage": usage,
            }
        )

    def _session_of(self, request: HttpRequest) -> Session:
        session = self.sessions.find(_key_of(request))
        if session is None:
            raise ApiError(
                401,
                "no open session has this key; an agent gets one with each problem",
                code="invalid_api_key",
            )
        return session

    def _check_room(self, session: Session, turn: Turn) -> None:
        if session.turns >= self._settings.agent_turns:
            raise ApiError(
                400,
                f"this session has had {session.turns} turns, which is rollout.agent_turns; end it",
                code="turn_limit",
            )
        if len(turn.prompt_ids) >= self._context_tokens:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._context_tokens} tokens, and this conversation "
                f"has {len(turn.prompt_ids)}; end it, or send fewer messages",
                code="context_length_exceeded",
            )
        session.turns += 1

    async def _sampled(
        self, session: Session, turn: Turn, body: dict[str, Any]
    ) -> AssistantMessage:
        """Samples the answer of a turn, and records it."""
        sampling = self._sampling
        assert sampling is not None, "sessions open with a batch"
        room = min(self._context_tokens - len(turn.prompt_ids), self._settings.max_response_tokens)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        stops = body.get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        options = sampling.options.replace(stop_strings=(*sampling.options.stop_strings, *stops))
        seed = turn_seed(session.prompt_id, session.sample, turn.prompt_ids)
        request = Request(turn.prompt_ids, min(asked, room), seed, options)
        events: asyncio.Queue[Delta | LiveError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(event: Delta | LiveError) -> None:
            # The event loop ends before the listeners do.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = sampling.text.submit(request, listen)
        session.tickets.add(ticket)
        deltas: list[Delta] = []
        try:
            while not (deltas and deltas[-1].finish):
                event = await events.get()
                if isinstance(event, LiveError):
                    raise event
                deltas.append(event)
        finally:
            session.tickets.discard(ticket)
        tokens, logprob, entropy = (
            np.concatenate([getattr(delta, name) for delta in deltas])
            for name in ("tokens", "logprob", "entropy")
        )
        version = np.concatenate([np.full(len(d.tokens), d.version, np.int32) for d in deltas])
        finish = deltas[-1].finish
        async with session.lock:
            return session.conversation.answer(
                turn, tokens, logprob, entropy, version, finish=finish, stop=options.stop_strings
            )


def _problem(prompts: Prompts, n: int, sample: int) -> dict[str, Any]:
    """The fields of `worker.Problem`."""
    name = f"{prompts.sources[n]} {prompts.ids_N[n]}"
    return {
        "prompt": prompts.texts[n],
        "answer": prompts.answers[n],
        "source": prompts.sources[n],
        "extra": dict(prompts.extras[n]),
        "seed": zlib.crc32(name.encode()),
        "sample": sample,
    }


def _key_of(request: HttpRequest) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    refusal = _as_api_error(error)
    return JSONResponse(refusal.body, refusal.status)
