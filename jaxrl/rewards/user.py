"""Reward functions of a user, named in a config by where they are (`user_code`).

They run once a step, on all responses; in a run, in a process of their own (`process_pool`), so that one
that hangs can be ended. What the responses hold is not trusted: parse it, never evaluate it, and bound the
work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl.errors import UserError
from jaxrl.process_pool import ProcessPool, WorkerFault
from jaxrl.rewards.terms import checked_scores
from jaxrl.types import Completions, TurnText
from jaxrl.user_code import load_function

Of = TypeVar("Of")


@dataclasses.dataclass(frozen=True)
class Responses:
    """What a user's function scores: B responses, each with what it answers.

    A prompt's `num_samples` responses lie side by side. Where an environment answers the policy's turns,
    texts and tokens are those of the whole conversation; what the policy itself wrote is in `policy_texts`.

        texts         "6 * 7 is <ask>42 Answer: 42"
        turns         (True, "6 * 7 is <ask>"), (False, "42"), (True, " Answer: 42")
        policy_texts  "6 * 7 is <ask>\\n Answer: 42"

    Attributes:
      prompts: B texts, as the model saw them, template included.
      texts: B responses, without special tokens.
      policy_texts: B texts, the policy's turns alone, a line apart: what graders see.
      turns: of B responses, turn by turn, each with `by_policy` and `text`.
      answers: B ground truths.
      sources: B names of data sets.
      extras: B mappings, what else the rows of the data hold (`types.Prompts.extras`).
      tokens: B int32 arrays, the responses' tokens, end-of-sequence included.
      mask: B float32 arrays, 1 on tokens that the policy drew, 0 on those of an environment.
      truncated_B: bool, the length limit came before end-of-sequence.
      num_samples: G, responses to each prompt.
    """

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    policy_texts: tuple[str, ...]
    turns: tuple[tuple[TurnText, ...], ...]
    answers: tuple[str, ...]
    sources: tuple[str, ...]
    extras: tuple[Mapping[str, Any], ...]
    tokens: tuple[np.ndarray, ...]
    mask: tuple[np.ndarray, ...]
    truncated_B: np.ndarray
    num_samples: int

    def __len__(self) -> int:
        return len(self.texts)

    @staticmethod
    def of(completions: Completions) -> Responses:
        """The completions, what belongs to a prompt repeated for each response to it."""
        prompts = completions.prompts

        def repeated(values: tuple[Of, ...]) -> tuple[Of, ...]:
            return tuple(values[n] for n in completions.prompt_index_B)

        return Responses(
            prompts=repeated(prompts.texts),
            texts=completions.texts,
            policy_texts=completions.policy_texts,
            turns=completions.turns,
            answers=repeated(prompts.answers),
            sources=repeated(prompts.sources),
            extras=repeated(prompts.extras),
            tokens=completions.tokens,
            mask=completions.mask,
            truncated_B=completions.truncated_B,
            num_samples=completions.num_samples,
        )


RewardFunction = Callable[[Responses], Sequence[float] | np.ndarray]
"""Scores of B responses, a finite number each."""


def user_reward(path: str) -> Callable[[Completions], np.ndarray]:
    """The scores, float32 [B], of the reward function at `path`.

    Args:
      path: "package.module:function" or "path/to/file.py:function".

    Returns:
      A function of completions. It raises UserError where the function returns something else than a finite
      number for each response; what the function itself raises passes through, with a note of its path.

    Raises:
      UserError: the path has another form, its module is the program that runs or cannot be imported or has
        no such function, or the function does not take the responses alone.
    """
    scores = _function_of_responses(path)
    return lambda completions: scores(Responses.of(completions))


def _function_of_responses(path: str) -> Callable[[Responses], np.ndarray]:
    function: RewardFunction = load_function(
        path, "reward function", takes=("responses",), own_process=True
    )

    def scores(responses: Responses) -> np.ndarray:
        try:
            values = function(responses)
        except Exception as error:
            error.add_note(f"raised by the reward function {path!r}")
            raise
        return checked_scores(values, len(responses), f"reward function {path!r}")

    return scores


class UserRewards:
    """The reward functions of a run, all in one process that is started once. Close it after use."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        timeout_s: float,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        """Imports the functions.

        Args:
          paths: as for `user_reward`; none of them starts no process.
          timeout_s: seconds that a function may take for the responses of a step.
          interrupted: asked now and then while one runs; True ends it.

        Raises:
          UserError: as of `user_reward`.
        """
        self._interrupted = interrupted
        self._pool = ProcessPool(
            paths,
            _function_of_responses,
            what="reward function",
            patience_s=timeout_s,
            start_s=timeout_s,
        )
        if paths:
            self._pool.start()

    def close(self) -> None:
        """Ends the process."""
        self._pool.close()

    def scores(self, path: str, completions: Completions) -> np.ndarray:
        """What the function at `path` gives the completions, float32 [B].

        Raises:
          UserError: it returned something else than a finite number for each response, raised an exception,
            ended its process, or took too long.
          Interrupted: the wait was ended.
        """
        try:
            return self._pool.call(path, Responses.of(completions), interrupted=self._interrupted)
        except WorkerFault as fault:
            remedy = "; bound its work, or raise reward.functions_timeout_s"
            raise UserError(f"{fault}{remedy if fault.kind == 'timeout' else ''}") from fault
