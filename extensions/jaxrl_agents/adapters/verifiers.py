"""Runs of verifiers 0.4 as an agent.

    play = verifiers_agent(
        taskset={"id": "my_tasks"},
        agent={"harness": {"id": "my_harness"}, "runtime": {"type": "subprocess"}},
    )

    harness --> proxy of verifiers --> endpoint of the run, which keeps the tokens and log-probabilities
    trace   --> its rewards are the score

A problem names its task: `problem.extra["task"]` is its number in the taskset. verifiers sends the id of a
trace with every request (X-Session-ID). Here that id is the key of the session, whose tokens are exact. So
its renderers are not needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from jaxrl.errors import UserError
from jaxrl_agents.adapters.packages import package
from jaxrl_agents.environments import LIMITS
from jaxrl_agents.worker import Problem

# A variable that is not set: clients of verifiers then send no key of a cloud.
_NO_KEY = "JAXRL_NO_KEY"


def verifiers_agent(**config: Any) -> Callable[[openai.AsyncOpenAI, Problem], Awaitable[float]]:
    """An agent that runs tasks of verifiers.

    All trained agents of an environment speak in the same session. Others need a client of their own.

    Args:
      **config: the environment as verifiers' `[env]` has it: `taskset`, `agent`, `id`, ..

    Returns:
      An agent whose score is the sum of the weighted rewards. A run that ends at a limit of the session has
      those that verifiers gave it, or 0.
    """
    # One environment for the runs of a worker, until its event loop ends.
    opened: list[tuple[asyncio.Future[_Served], asyncio.Task[None]]] = []

    async def agent(client: openai.AsyncOpenAI, problem: Problem) -> float:
        clients = package("verifiers.v1.clients", "verifiers>=0.4,<0.5")
        if not opened:
            # Nothing is awaited before the append, so runs that begin together find one environment.
            ready = asyncio.get_running_loop().create_future()
            opened.append((ready, asyncio.create_task(_serve(config, ready))))
        # A session that is stopped cancels its own wait, not the future that all others wait for.
        served = await asyncio.shield(opened[0][0])
        endpoint = clients.EvalClientConfig(base_url=str(client.base_url), api_key_var=_NO_KEY)

        def name(trace: Any) -> None:
            if trace.agent.trainable:
                trace.id = client.api_key

        episode = await served.env.run_episode(
            served.task(problem.extra["task"]),
            clients.ModelContext(model="policy", client=endpoint),
            on_trace=name,
        )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        for error in errors:
            if not any(limit in error.message for limit in LIMITS):
                raise RuntimeError(f"verifiers: {error.type}: {error.message}")
        return sum(trace.reward for trace in episode.traces if trace.agent.trainable)

    return agent


class _Served:
    """An environment of verifiers that is served."""

    def __init__(self, config: dict[str, Any]):
        loaders = package("verifiers.v1.utils.loaders", "verifiers>=0.4,<0.5")
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self._tasks: list[Any] = []
        self._more = iter(self.env.taskset)

    def task(self, number: int) -> Any:
        """The task of a number; tasks are loaded as far as they are asked for."""
        while len(self._tasks) <= number:
            task = next(self._more, None)
            if task is None:
                raise UserError(
                    f"the taskset {self.env.config.taskset.id!r} has no task {number}; the problem's field "
                    f"task may be 0 to {len(self._tasks) - 1}"
                )
            self._tasks.append(task)
        return self._tasks[number]


async def _serve(config: dict[str, Any], ready: asyncio.Future[_Served]) -> None:
    try:
        served = await asyncio.to_thread(_Served, config)
        async with served.env.serving():
            ready.set_result(served)
            await asyncio.Event().wait()
    except Exception as error:  # a user's taskset may raise anything
        if ready.done():
            raise
        ready.set_exception(error)
