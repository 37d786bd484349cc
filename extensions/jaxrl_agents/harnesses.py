"""Other people's harnesses as agents: programs that ask the policy, in a process or a container of their own.

    async def agent(client, problem):              # rollout.agent = "file.py:agent"
        with tempfile.TemporaryDirectory() as workspace:
            ...                                    # put the task there
            ended = await run_harness(client, ["my-harness", problem.prompt], cwd=workspace)
            return score(problem, workspace)       # after the harness, in the same place

The harness gets the policy's address and the session's key in the variables of OpenAI's clients.
docs/harnesses.md has containers.
"""

from __future__ import annotations

import asyncio
import collections
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import openai

from jaxrl_agents import guard

_MOST_BYTES = 10_000


class Ended(NamedTuple):
    """How a harness has ended.

    Attributes:
      status: exit status; negative for a signal.
      output: the end of what it has printed, at most 10,000 bytes of both streams.
    """

    status: int
    output: str


def session_url(client: openai.AsyncOpenAI, *, host: str = "") -> str:
    """The base URL of a session that needs no key, for programs that take a URL alone.

    Args:
      client: an agent's client.
      host: another name of this machine, such as "host.docker.internal"; "" keeps the endpoint's.
    """
    url = client.base_url
    return str(url.copy_with(host=host or url.host, path=f"/session/{client.api_key}/v1"))


async def run_harness(
    client: openai.AsyncOpenAI,
    command: Sequence[str],
    *,
    cwd: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    host: str = "",
) -> Ended:
    """Runs a harness to its end. It and all that it has started end with the session, however that ends.

    The variables OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY and JAXRL_SESSION_URL lead to the policy.

    Args:
      client: the agent's client.
      command: program and arguments.
      cwd: the workspace, its working directory.
      env: further variables; the other ones are those of the trainer.
      host: as for `session_url`.
    """
    url = str(client.base_url.copy_with(host=host or client.base_url.host)).rstrip("/")
    variables = {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": client.api_key,
        "JAXRL_SESSION_URL": session_url(client, host=host),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        guard.__file__,
        *command,
        cwd=cwd,
        env={**os.environ, **variables, **(env or {})},
        # Closed when the agent or its process ends, however that ends: then the guard ends the harness.
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # An interrupt of the terminal is for the trainer.
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    end: collections.deque[int] = collections.deque(maxlen=_MOST_BYTES)
    try:
        while piece := await process.stdout.read(65_536):
            end.extend(piece)
        return Ended(await process.wait(), bytes(end).decode(errors="replace"))
    finally:
        process.stdin.close()
