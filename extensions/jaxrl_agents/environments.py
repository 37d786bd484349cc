"""Environments as agents: games and tasks that answer with messages, rewards and an end.

    def guess(problem):            # a file of one's own
        return GuessTheNumber()

    play = environment_agent(guess)        # rollout.agent = "file.py:play"

The environment decides what the policy reads; the policy answers with a turn of text. Environments of other
packages: `jaxrl_agents.adapters`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import openai

from jaxrl_agents.worker import Problem

Message = Mapping[str, Any]

# Codes of the endpoint's refusals at which a conversation is over, as it stands.
LIMITS = ("context_length_exceeded", "turn_limit")


def user_message(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


class Environment(Protocol):
    """A task of several turns. One object plays one game."""

    def start(self, seed: int) -> Sequence[Message]:
        """Begins; returns the first messages. Random choices follow from the seed alone."""
        ...

    def step(self, text: str) -> tuple[Sequence[Message], float, bool]:
        """Takes a turn of the policy; returns the answering messages, its reward, and whether it ends."""
        ...

    def close(self) -> None:
        """Ends the game; called once, however it ended."""
        ...


def environment_agent(
    make: Callable[[Problem], Environment], *, discount: float = 1.0, **request: Any
) -> Callable[[openai.AsyncOpenAI, Problem], Awaitable[float]]:
    """An agent that plays an environment; its score is the discounted sum of the rewards of its turns.

    A conversation that reaches a limit is over, with the rewards so far. Calls of the environment run in a
    thread, since they may wait for other programs.

    Args:
      make: function of a problem that makes an environment.
      discount: factor of the reward of each further turn.
      **request: further arguments of each request, such as `max_tokens` or `stop`.
    """

    async def agent(client: openai.AsyncOpenAI, problem: Problem) -> float:
        environment = await asyncio.to_thread(make, problem)
        try:
            messages: list[Any] = [*await asyncio.to_thread(environment.start, problem.seed)]
            score, weight = 0.0, 1.0
            while True:
                try:
                    answer: Any = await client.chat.completions.create(
                        model="policy", messages=messages, **request
                    )
                except openai.BadRequestError as error:
                    if error.code in LIMITS:
                        return score
                    raise
                text = answer.choices[0].message.content or ""
                given, reward, done = await asyncio.to_thread(environment.step, text)
                score, weight = score + weight * reward, weight * discount
                if done:
                    return score
                messages += [{"role": "assistant", "content": text}, *given]
        finally:
            await asyncio.to_thread(environment.close)

    return agent
