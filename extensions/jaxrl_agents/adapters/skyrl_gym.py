"""Environments of skyrl-gym.

    play = environment_agent(
        lambda problem: SkyRLGym(
            "gsm8k_multi_turn",
            [user_message(problem.prompt)],
            extras={"reward_spec": {"ground_truth": problem.answer}, "max_turns": 3},
        )
    )

They have no seed. A `postprocessed_action` is ignored: the policy goes on after what it has said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_agents.adapters.packages import package
from jaxrl_agents.environments import Message


class SkyRLGym:
    """A task; see `environments.Environment`."""

    def __init__(self, name: str, prompt: Sequence[Message], **options: Any):
        """Makes the task.

        Args:
          name: name of the task.
          prompt: first messages.
          **options: arguments of the task: `env_config`, `extras`.

        Raises:
          UserError: skyrl-gym is not installed.
        """
        self._task = package("skyrl_gym", "skyrl-gym>=0.4").make(name, **options)
        self._prompt = [dict(message) for message in prompt]

    def start(self, seed: int) -> Sequence[Message]:
        del seed
        messages, _ = self._task.init(self._prompt)
        return messages

    def step(self, text: str) -> tuple[Sequence[Message], float, bool]:
        taken = self._task.step(text)
        return taken["observations"], float(taken["reward"]), bool(taken["done"])

    def close(self) -> None:
        self._task.close()
