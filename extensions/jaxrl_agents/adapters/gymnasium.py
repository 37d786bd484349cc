"""Environments of Gymnasium.

    MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
    show = "You are on square {}. Say left, down, right or up.".format
    play = environment_agent(lambda problem: Gymnasium("FrozenLake-v1", show=show, act=MOVES.get))

The seed of a problem seeds the game.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.errors import UserError
from jaxrl_agents.adapters.packages import package
from jaxrl_agents.environments import Message, user_message


class Gymnasium:
    """A game; see `environments.Environment`."""

    def __init__(
        self,
        game: Any,
        *,
        show: Callable[[Any], str] = str,
        act: Callable[[str], Any] | None = None,
        **options: Any,
    ):
        """Makes the game. Raises UserError if Gymnasium is not installed, or `act` is missing.

        Args:
          game: name of the game, with its options, or an object.
          show: function from an observation to text.
          act: function from the policy's text to an action, or to None if it is none. None for texts.
            Such a turn has no reward, and the game does not see it.
        """
        gymnasium = package("gymnasium", "gymnasium>=1.0")
        self._game = gymnasium.make(game, **options) if isinstance(game, str) else game
        actions = self._game.action_space
        if act is None and not isinstance(actions, gymnasium.spaces.Text):
            raise UserError(
                f"actions of {self._game} are {actions}; give Gymnasium a function act="
            )
        self._show = show
        self._act = act or (lambda text: text if actions.contains(text) else None)

    def start(self, seed: int) -> Sequence[Message]:
        observation, _ = self._game.reset(seed=seed)
        return [user_message(self._show(observation))]

    def step(self, text: str) -> tuple[Sequence[Message], float, bool]:
        action = self._act(text)
        if action is None:
            return [user_message("This is no action.")], 0.0, False
        observation, reward, terminated, truncated, _ = self._game.step(action)
        return [user_message(self._show(observation))], float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._game.close()
