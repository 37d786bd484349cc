"""Environments of GEM (gem-llm).

    play = environment_agent(lambda problem: Gem("game:GuessTheNumber-v0-easy"))

GEM needs Python 3.12.0 or older, and an older reasoning-gym than the extra `tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_agents.adapters.own_random import OwnRandom
from jaxrl_agents.adapters.packages import package
from jaxrl_agents.environments import Message, user_message


class Gem:
    """A game; see `environments.Environment`. GEM seeds the global generators: each game has its own."""

    def __init__(self, name: str, **options: Any):
        """Makes nothing yet.

        Args:
          name: name of the game.
          **options: options of the game.

        Raises:
          UserError: GEM is not installed.
        """
        self._gem = package("gem", "gem-llm>=0.1")
        self._name, self._options = name, options

    def start(self, seed: int) -> Sequence[Message]:
        self._random = OwnRandom(seed)
        # Games draw when they are made, too.
        self._game = self._random(self._gem.make, self._name, **self._options)
        observation, info = self._random(self._game.reset, seed=seed)
        return _told(observation, info)

    def step(self, text: str) -> tuple[Sequence[Message], float, bool]:
        observation, reward, terminated, truncated, info = self._random(self._game.step, text)
        return _told(observation, info), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """Nothing to end."""


def _told(observation: str, info: Mapping[str, Any]) -> list[Message]:
    """An observation with what GEM's own wrappers put before and after it."""
    around = (info.get("prefix", ""), observation, info.get("suffix", ""))
    return [user_message("\n".join(part.strip("\n") for part in around if part))]
