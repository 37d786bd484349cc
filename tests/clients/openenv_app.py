"""A game of OpenEnv: guess a number. `uvicorn openenv_app:app` serves it."""

import random

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number, self._turns = random.Random(seed).randint(1, 20), 0
        return Hint(text="Guess my number from 1 to 20.")

    def step(self, action, timeout_s=None, **kwargs):
        self._turns += 1
        if action.number == self._number:
            return Hint(text="Yes.", done=True, reward=1.0)
        text = "higher" if self._number > action.number else "lower"
        return Hint(text=f"It is {text}.", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self._turns)


app = create_app(Game, Guess, Hint, max_concurrent_envs=4)
