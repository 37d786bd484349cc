"""Environments of OpenEnv: a server's, or a class in this process.

    OpenEnv("http://127.0.0.1:8000", act=lambda text: {"message": text})
    OpenEnv(EchoEnvironment, act=lambda text: EchoAction(message=text))

A server must allow a session for each sample (`max_concurrent_envs`). UserError if OpenEnv is not installed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_agents.adapters.packages import package
from jaxrl_agents.environments import Message, user_message


def show_fields(fields: Mapping[str, Any]) -> str:
    """The only field, or all fields as JSON."""
    return str(*fields.values()) if len(fields) == 1 else json.dumps(fields, ensure_ascii=False)


class OpenEnv:
    """An environment; see `environments.Environment`."""

    def __init__(
        self,
        where: str | Callable[[], Any],
        *,
        act: Callable[[str], Any],
        show: Callable[[Mapping[str, Any]], str] = show_fields,
        **reset: Any,
    ):
        """Connects to the server, or makes the environment.

        Args:
          where: URL of a server, or a class or function that makes an environment in this process.
          act: function from the policy's text to an action: an `Action`, for a server also its fields.
          show: function from the fields of an observation to text.
          **reset: arguments of `reset` besides the seed, such as `split` and `index`.
        """
        core = package("openenv.core", "openenv>=0.10")
        self._task = where() if callable(where) else core.GenericEnvClient(base_url=where).sync()
        self._act, self._show, self._reset = act, show, reset

    def start(self, seed: int) -> Sequence[Message]:
        return self._told(self._task.reset(seed=seed, **self._reset))

    def step(self, text: str) -> tuple[Sequence[Message], float, bool]:
        result = self._task.step(self._act(text))
        return self._told(result), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        self._task.close()

    def _told(self, result: Any) -> list[Message]:
        # A server's result has the observation in it; that of a class is the observation.
        remote = not hasattr(result, "model_dump")
        fields = result.observation if remote else result.model_dump(mode="json")
        told = {k: v for k, v in fields.items() if k not in ("done", "reward", "metadata")}
        return [user_message(self._show(told))]
