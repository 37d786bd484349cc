"""The process that runs agents: it asks for sessions, runs an agent for each, and tells how each ended.

    the trainer (agents.endpoint)                   a worker: one event loop
      POST /agents/next      <------------------      asks for sessions as they open
           problem, key      ------------------>      agent(client, problem), a task each
           keys of late ones                          cancels their tasks
      POST /v1/chat/completions, ..   <--------       by the agent, with the key of its session
      POST /agents/done      <------------------      score, or what went wrong

A user's agent is trusted code, as reward functions are. What it does to its process costs the other sessions
of the process nothing but time: the trainer gives them to another one, and what they ask again is answered as
before (`jaxrl_agents.sessions`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import pathlib
import reprlib
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import openai

from jaxrl.user_code import load_agent

# An answer may take as long as its sampling does.
_NO_LIMIT = 24 * 3600.0
# The most characters of an exception's text, and of the beginning and of the end of its traceback.
_MOST_CHARS, _MOST_TRACEBACK_CHARS = 1000, 10_000
_NO_SCORE = object()
_PACKAGE = pathlib.Path(__file__).parents[1]
_LIBRARIES = (_PACKAGE, *(pathlib.Path(sysconfig.get_path(x)) for x in ("stdlib", "platstdlib")))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What an agent gets of its problem.

    Attributes:
      prompt: text of the prompt.
      answer: ground truth, in the notation of the grader.
      source: name of the data set.
      extra: the other fields of the row, plain JSON.
      seed: number for random choices of an environment, the same for all samples of a prompt.
      sample: number of the sample among those of its prompt.
      clients: a client for each role of `rollout.agent_roles`, by its name.
    """

    prompt: str
    answer: str
    source: str
    extra: Mapping[str, Any]
    seed: int
    sample: int
    clients: Mapping[str, openai.AsyncOpenAI] = dataclasses.field(default_factory=dict)


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
    # Keys of the sessions that the trainer has ended.
    ended: set[str] = set()
    http = _Connections()
    trainer = openai.AsyncOpenAI(base_url=url, api_key=key, timeout=_NO_LIMIT, http_client=http)
    try:
        # A task that cannot send how its agent ended raises. It ends the group, and all sessions start again.
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    given: Any = await trainer.post("/agents/next", cast_to=object, body={})
                    if given.get("closed"):
                        break
                    for session in given["sessions"]:
                        task = tasks.create_task(_run(agent, trainer, url, session, ended))
                        running[session["key"]] = task
                        task.add_done_callback(lambda _, key=session["key"]: running.pop(key))
                    for stopped in given["stopped"]:
                        if stopped in running:
                            ended.add(stopped)
                            running[stopped].cancel()
            finally:
                ended |= running.keys()
                for task in running.values():
                    task.cancel()
    finally:
        await http.close()


async def _run(
    agent: Callable[..., Any],
    trainer: openai.AsyncOpenAI,
    url: str,
    session: Mapping[str, Any],
    ended: Set[str],
) -> None:
    """Runs an agent, and sends its score or its error, unless the trainer has ended the session."""
    told: dict[str, Any] = {"key": session["key"]}
    roles = [role for role in session["roles"] if role]
    try:
        # Shares the connections; its key names the session.
        of_key = functools.partial(trainer.with_options, base_url=f"{url}/v1")
        clients = {role: of_key(api_key=f"{session['key']}.{role}") for role in roles}
        client = of_key(api_key=session["key"])
        value = agent(client, Problem(**session["problem"], clients=clients))
        # An agent may be a plain function; it then keeps the other sessions of the worker waiting.
        if inspect.isawaitable(value):
            value = await value
        learning = [role for role in session["learning"] if role]
        score = _score_of(value, roles, learning)
        if score is not _NO_SCORE:
            told["score"] = score
        else:
            rule = "which is no score; return a number or None"
            if roles:
                rule = f"without a number for each role; return a dict of {', '.join(learning)}"
            code = getattr(inspect.unwrap(agent), "__code__", None)
            place = ""
            if code is not None and _is_users(code.co_filename):
                place = f" ({code.co_filename}:{code.co_firstlineno})"
            told["error"] = f"returned {reprlib.repr(value)}, {rule}{place}"
    # A user's agent may raise anything.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # Not by whether the task was cancelled: `asyncio.TaskGroup` cancels it, too.
        if session["key"] in ended:
            return
        told |= _described(error)
    send = functools.partial(trainer.post, "/agents/done", cast_to=object)
    try:
        await send(body=told)
    # Such as an agent that has cancelled its task, or has changed the client.
    except (Exception, asyncio.CancelledError) as error:
        if session["key"] not in ended:
            await send(body={"key": session["key"], **_described(error)})


def _score_of(value: Any, roles: Sequence[str], learning: Sequence[str]) -> Any:
    """What the agent has returned as plain numbers; `_NO_SCORE` if it is none, or lacks one that learns."""
    try:
        if roles:
            score = {role: float(value[role]) for role in roles if role in {*learning, *value}}
            return score if all(map(math.isfinite, score.values())) else _NO_SCORE
        score = None if value is None else float(value)
        return score if score is None or math.isfinite(score) else _NO_SCORE
    except (TypeError, ValueError, OverflowError, LookupError):
        return _NO_SCORE


def _described(error: BaseException) -> dict[str, str]:
    """The `error` with the place in the user's code, and the `traceback`, as text that can be sent."""
    # Of several exceptions that were raised together the first is named.
    chain = [error]
    while isinstance(chain[-1], BaseExceptionGroup):
        chain.append(chain[-1].exceptions[0])
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    # The innermost line of the user; of a failure in a library the line that has called it.
    places = [frame for frame in frames if _is_users(frame.filename)]
    # None if the agent is one of this package, such as that of an environment.
    places = places or [x for x in frames[1:] if pathlib.Path(x.filename).is_relative_to(_PACKAGE)]
    place = f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
    assert error.__traceback__ is not None, "it was raised"
    # Without the frame of this module.
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    whole, most = "".join(lines), _MOST_TRACEBACK_CHARS
    found = {
        "error": ": ".join(map(_named, chain))[:_MOST_CHARS] + place,
        "traceback": whole if len(whole) <= 2 * most else f"{whole[:most]}\n[...]\n{whole[-most:]}",
    }
    # Text of a model may have lone surrogates, which JSON in UTF-8 does not.
    return {k: v.encode(errors="backslashreplace").decode() for k, v in found.items()}


def _named(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the exception is the user's, too
        return f"{type(error).__name__}, whose text raises an exception"


def _is_users(filename: str) -> bool:
    """Whether a file is the user's, and not of Python, an installed package or this one."""
    path = pathlib.Path(filename)
    installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    library = installed or any(map(path.is_relative_to, _LIBRARIES))
    return not (library or filename.startswith("<frozen"))


class _Connections(openai.DefaultAsyncHttpxClient):
    """The connections of all clients of a process, since making them takes longer than most requests."""

    # An agent that closes its client calls this, and others use the same connections.
    async def aclose(self) -> None:
        pass

    # To be awaited inside the event loop: connections that it leaves open complain at its end.
    async def close(self) -> None:
        await super().aclose()
