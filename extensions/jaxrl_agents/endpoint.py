"""The endpoint of a run's agents: their requests, and the worker processes that run them.

    POST /v1/chat/completions     by an agent, with the key of its session
    POST /inference/v1/generate   by one that renders its prompts itself
    /session/KEY/...              the same for programs that take a URL alone: the key is in it
    POST /agents/next, /done      by a worker, with its own key: `worker`

Other requests are refused, since `rollout.agent_host` may be an address on a network. A chat's prompt comes
from its session (`session_prompts`). Completions are refused: no session has them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl.rollout.live_loop import LiveLoop
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.settings import EngineConfig
from jaxrl_agents.conversation import ChatModel
from jaxrl_agents.runner import Runner
from jaxrl_agents.session_prompts import SessionPrompts
from jaxrl_agents.sessions import Session, Sessions
from jaxrl_serving.http_server import HttpServer
from jaxrl_serving.online_driver import LiveText
from jaxrl_serving.openai.endpoint import body_of, build_app, keys_of
from jaxrl_serving.openai.protocol import ApiError

_MAX_BODY_BYTES = 10_000_000
_MOST_CONNECTIONS = 10_000
# The name of the policy in requests.
_MODEL = "policy"
_SESSION = "/session/"


def _with_keys(app: ASGIApp, knows: Callable[[str], bool]) -> ASGIApp:
    """Takes the key out of a URL, and refuses requests without a key that `knows` finds."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(_SESSION):
            key, _, rest = path.removeprefix(_SESSION).partition("/")
            scope = dict(scope) | {"path": f"/{rest}", "raw_path": f"/{rest}".encode()}
            scope["headers"] = list(scope["headers"])
            headers = MutableHeaders(scope=scope)
            # A program that needs a key of some kind sends one that says nothing.
            headers["authorization"] = f"Bearer {key}"
            del headers["x-session-id"]
        if any(map(knows, keys_of(Request(scope)))):
            await app(scope, receive, send)
        else:
            fault = "send the key of an open session: Authorization: Bearer KEY, or the URL /session/KEY/v1"
            refusal = ApiError(fault, status=401, code="invalid_api_key")
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)

    return answer


class Endpoint:
    """The sessions of a run, answered over HTTP.

    Attributes:
      sessions: the sessions.
    """

    def __init__(
        self, live: LiveLoop, settings: RolloutConfig, model: ChatModel, sizes: EngineConfig
    ):
        """Listens on a free port of `agent_host`, and starts the workers.

        Args:
          live: loop that answers the requests; the caller turns it.
          settings: settings of sampling, with an agent.
          model: chat format of the policy.
          sizes: sizes of the engine.

        Raises:
          UserError: the agent cannot be loaded, or this machine does not have the address.
        """
        self.sessions = Sessions(settings.agent_seconds)
        # Set, and replaced by another, when there are news of the sessions.
        self._news = asyncio.Event()
        self._prompts = SessionPrompts(model, self.sessions, most_turns=settings.agent_turns)
        self._runner = Runner(settings.agent, self.sessions, seconds=settings.agent_seconds)
        app = build_app(
            LiveText(live, model.tokenizer.decode),
            model.tokenizer,
            _MODEL,
            sizes,
            max_body_bytes=_MAX_BODY_BYTES,
            prompts=self._prompts,
        )
        for route, answer in (("next", self._next), ("done", self._done)):
            app.routes.append(Route(f"/agents/{route}", answer, methods=["POST"]))
        self._server = HttpServer(
            _with_keys(app, lambda key: self._runner.knows(key) or bool(self.sessions.find(key))),
            host=settings.agent_host,
            port=0,
            max_connections=_MOST_CONNECTIONS,
            checks_keys=True,
        )
        try:
            self._runner.start(self._server.url)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._runner.close()
        self._server.stop()

    def go_on(self, new: Iterable[Session], version: int) -> None:
        """Answers requests with weights of this version, those of new sessions too."""
        self._prompts.version = version
        self.sessions.go_on()
        self.sessions.open(new)

    def take_done(self) -> list[Session]:
        """The sessions that have ended since the last call, in that order.

        Raises:
          UserError: a worker was to start again, and the agent cannot be loaded any more.
        """
        self._runner.check()
        self.sessions.end_late()
        return self.sessions.take_done()

    # Requests of workers

    async def _next(self, request: Request) -> Response:
        _, worker = keys_of(request)
        loop = asyncio.get_running_loop()
        # Set here, where the event loop of the server is known.
        self.sessions.on_news = lambda: loop.call_soon_threadsafe(self._pass_on)
        # A worker asks again well before its silence would count as a hang.
        until = loop.time() + self._runner.silent_s / 4
        while True:
            # The event is taken before the look, so that news in between are not missed.
            news, most = self._news, self._heard(worker)
            taken = self.sessions.take(worker, most)
            stopped = self.sessions.take_stopped(worker)
            if taken or stopped or loop.time() >= until:
                sessions = [
                    {
                        **{"key": x.key, "problem": x.problem},
                        **{"roles": [*x.conversations], "learning": [*x.learning]},
                    }
                    for x in taken
                ]
                return JSONResponse({"sessions": sessions, "stopped": stopped})
            if self.sessions.closed:
                return JSONResponse({"closed": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await news.wait()

    def _pass_on(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _done(self, request: Request) -> Response:
        _, worker = keys_of(request)
        self._heard(worker)
        body = await body_of(request, _MAX_BODY_BYTES)
        told = (body.get(name, "") for name in ("error", "traceback"))
        self.sessions.end(body["key"], body.get("score"), *told)
        return JSONResponse({})

    def _heard(self, worker: str) -> int:
        """Notes that a worker lives; returns how many sessions it may run."""
        try:
            return self._runner.heard(worker)
        except KeyError as error:
            fault = "only workers of this run ask this"
            raise ApiError(fault, status=401, code="invalid_api_key") from error
