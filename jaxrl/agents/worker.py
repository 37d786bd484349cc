"""The process that runs agents: it asks for sessions, runs an agent for each, and tells how each ended.

    the trainer (agents.endpoint)                   a worker: one event loop
      POST /agents/next      <------------------      asks for sessions as they open
           problem, key      ------------------>      agent(client, problem), a task each
           keys of late ones                          cancels their tasks
      POST /v1/chat/completions, ..   <--------       by the agent, with the key of its session
      POST /agents/done      <------------------      score, or what went wrong

A user's agent is trusted code, as reward functions are. What it does to its process costs the other sessions
of the process nothing but time: the trainer gives them to another one, and what they ask again is answered as
before (`agents.sessions`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import openai

from jaxrl.user_code import load_agent

# An answer may take as long as its sampling does.
_NO_LIMIT = 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """What an agent is told of its problem.

    Attributes:
      prompt: text of the prompt.
      answer: ground truth, in the notation of the grader.
      source: name of the data set.
      extra: the other fields of the row, plain JSON.
      seed: number for random choices of an environment, the same for all samples of a prompt.
      sample: number of the sample among those of its prompt.
    """

    prompt: str
    answer: str
    source: str
    extra: Mapping[str, Any]
    seed: int
    sample: int


def load_worker(path: str) -> Callable[[tuple[str, str]], None]:
    """The function of a worker: runs the sessions of a trainer until it says that there are no more.

    Args:
      path: "path/to/file.py:agent" or "package.module:agent".

    Raises:
      UserError: the agent cannot be loaded.
    """
    agent = load_agent(path)

    def run(where: tuple[str, str]) -> None:
        asyncio.run(_work(agent, *where))

    return run


async def _work(agent: Callable[..., Any], url: str, key: str) -> None:
    """Runs the sessions of the trainer at `url`, each until it ends or the trainer says so."""
    running: dict[str, asyncio.Task[None]] = {}
    http = _Connections()
    trainer = openai.AsyncOpenAI(base_url=url, api_key=key, timeout=_NO_LIMIT, http_client=http)
    try:
        while True:
            given: Any = await trainer.post("/agents/next", cast_to=object, body={})
            if given.get("closed"):
                break
            for session in given["sessions"]:
                task = asyncio.create_task(_run(agent, trainer, url, session))
                running[session["key"]] = task
                task.add_done_callback(lambda _, key=session["key"]: running.pop(key))
            for stopped in given["stopped"]:
                if stopped in running:
                    running[stopped].cancel()
    finally:
        for task in running.values():
            task.cancel()
        await http.close()


async def _run(
    agent: Callable[..., Any],
    trainer: openai.AsyncOpenAI,
    url: str,
    session: Mapping[str, Any],
) -> None:
    """Runs an agent, and sends its score or its error."""
    ended: dict[str, Any] = {"key": session["key"]}
    try:
        # Shares the connections; its key names the session.
        client = trainer.with_options(base_url=f"{url}/v1", api_key=session["key"])
        value = agent(client, Problem(**session["problem"]))
        # An agent may be a plain function; it then keeps the other sessions of the worker waiting.
        if inspect.isawaitable(value):
            value = await value
        try:
            score = None if value is None else float(value)
        except (TypeError, ValueError):
            score = math.nan
        if score is None or math.isfinite(score):
            ended["score"] = score
        else:
            rule = "which is no score; return a number or None"
            ended["error"] = f"returned {reprlib.repr(value)}, {rule}"
    # Not of a task that is cancelled: the trainer has ended its session already.
    except (Exception, SystemExit) as error:  # a user's agent may raise anything
        ended["error"] = f"{type(error).__name__}: {error}"[:1000]
    await trainer.post("/agents/done", cast_to=object, body=ended)


class _Connections(openai.DefaultAsyncHttpxClient):
    """The connections of all clients of a process, since making them takes longer than most requests."""

    # An agent that closes its client calls this, and others use the same connections.
    async def aclose(self) -> None:
        pass

    # To be awaited inside the event loop: connections that it leaves open complain at its end.
    async def close(self) -> None:
        await super().aclose()
