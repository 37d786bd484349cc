"""The policy of a run in memory, served for a while: for notebooks and programs beside a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.roles.policy import Actor
from jaxrl.rollout.driver import OfflineBackend
from jaxrl_agents.agent_backend import AgentBackend
from jaxrl_serving.http_server import HttpServer
from jaxrl_serving.online_driver import OnlineDriver
from jaxrl_serving.openai.endpoint import build_app

_MODEL = "policy"
_MAX_BODY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Served:
    """An OpenAI-compatible endpoint on this machine.

    Attributes:
      url: base URL for clients, with "/v1" at its end.
      key: key that requests must send.
      model: name of the policy in requests.
    """

    url: str
    key: str
    model: str = _MODEL


@contextlib.contextmanager
def served(actor: Actor, tokenizer: Tokenizer) -> Iterator[Served]:
    """Serves the actor's current weights inside a `with` block, in which nothing else may use the actor."""
    actor.for_sampling()
    backend = actor.backend
    engine = backend.inner if isinstance(backend, AgentBackend) else backend
    assert isinstance(engine, OfflineBackend), "a run with another backend has no engine of ours"
    sizes, key = engine.engine.config, secrets.token_urlsafe(18)
    with OnlineDriver(engine.engine, engine.params, tokenizer.decode) as driver:
        app = build_app(driver, tokenizer, _MODEL, sizes, max_body_bytes=_MAX_BODY_BYTES)
        server = HttpServer(app, host="127.0.0.1", port=0, api_key=key)
        try:
            yield Served(f"http://127.0.0.1:{server.port}/v1", key)
        finally:
            server.stop()
