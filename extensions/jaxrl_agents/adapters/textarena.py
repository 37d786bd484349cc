"""Games of TextArena for one player.

    play = environment_agent(lambda problem: TextArena("GuessTheNumber-v0-raw"))

A game of several players would need somebody who plays the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl_agents.adapters.own_random import OwnRandom
from jaxrl_agents.adapters.packages import package
from jaxrl_agents.environments import Message, user_message


class TextArena:
    """A game; see `environments.Environment`. TextArena seeds Python's generator: each game has its own."""

    def __init__(self, name: str, **options: Any):
        """Makes the game.

        Args:
          name: name of the game with "-raw", whose observations are what is new. Others repeat the history.
          **options: options of the game.

        Raises:
          UserError: TextArena is not installed, or the name is another.
        """
        textarena = package("textarena", "textarena>=0.7.4")
        if not name.endswith("-raw"):
            raise UserError(f"TextArena's {name!r} repeats its history in each message; add -raw")
        self._game = textarena.make(name, **options)
        self._own_moves = textarena.ObservationType.PLAYER_ACTION

    def start(self, seed: int) -> Sequence[Message]:
        self._random = OwnRandom(seed)
        self._random(self._game.reset, num_players=1, seed=seed)
        return self._new_messages()

    def step(self, text: str) -> tuple[Sequence[Message], float, bool]:
        done, _ = self._random(self._game.step, text)
        # Rewards come with the end.
        reward = self._game.close()[0][0] if done else 0.0
        return self._new_messages(), float(reward), done

    def close(self) -> None:
        """Nothing to end."""

    def _new_messages(self) -> list[Message]:
        _, told = self._game.get_observation()
        text = "\n".join(text for _, text, kind in told if kind is not self._own_moves)
        return [user_message(text)]
