"""Plays games of another package at the same time against an endpoint, in the environment of the package.

python play_games.py ADAPTER URL KEY=SEED KEY=SEED={..} ..      prints the scores as JSON, in this order
"""

import asyncio
import json
import sys

import openai

from jaxrl.user_code import load_agent
from jaxrl_agents.environments import environment_agent, user_message
from jaxrl_agents.worker import Problem

MOVES = ("left", "down", "right", "up")


def frozen_lake(problem):
    from jaxrl_agents.adapters.gymnasium import Gymnasium

    return Gymnasium(
        "FrozenLake-v1",
        show=lambda square: f"You are on square {square}.",
        act=lambda text: MOVES.index(text) if text in MOVES else None,
        is_slippery=False,
    )


def textarena(problem):
    from jaxrl_agents.adapters.textarena import TextArena

    return TextArena("GuessTheNumber-v0-raw")


def gsm8k(problem):
    from jaxrl_agents.adapters.skyrl_gym import SkyRLGym

    extras = {"reward_spec": {"ground_truth": problem.answer}, "max_turns": 3}
    return SkyRLGym("gsm8k_multi_turn", [user_message(problem.prompt)], extras=extras)


def gem(problem):
    from jaxrl_agents.adapters.gem import Gem

    return Gem("game:GuessTheNumber-v0-easy")


def openenv_class(problem):
    import openenv_app

    from jaxrl_agents.adapters.openenv import OpenEnv

    return OpenEnv(openenv_app.Game, act=lambda text: openenv_app.Guess(number=int(text)))


def openenv_server(problem):
    from jaxrl_agents.adapters.openenv import OpenEnv

    return OpenEnv(problem.extra["url"], act=lambda text: {"number": int(text)})


def verifiers():
    from jaxrl_agents.adapters.verifiers import verifiers_agent

    agent = {"harness": {"id": "vf_guess"}, "runtime": {"type": "subprocess"}}
    return verifiers_agent(taskset={"id": "vf_guess"}, agent=agent)


def repairs():
    return load_agent("shared/repairs.py:agent")


async def main(adapter, url, *sessions):
    play = globals()[adapter]
    play = play() if adapter in ("verifiers", "repairs") else environment_agent(play)

    async def score(session):
        key, seed, *more = session.split("=", 2)
        extra = json.loads(more[0]) if more else {"task": int(seed) - 1}
        problem = Problem("What is 3 + 4?", "7", "test", extra, int(seed), 0)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            return await play(client, problem)

    print(json.dumps(await asyncio.gather(*map(score, sessions))))


asyncio.run(main(*sys.argv[1:]))
